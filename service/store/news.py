"""News for a node from its store, its lease and its neighbours: values, told in the event loop without waiting."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from service.conversations.job.job import JobId
from service.errors import StoreError


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report of itself: its models, and how many turns of each job are ready and in flight."""

    node_id: str
    models: Sequence[str]
    counts: Mapping[JobId, Sequence[int]]


class Neighbours(Protocol):
    """A node's knowledge of the others."""

    def models(self) -> frozenset[str]:
        """Return the models that others have."""

    def known_models(self) -> frozenset[str]:
        """Return the models that others have or had: one that is away may be back."""

    def counts(self, job_id: JobId) -> tuple[int, int]:
        """Return how many turns of a job are ready and in flight elsewhere, as of a moment ago."""


class Alone:
    """There are none: a ``Neighbours``."""

    def models(self) -> frozenset[str]:
        """Return none."""
        return frozenset()

    def known_models(self) -> frozenset[str]:
        """Return none."""
        return frozenset()

    def counts(self, _job_id: JobId) -> tuple[int, int]:
        """Return none."""
        return 0, 0


class JobsCommitted(msgspec.Struct, frozen=True, kw_only=True):
    """This node's writes to these jobs are durable, ``seconds`` after they were handed in."""

    job_ids: frozenset[JobId]
    seconds: float = 0.0


class JobsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Other nodes have written to these jobs."""

    job_ids: frozenset[JobId]


class StoreTroubled(msgspec.Struct, frozen=True, kw_only=True):
    """The database cannot be written to; ``outage`` says why, in plain words."""

    outage: str


class StoreRecovered(msgspec.Struct, frozen=True, kw_only=True):
    """The database is well again, and what was kept is written."""


class ClaimsLost(msgspec.Struct, frozen=True, kw_only=True):
    """Another node has taken over this one's claims; its late results are refused."""


class WritesFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A write failed that no waiting will mend: nothing is written any more."""

    error: StoreError


class FactsLost(msgspec.Struct, frozen=True, kw_only=True):
    """So many facts can never be written, and are lost; the conversations that they were of have ended as failed."""

    count: int
    conversations: tuple[tuple[JobId, str], ...]


class LeaseEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The lease may end before it can be renewed."""


class LeaseRenewed(msgspec.Struct, frozen=True, kw_only=True):
    """The lease is good, and what the neighbours have is known anew."""


class LeaseLost(msgspec.Struct, frozen=True, kw_only=True):
    """The lease is over: another node may have taken over."""


class WorkWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """There is something to claim."""


WriterEvent = StoreTroubled | StoreRecovered | ClaimsLost | FactsLost | WritesFailed
LeaseEvent = JobsChanged | LeaseEnding | LeaseRenewed | LeaseLost | WorkWaiting
StoreEvent = JobsCommitted | WriterEvent | LeaseEvent
Tell = Callable[[StoreEvent], None]

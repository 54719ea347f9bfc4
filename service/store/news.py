"""News for a node from its store, its lease and its neighbours: values, told in the event loop without waiting."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.conversations.job import JobId
from service.errors import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsCommitted:
    """This node's writes to these jobs are durable, ``seconds`` after they were handed in."""

    job_ids: frozenset[JobId]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsChanged:
    """Other nodes have written to these jobs."""

    job_ids: frozenset[JobId]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTroubled:
    """The database cannot be written to; ``outage`` says why, in plain words."""

    outage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRecovered:
    """The database is well again, and what was kept is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsLost:
    """Another node has taken over this one's claims; its late results are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed:
    """A write failed that no waiting will mend: nothing is written any more."""

    error: StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsLost:
    """So many facts can never be written, and are lost; the conversations that they were of have ended as failed."""

    count: int
    conversations: tuple[tuple[JobId, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnding:
    """The lease may end before it can be renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """The lease is good, and what the neighbours have is known anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """The lease is over: another node may have taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkWaiting:
    """There is something to claim."""


WriterEvent = StoreTroubled | StoreRecovered | ClaimsLost | FactsLost | WritesFailed
LeaseEvent = JobsChanged | LeaseEnding | LeaseRenewed | LeaseLost | WorkWaiting
StoreEvent = JobsCommitted | WriterEvent | LeaseEvent
Tell = Callable[[StoreEvent], None]

"""News for a node from its store, its lease and its neighbours: values, delivered in the event loop without waiting."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from service.conversations.job.job import JobId
from service.errors import StoreError


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A node's report: its models, and the number of ready and in-flight turns of each job."""

    node_id: str
    models: Sequence[str]
    counts: Mapping[JobId, Sequence[int]]


class Neighbours(Protocol):
    """The other nodes, as this one knows them."""

    def models(self) -> frozenset[str]:
        """Return the models of other nodes."""

    def known_models(self) -> frozenset[str]:
        """Return the models of other nodes, absent ones included: they may come back."""

    def counts(self, job_id: JobId) -> tuple[int, int]:
        """Return the numbers of a job's turns that are ready and in flight elsewhere, as of a moment ago."""


class Alone:
    """No other nodes (a ``Neighbours``)."""

    def models(self) -> frozenset[str]:
        """Return no models."""
        return frozenset()

    def known_models(self) -> frozenset[str]:
        """Return no models."""
        return frozenset()

    def counts(self, _job_id: JobId) -> tuple[int, int]:
        """Return zero."""
        return 0, 0


class JobsCommitted(msgspec.Struct, frozen=True, kw_only=True):
    """This node's writes to these jobs are durable, ``seconds`` after they were submitted."""

    job_ids: frozenset[JobId]
    seconds: float = 0.0


class JobsChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Other nodes have written to these jobs."""

    job_ids: frozenset[JobId]


class StoreTroubled(msgspec.Struct, frozen=True, kw_only=True):
    """The database cannot be written to; ``outage`` describes the reason."""

    outage: str


class StoreRecovered(msgspec.Struct, frozen=True, kw_only=True):
    """The database works again, and all pending facts are written."""


class ClaimsLost(msgspec.Struct, frozen=True, kw_only=True):
    """Another node has taken over this node's claims; its late results are refused."""


class WritesFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A write has failed for good; no more writes follow."""

    error: StoreError


class FactsLost(msgspec.Struct, frozen=True, kw_only=True):
    """These facts can never be written and are lost; their ``conversations`` have ended as failed."""

    count: int
    conversations: tuple[tuple[JobId, str], ...]


class LeaseEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The lease may end before it can be renewed."""


class LeaseRenewed(msgspec.Struct, frozen=True, kw_only=True):
    """The lease is valid, and the other nodes' models were read again."""


class LeaseLost(msgspec.Struct, frozen=True, kw_only=True):
    """The lease is over: another node may have taken over."""


class WorkWaiting(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation can be claimed."""


WriterEvent = StoreTroubled | StoreRecovered | ClaimsLost | FactsLost | WritesFailed
LeaseEvent = JobsChanged | LeaseEnding | LeaseRenewed | LeaseLost | WorkWaiting
StoreEvent = JobsCommitted | WriterEvent | LeaseEvent
Tell = Callable[[StoreEvent], None]

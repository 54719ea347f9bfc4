"""What a node knows of others on the same store, and the node that has none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.conversations.job import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node tells of itself: its models, and how many turns of each job are ready and in flight."""

    node_id: str
    models: Sequence[str]
    counts: Mapping[JobId, Sequence[int]]


class Neighbours(Protocol):
    """What a node knows of the others."""

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

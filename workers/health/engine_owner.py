"""The worker as the judges of its engine's health see it, and the means that they have."""

from collections.abc import Mapping
from typing import Protocol

from workers.outcome import FailureReason
from workers.requests.in_flight import InFlightRequest

Suspects = Mapping[InFlightRequest, FailureReason]  # who may have broken an engine, and what each is charged with


class EngineOwner(Protocol):
    """A worker with the engine that it has at present."""

    @property
    def is_serving(self) -> bool:
        """Whether there is an engine that is ready."""

    @property
    def owns_engine(self) -> bool:
        """Whether it is ours to kill; of an attached one only the request that gets nothing ends."""

    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        """Kill the present engine, and start another."""

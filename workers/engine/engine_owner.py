"""The interface of a worker for its engine's supervisor and for the judges of the engine's health."""

from collections.abc import Mapping
from typing import Protocol

from workers.engine.incarnation import Incarnation
from workers.outcome import FailureReason
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle
from workers.requests.in_flight import InFlightRequest
from workers.states import Hold

Suspects = Mapping[InFlightRequest, FailureReason]  # requests that may have broken an engine, each with its charge


class EngineOwner(Protocol):
    """A worker with its present engine. All calls are in the event loop, and none waits."""

    @property
    def now(self) -> Lifecycle:
        """The state of the present engine."""

    @property
    def owns_engine(self) -> bool:
        """Whether it is ours to kill; on an attached one only the request that gets nothing ends."""

    # The judges

    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        """Kill the present engine, and start another."""

    def drain_nowait(self, because: str, hold: Hold) -> None:
        """Admit no new requests."""

    def resume_nowait(self, because: str, hold: Hold) -> None:
        """Undo ``drain_nowait``."""

    def offer_one_slot(self, *, is_only: bool) -> None:
        """Offer at most one slot, or all of them again."""

    # The supervisor

    @property
    def has_suspects(self) -> bool:
        """Whether requests on the engine may be the cause of its death, and will be tried."""

    def end_with_engine(self, ending: lifecycle.EndRequests) -> None:
        """End all requests, before the engine is touched."""

    def keep_incident(self, incarnation: Incarnation, because: str) -> None:
        """Keep the end of an incarnation that ended unasked."""

    def note_move(self) -> None:
        """Handle a change of state."""

    async def prepare_engine(self) -> None:
        """Measure a new engine before it serves."""

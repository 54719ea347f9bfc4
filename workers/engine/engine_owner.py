"""The worker as the supervisor of its engine and the judges of that engine's health see it."""

from collections.abc import Mapping
from typing import Protocol

from workers.engine.incarnation import Incarnation
from workers.outcome import FailureReason
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle
from workers.requests.in_flight import InFlightRequest
from workers.states import Hold

Suspects = Mapping[InFlightRequest, FailureReason]  # who may have broken an engine, and what each is charged with


class EngineOwner(Protocol):
    """A worker with the engine that it has at present. All is called in the event loop, and nothing here waits."""

    @property
    def now(self) -> Lifecycle:
        """The state of the present engine."""

    @property
    def owns_engine(self) -> bool:
        """Whether it is ours to kill; of an attached one only the request that gets nothing ends."""

    # The judges

    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        """Kill the present engine, and start another."""

    def drain_nowait(self, because: str, hold: Hold) -> None:
        """Admit nothing new."""

    def resume_nowait(self, because: str, hold: Hold) -> None:
        """Undo ``drain_nowait``."""

    def offer_one_slot(self, *, is_only: bool) -> None:
        """Offer one slot at most, or all of them again."""

    # The supervisor

    @property
    def has_suspects(self) -> bool:
        """Whether requests are on the engine that may be the cause of its death, and will be tried."""

    def end_with_engine(self, ending: lifecycle.EndRequests) -> None:
        """End all requests, before the engine is touched."""

    def keep_incident(self, incarnation: Incarnation, because: str) -> None:
        """Take the end of an incarnation which was not asked to end."""

    def note_move(self) -> None:
        """Take a change of state."""

    async def prepare_engine(self) -> None:
        """Ask a new engine what is to be known of it before it serves."""

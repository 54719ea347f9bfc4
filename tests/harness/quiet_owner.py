"""An engine's owner with nothing to do; tests set what they examine."""

from typing_extensions import override

from workers.engine.engine_owner import EngineOwner, Suspects
from workers.engine.incarnation import Incarnation
from workers.outcome import FailureReason
from workers.policy import lifecycle
from workers.policy.lifecycle_state import Lifecycle
from workers.states import Hold, WorkerState


class QuietOwner(EngineOwner):
    """Its engine serves, and a request that breaks it is at fault."""

    now: Lifecycle = Lifecycle(state=WorkerState.READY, incarnation=1)
    owns_engine: bool = True
    has_suspects: bool = False

    @override
    def break_engine(self, reason: FailureReason, because: str, suspects: Suspects) -> None:
        raise AssertionError(f"{reason}: {because}: {suspects}")

    @override
    def drain_nowait(self, because: str, hold: Hold) -> None:
        return

    @override
    def resume_nowait(self, because: str, hold: Hold) -> None:
        return

    @override
    def offer_one_slot(self, *, is_only: bool) -> None:
        return

    @override
    def end_with_engine(self, ending: lifecycle.EndRequests) -> None:
        return

    @override
    def keep_incident(self, incarnation: Incarnation, because: str) -> None:
        return

    @override
    def note_move(self) -> None:
        return

    @override
    async def prepare_engine(self) -> None:
        return

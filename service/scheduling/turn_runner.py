"""Runs attempts on the slots that were taken for them, and tells the ends of one moment together."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import anyio.lowlevel

from service.conversations.log_fields import of_turn
from service.scheduling.work import OnSlot
from workers.log_context import about, line_about
from workers.outcome import FailureReason, Outcome, RequestFailed
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

Ended = tuple[OnSlot, Outcome]
logger = logging.getLogger(__name__)


class TurnRunner:
    """Owned by the scheduler, which takes the ends: all those of one moment in one call of ``on_ends``."""

    def __init__(self, on_ends: Callable[[Sequence[Ended]], None]) -> None:
        self._on_ends = on_ends
        self._ended: list[Ended] = []

    def __repr__(self) -> str:
        return f"<TurnRunner ended={len(self._ended)}>"

    async def run_turn(self, turn: OnSlot, worker: SupervisedWorker, lease: Lease) -> None:
        """Run the attempt that has begun, and give its slot back."""
        outcome: Outcome
        try:
            with about(partial(of_turn, turn.key, worker.spec.id, worker.incarnation)):
                outcome = await turn.run(worker, lease)
        except Exception as error:
            line = line_about(of_turn(turn.key, worker.spec.id, worker.incarnation))
            logger.exception("turn %s: a defect of Roundhouse", turn.key, extra=line)
            outcome = RequestFailed(reason=FailureReason.INTERNAL, detail=f"{type(error).__name__}: {error}")
        self._ended.append((turn, outcome))
        if len(self._ended) == 1:  # whatever else ends at this moment is applied with it, before the next start
            await anyio.lowlevel.cancel_shielded_checkpoint()
            ended, self._ended = self._ended, []
            self._on_ends(ended)

"""Attempts in flight, run side by side; and the end of each: its blame, and whether its turn runs again."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, assert_never

import anyio.lowlevel
from msgspec.structs import replace

from service.conversations.job import TurnKey
from service.conversations.log_fields import of_turn
from service.conversations.transcript import Charges
from service.scheduling.core.blame import Blame, Trial
from service.scheduling.core.deaths import STALLED, refuse
from service.scheduling.jobs.attempt import CANCELLED, WHY
from service.scheduling.work import End, OnSlot
from workers.log_context import about, line_about
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

Ended = tuple[OnSlot, Outcome]
# Ends after which the engine may still be at work on the request, so that they say nothing of what it does to engines.
UNPROVED: Final = frozenset({FailureReason.DEADLINE, FailureReason.INTERNAL})
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


class TurnEndings:
    """Judges ends, one at a time and at once; it shares what it writes with the scheduler, in the same task.

    ``model_of`` gives the model of a turn, ``refusal_s`` tells for how long one may be refused by a worker.
    """

    def __init__(
        self, blame: Blame, model_of: Callable[[TurnKey], str], refusal_s: Callable[[str], float | None]
    ) -> None:
        self._blame = blame
        self._model_of = model_of
        self._refusal_s = refusal_s

    def __repr__(self) -> str:
        return f"<TurnEndings {self._blame!r}>"

    def take_end(self, turn: OnSlot, outcome: Outcome) -> End:
        """Take the end of an attempt: state first, records with it, before anything is awaited."""
        with about(partial(of_turn, turn.key, turn.worker, turn.incarnation)):  # not of the task that tells of many
            return self._take_end(turn, outcome)

    def refuse_late(self, turn: OnSlot, outcome: Outcome) -> None:
        """Say that another node runs a turn whose attempt has ended here."""
        line = line_about(of_turn(turn.key, turn.worker, turn.incarnation))
        logger.warning("turn %s: a late result is refused, another node runs it: %s", turn.key, outcome, extra=line)

    def _take_end(self, turn: OnSlot, outcome: Outcome) -> End:
        turn.end_attempt(outcome)
        key = turn.key
        match outcome:
            case Completed():
                return self._acquit(turn, turn.complete)
            case Cancelled():
                self._blame.end_unproven(key, is_cut_off=True, at=time.monotonic())
                if outcome.reason is not CancelReason.CONVERSATION_ENDED:
                    reason = CANCELLED.get(outcome.reason, FailureReason.SHUTDOWN)
                    return self._run_again(turn, reason, WHY[outcome.reason] or "")
                self._blame.forget([key])
                return turn.cut_off()
            case RequestFailed():
                if outcome.reason not in UNPROVED:
                    return self._acquit(turn, lambda: turn.fail(outcome.reason, outcome.detail))
                self._blame.end_unproven(key, is_cut_off=True, at=time.monotonic())
                self._blame.forget([key])
                return turn.fail(outcome.reason, outcome.detail)
            case EngineFailed():
                return self._judge_death(turn, outcome) if outcome.brought_down else self._judge_refusal(turn, outcome)
            case _:
                assert_never(outcome)

    def _acquit(self, turn: OnSlot, finish: Callable[[], End]) -> End:
        """Take an end that the engine brought about: nothing speaks against the turn any more."""
        findings = self._blame.acquit(turn.key, turn.charges, time.monotonic())
        turn.charges = Charges()  # the service's own ends too: it has outlived this one
        return replace(finish(), findings=findings)

    def _judge_death(self, turn: OnSlot, failed: EngineFailed) -> End:
        verdict = self._blame.die(turn.key, turn.charges, is_outside=failed.is_outside, at=time.monotonic())
        turn.charges = verdict.charges
        if not verdict.is_convicted:
            again = self._run_again(turn, failed.reason, failed.detail, verdict.trial)
            return replace(again, findings=verdict.findings)
        rate = self._blame.record(self._model_of(turn.key)).rate_bound
        deaths = verdict.charges.deaths or verdict.charges.outside
        detail = (
            f"{failed.detail}; {deaths} engines died with this turn alone on them,"
            f" and by themselves they do so in at most {rate:.1%} of turns"
        )
        return replace(turn.fail(FailureReason.POISONED, detail), findings=verdict.findings)

    def _judge_refusal(self, turn: OnSlot, failed: EngineFailed) -> End:
        """Run a turn again that its engine refused, unless that was once too often."""
        now_s = time.monotonic()
        self._blame.end_unproven(turn.key, is_cut_off=failed.reason in STALLED, at=now_s)
        turn.charges, reason = refuse(
            turn.charges,
            failed,
            time.time(),
            asked_s=max(0.0, now_s - turn.answer.started_at),
            refusal_s=self._refusal_s(turn.worker),
            record=self._blame.refusals(self._model_of(turn.key)),
        )
        if reason is None:
            return self._run_again(turn, failed.reason, failed.detail)
        self._blame.forget([turn.key])
        return turn.fail(reason, failed.detail)

    def _run_again(self, turn: OnSlot, reason: FailureReason, detail: str, trial: Trial | None = None) -> End:
        if not turn.may_run_again:
            self._blame.forget([turn.key])
            return turn.fail(reason, detail)
        if trial is None and turn.charges.is_suspect:
            trial = Trial.NEXT
        return turn.run_again(reason, detail, trial)

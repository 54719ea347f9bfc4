"""What follows from the end of an attempt: what the core is told of it, and what the store."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, assert_never

from service.conversations.charges import Charges
from service.conversations.job import Agent, JobId
from service.conversations.states import TurnState
from service.scheduling.attempt import CANCELLED
from service.scheduling.attempt_usage import used_by
from service.scheduling.core import events
from service.scheduling.core.blame.blame import Blame, Finding, Trial
from service.scheduling.core.blame.retry import refuse
from service.scheduling.counts import RunCounters
from service.scheduling.prompts import JobPrompts
from service.scheduling.turn import TurnRun
from service.scheduling.turns import Turns
from service.store import records
from service.store.records import Record, Used
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed

logger = logging.getLogger(__name__)
# Ends after which the engine may still be at work on the request, so that they say nothing of what it does to engines.
UNPROVED: Final = frozenset({FailureReason.DEADLINE, FailureReason.INTERNAL})
CUT_OFF: Final = frozenset({FailureReason.STALLED_PREFILL, FailureReason.STALLED_DECODE})


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What follows from the end of one attempt."""

    event: events.TurnEvent
    record: Record
    findings: Sequence[Finding] = ()


class TurnEndings:
    """Judges ends, one at a time and at once; it shares what it writes with the scheduler, in the same task.

    ``refusal_s`` tells for how long a turn may be refused by a worker.
    """

    def __init__(
        self,
        jobs: Mapping[JobId, JobPrompts],
        turns: Turns,
        blame: Blame,
        counters: RunCounters,
        refusal_s: Callable[[str], float | None],
    ) -> None:
        self._jobs = jobs
        self._turns = turns
        self._blame = blame
        self._counters = counters
        self._refusal_s = refusal_s

    def __repr__(self) -> str:
        return f"<TurnEndings jobs={len(self._jobs)}>"

    def take_end(self, run: TurnRun, outcome: Outcome) -> End:
        """Take the end of an attempt: state first, records with it, before anything is awaited."""
        run.end_attempt(outcome)
        key = run.key
        match outcome:
            case Completed():
                return self._acquit(run, self._complete)
            case Cancelled():
                self._blame.leave(key, is_cut_off=True)
                if outcome.reason is not CancelReason.CONVERSATION_ENDED:
                    reason = CANCELLED.get(outcome.reason, FailureReason.SHUTDOWN)
                    return self._requeue(run, reason, run.attempts[-1].detail or "")
                self._blame.forget([key])
                return self._finish(run, events.TurnCutOff(key=key), TurnState.CANCELLED, FailureReason.CANCELLED)
            case RequestFailed():
                if outcome.reason not in UNPROVED:
                    return self._acquit(run, lambda run: self._fail(run, outcome.reason, outcome.detail))
                self._blame.leave(key, is_cut_off=True)
                self._blame.forget([key])
                return self._fail(run, outcome.reason, outcome.detail)
            case EngineFailed():
                return self._judge_death(run, outcome) if outcome.brought_down else self._judge_refusal(run, outcome)
            case _:
                assert_never(outcome)

    def _acquit(self, run: TurnRun, finish: Callable[[TurnRun], End]) -> End:
        """Take an end that the engine brought about: nothing speaks against the turn any more."""
        findings = self._blame.end(run.key, run.charges)
        run.charges = Charges()
        return replace(finish(run), findings=findings)

    def _judge_death(self, run: TurnRun, failed: EngineFailed) -> End:
        verdict = self._blame.die(run.key, run.charges, is_outside=failed.is_outside)
        run.charges = verdict.charges
        if not verdict.is_convicted:
            again = self._requeue(run, failed.reason, failed.detail, verdict.trial)
            return replace(again, findings=verdict.findings)
        rate = self._blame.record(self._agent(run).model).rate_bound
        deaths = verdict.charges.deaths or verdict.charges.outside
        detail = (
            f"{failed.detail}; {deaths} engines died with this turn alone on them,"
            f" and by themselves they do so in at most {rate:.1%} of turns"
        )
        return replace(self._fail(run, FailureReason.POISONED, detail), findings=verdict.findings)

    def _judge_refusal(self, run: TurnRun, failed: EngineFailed) -> End:
        """Run a turn again that its engine refused, unless that was once too often."""
        self._blame.leave(run.key, is_cut_off=failed.reason in CUT_OFF)
        run.charges, reason = refuse(
            run.charges,
            failed,
            time.time(),
            refusal_s=self._refusal_s(run.attempts[-1].worker),
            record=self._blame.refusals(self._agent(run).model),
        )
        if reason is None:
            return self._requeue(run, failed.reason, failed.detail)
        self._blame.forget([run.key])
        return self._fail(run, reason, failed.detail)

    def _agent(self, run: TurnRun) -> Agent:
        return self._jobs[run.key.job_id].agents[run.key.agent_id]

    def _fail(self, run: TurnRun, reason: FailureReason, detail: str) -> End:
        return self._finish(run, events.TurnFailed(key=run.key, reason=reason), TurnState.FAILED, reason, detail)

    def _complete(self, run: TurnRun) -> End:
        key = run.key
        agent = self._agent(run)
        answer = run.attempt.answer
        versions = (answer.first_version, answer.last_version)
        faults = (self._jobs[key.job_id].pin_weights(key, version) for version in versions)
        changed = next((fault for fault in faults if fault is not None), None)
        if changed is not None:
            run.refuse_answer(FailureReason.WEIGHTS_CHANGED, changed)
            return self._fail(run, FailureReason.WEIGHTS_CHANGED, changed)
        fault = run.take_answer()
        if fault is not None:
            return self._reject(run, agent, fault)
        self._jobs[key.job_id].discussion(key.conversation_id).add(key.agent_id, key.round, run.words)
        completed = events.TurnCompleted(key=key, seconds=run.attempt.seconds, reading=run.attempt.reading)
        return self._finish(run, completed, TurnState.COMPLETED)

    def _reject(self, run: TurnRun, agent: Agent, fault: str) -> End:
        """Ask again for an answer that is not valid, unless that was done often enough."""
        if agent.validation is not None and len(run.rejected) <= agent.validation.retries:
            again = self._requeue(run, FailureReason.INVALID_ANSWER, fault)
            return replace(again, event=events.TurnRejected(key=run.key))
        return self._fail(run, FailureReason.VALIDATION_EXHAUSTED, f"the last of {len(run.rejected)} answers: {fault}")

    def _requeue(self, run: TurnRun, reason: str, detail: str, trial: Trial | None = None) -> End:
        """Run a turn again, here or in the next life of the service, with what it has behind it."""
        if reason != FailureReason.INVALID_ANSWER:
            logger.warning("turn %s: %s: %s; it runs again", run.key, reason, detail)
        now = datetime.now(UTC)
        requeued = records.TurnRequeued(
            key=run.key,
            so_far=run.so_far,
            worker=run.attempts[-1].worker,
            reason=reason,
            detail=detail,
            at=now,
            used=self._used(run, now, stands=False),
        )
        trial = trial or (Trial.NEXT if run.charges.is_suspect else None)
        return End(event=events.TurnInterrupted(key=run.key, trial=trial), record=requeued)

    def _finish(
        self,
        run: TurnRun,
        event: events.TurnEvent,
        state: TurnState,
        reason: str | None = None,
        detail: str | None = None,
    ) -> End:
        turn = self._turns.finish(run.key, state, reason, detail)
        if state is TurnState.COMPLETED:
            reusable, reused = self._jobs[run.key.job_id].compare_cache(turn)
            self._counters.reusable_tokens += reusable
            self._counters.reused_tokens += reused
        now = datetime.now(UTC)
        used = self._used(run, now, stands=state is TurnState.COMPLETED)
        return End(event=event, record=records.TurnEnded(turn=turn, at=now, used=used))

    def _used(self, run: TurnRun, now: datetime, *, stands: bool) -> Used:
        return used_by(run.attempt, self._jobs[run.key.job_id].job, self._agent(run), now, stands=stands)

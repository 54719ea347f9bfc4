"""What follows from the end of an attempt: what the core is told of it, and what the store."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import assert_never

from service.conversations.job import Agent, JobId
from service.conversations.states import TurnState
from service.scheduling import events
from service.scheduling.life import LifeCounts
from service.scheduling.prompts import JobPrompts
from service.scheduling.retry import Suspicion, strike
from service.scheduling.turn import TurnRun
from service.scheduling.turns import Turns
from service.store import records
from service.store.records import Record
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed

End = tuple[events.Event, Record]
logger = logging.getLogger(__name__)


class Landing:
    """Judges ends, one at a time and at once; it shares what it writes with the scheduler, in the same task."""

    def __init__(self, jobs: Mapping[JobId, JobPrompts], turns: Turns, suspicion: Suspicion, life: LifeCounts) -> None:
        self._jobs = jobs
        self._turns = turns
        self._suspicion = suspicion
        self._life = life

    def __repr__(self) -> str:
        """State of how many jobs."""
        return f"<Landing jobs={len(self._jobs)}>"

    def land(self, run: TurnRun, outcome: Outcome) -> End:
        """Take the end of an attempt: state first, records with it, before anything is awaited."""
        run.end_attempt(outcome)
        key = run.key
        if not (isinstance(outcome, EngineFailed) and outcome.brought_down):
            self._suspicion.leave(key)  # after a death it stays, for the neighbours that land after it
        match outcome:
            case Completed():
                return self._complete(run)
            case Cancelled():
                if outcome.reason is not CancelReason.CONVERSATION_ENDED:
                    return self._requeue(run, FailureReason.SHUTDOWN, run.attempts[-1].detail or "")
                return self._finish(run, events.TurnCutOff(key=key), TurnState.CANCELLED, FailureReason.CANCELLED)
            case RequestFailed():
                failed = events.TurnFailed(key=key, reason=outcome.reason)
                return self._finish(run, failed, TurnState.FAILED, outcome.reason, outcome.detail)
            case EngineFailed():
                return self._retry(run, outcome)
            case _:
                assert_never(outcome)

    def _complete(self, run: TurnRun) -> End:
        key = run.key
        agent = self._jobs[key.job_id].agents[key.agent_id]
        faults = (self._jobs[key.job_id].pin_weights(key, version) for version in run.weight_versions)
        changed = next((fault for fault in faults if fault is not None), None)
        if changed is not None:
            reason = FailureReason.WEIGHTS_CHANGED
            run.refuse_answer(reason, changed)
            return self._finish(run, events.TurnFailed(key=key, reason=reason), TurnState.FAILED, reason, changed)
        fault = run.take_answer()
        if fault is not None:
            return self._reject(run, agent, fault)
        self._jobs[key.job_id].discussion(key.conversation_id).add(key.agent_id, key.round, run.said.words)
        completed = events.TurnCompleted(key=key, seconds=run.seconds, reading=run.reading)
        return self._finish(run, completed, TurnState.COMPLETED)

    def _reject(self, run: TurnRun, agent: Agent, fault: str) -> End:
        """Ask again for an answer that is not valid, unless that was done often enough."""
        reason = FailureReason.VALIDATION_EXHAUSTED
        if agent.validation is not None and run.rejections <= agent.validation.retries:
            _, told = self._requeue(run, reason, fault)
            return events.TurnRejected(key=run.key, is_suspect=run.strikes.deaths > 0), told
        failed = events.TurnFailed(key=run.key, reason=reason)
        return self._finish(run, failed, TurnState.FAILED, reason, f"the last of {run.rejections} answers: {fault}")

    def _retry(self, run: TurnRun, failed: EngineFailed) -> End:
        """Run a turn again whose engine has failed, unless that was once too often."""
        key, last = run.key, run.attempts[-1]
        is_other = self._suspicion.falls_on_another(last.worker, last.incarnation, key)
        run.strikes, reason = strike(run.strikes, failed, has_other_suspect=is_other)
        if reason is not None:
            ended = events.TurnFailed(key=key, reason=reason)
            return self._finish(run, ended, TurnState.FAILED, reason, failed.detail)
        return self._requeue(run, failed.reason, failed.detail)

    def _requeue(self, run: TurnRun, reason: str, detail: str) -> End:
        """Run a turn again, here or in the next life of the service, with what it has behind it."""
        if reason != FailureReason.VALIDATION_EXHAUSTED:
            logger.warning("turn %s: %s: %s; it runs again", run.key, reason, detail)
        told = records.TurnRequeued(
            key=run.key,
            so_far=run.so_far,
            worker=run.attempts[-1].worker,
            reason=reason,
            detail=detail,
            at=datetime.now(UTC),
        )
        return events.TurnInterrupted(key=run.key, is_suspect=run.strikes.deaths > 0), told

    def _finish(
        self, run: TurnRun, event: events.Event, state: TurnState, reason: str | None = None, detail: str | None = None
    ) -> End:
        turn = self._turns.finish(run.key, state, reason, detail)
        if state is TurnState.COMPLETED:
            reusable, reused = self._jobs[run.key.job_id].compare_cache(turn)
            self._life.reusable_tokens += reusable
            self._life.reused_tokens += reused
        return event, records.TurnEnded(turn=turn, at=datetime.now(UTC))

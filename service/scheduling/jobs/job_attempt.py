"""A job's turn on a slot: what its worker is asked, and what its end means for its conversation and its record."""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
from msgspec import structs

from service.conversations.job import JobId
from service.conversations.measures import AttemptMeasures
from service.conversations.states import TurnState
from service.conversations.transcript import Charges
from service.errors import StoreUnavailable
from service.scheduling.attempt_usage import key_of, measures_of, used_by
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.jobs.lent_slots import LentSlots, TurnSlot
from service.scheduling.jobs.prompts import JobPrompts
from service.scheduling.jobs.tool_calls import TurnCalls, describe_calls
from service.scheduling.jobs.turn import TurnRun
from service.scheduling.jobs.turns import Turns
from service.scheduling.work import End, RunCounters, SchedulerStore
from service.store import records
from service.store.records import StoredToolCall, Used
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer
from workers.requests.request import CONSTRAINTS, Demand
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

STORE_PAUSE_S: Final = 1.0  # before a turn is ready again whose calls of tools could not be read
logger = logging.getLogger(__name__)


class JobTurnsState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that all attempts of jobs' turns write to; owned by ``JobTurns``."""

    jobs: Mapping[JobId, JobPrompts]
    turns: Turns
    outlet: SchedulerStore
    counters: RunCounters
    slots: LentSlots
    has_several_keys: Callable[[], bool] = lambda: False


class JobAttempt:
    """An ``OnSlot`` over a ``TurnRun``."""

    def __init__(self, run: TurnRun, state: JobTurnsState) -> None:
        self._run = run
        self._state = state
        self.key = run.key
        self._prompts = state.jobs[self.key.job_id]
        self._agent = self._prompts.agents[self.key.agent_id]
        self._slot: TurnSlot | None = None  # while it runs

    def __repr__(self) -> str:
        return f"<JobAttempt {self._run!r}>"

    @property
    def worker(self) -> str:
        """Whose slot it is."""
        return self._run.attempt.worker

    @property
    def incarnation(self) -> int:
        """The number of the engine that it was given to."""
        return self._run.attempt.place.incarnation

    @property
    def answer(self) -> Answer:
        """The answer of its attempt so far."""
        return self._run.attempt.answer

    @property
    def charges(self) -> Charges:
        """The charges of the turn."""
        return self._run.charges

    @charges.setter
    def charges(self, charges: Charges) -> None:
        self._run.charges = charges

    @property
    def may_run_again(self) -> bool:
        """Always: nobody has seen its answer."""
        return True

    @property
    def seconds(self) -> float:
        """For how long it held its slot, once it has ended."""
        return self._run.attempt.seconds

    # Running

    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        """Ask the worker, give the slot back, and judge the answer."""
        run, attempt = self._run, self._run.attempt
        outcome: Outcome
        try:
            with self._state.slots.hold(run.key, worker.spec.name, attempt, lease) as self._slot, attempt.scope:
                outcome = await self._ask(worker)
            if attempt.scope.cancelled_caught:
                reason = CancelReason.LEASE_LOST if attempt.is_interrupted else CancelReason.CONVERSATION_ENDED
                outcome = Cancelled(reason=reason)
            if isinstance(outcome, Completed):
                await run.judge_answer()
        except StoreUnavailable as error:
            logger.warning("turn %s: %s", run.key, error)
            await anyio.sleep(STORE_PAUSE_S)
            return Cancelled(reason=CancelReason.STORE_LOST)
        finally:
            self._state.slots.forget(run.key)
        return outcome

    async def _ask(self, worker: SupervisedWorker) -> Outcome:
        run = self._run
        version = worker.weights.version if worker.weights else None
        fault = self._prompts.check_weights(run.key, version)
        if fault is not None:
            return RequestFailed(reason=FailureReason.WEIGHTS_CHANGED, detail=fault)
        earlier: Sequence[StoredToolCall] = ()
        if self._prompts.has_tools(run.key.agent_id):  # once: what this attempt calls is no earlier one's
            earlier = await self._state.outlet.calls_of(run.key)
        is_own = not CONSTRAINTS.isdisjoint(worker.spec.params)  # the operator's, who has the last word on a model
        constraint = None if is_own else run.constraint
        if constraint is None:
            return await self._perform(worker, earlier, run.demand(None, is_own=is_own), is_told=False)
        plan = worker.constraints.plan(constraint)
        demand = run.demand(constraint) if plan.is_sent else None
        outcome = await self._perform(worker, earlier, demand, is_told=plan.is_told)
        if plan.is_sent and isinstance(outcome, Completed) and run.attempt.answer.constrained_by is not None:
            worker.constraints.note_answer(constraint, run.attempt.answer.text)
        if run.attempt.answer.constrained_by is not None and _is_refused(outcome):
            without = await self._perform(worker, earlier, None, is_told=True)
            if isinstance(without, Completed):
                logger.warning("turn %s: its constraint is told in words: %s", run.key, outcome)
                worker.constraints.note_refused(constraint)
            return without
        return outcome

    async def _perform(
        self, worker: SupervisedWorker, earlier: Sequence[StoredToolCall], demand: Demand | None, *, is_told: bool
    ) -> Outcome:
        run, prompts, outlet = self._run, self._prompts, self._state.outlet
        attempt, key = run.attempt, run.key
        journal = addition = None
        if prompts.has_tools(key.agent_id):
            journal, addition = TurnCalls(key, earlier, outlet.append), describe_calls(earlier)
        request, attempt.prompt = prompts.request(
            key, run.rejected, attempt.started_at, worker.spec, is_told=is_told, addition=addition
        )
        owner = prompts.job.owner if self._state.has_several_keys() else None
        attempt.answer.own_tokens = None if owner is None else prompts.own_tokens(key)
        asked = structs.replace(
            request,
            cache_owner=owner,
            journal=journal,
            demand=demand,
            is_watched=outlet.is_followed(key.job_id),
            slot=self._slot,
        )
        attempt.request = worker.prepare(asked, attempt.answer)
        return await worker.perform(asked, attempt.answer, attempt.request)

    # Ending

    def end_attempt(self, outcome: Outcome) -> None:
        """Keep what the attempt has brought."""
        self._run.end_attempt(outcome)

    def complete(self) -> End:
        """Take a complete answer, unless it was made with other weights than its conversation's, or is not valid."""
        run, key = self._run, self.key
        answer = run.attempt.answer
        versions = (answer.first_version, answer.last_version)
        faults = (self._prompts.pin_weights(key, version) for version in versions)
        changed = next((fault for fault in faults if fault is not None), None)
        if changed is not None:
            run.refuse_answer(FailureReason.WEIGHTS_CHANGED, changed)
            return self.fail(FailureReason.WEIGHTS_CHANGED, changed)
        fault = run.take_answer()
        if fault is not None:
            return self._reject(fault)
        self._prompts.discussion(key.conversation_id).add(key.agent_id, key.round, run.words)
        completed = events.TurnCompleted(key=key, seconds=run.attempt.seconds, reading=run.attempt.reading)
        return self._finish(completed, TurnState.COMPLETED)

    def _reject(self, fault: str) -> End:
        """Ask again for an answer that is not valid, unless that was done often enough."""
        run, validation = self._run, self._agent.validation
        if validation is not None and len(run.rejected) <= validation.retries:
            again = self.run_again(FailureReason.INVALID_ANSWER, fault, None)
            return structs.replace(again, event=events.TurnRejected(key=run.key))
        return self.fail(FailureReason.VALIDATION_EXHAUSTED, f"the last of {len(run.rejected)} answers: {fault}")

    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        """Run the turn again, here or in the next life of the service, with what it has behind it."""
        run = self._run
        if reason != FailureReason.INVALID_ANSWER:
            logger.warning("turn %s: %s: %s; it runs again", run.key, reason, detail)
        now = datetime.now(UTC)
        used = self._used(now, stands=False)
        requeued = records.TurnRequeued(
            key=run.key,
            so_far=run.so_far,
            worker=run.attempts[-1].worker,
            reason=reason,
            detail=detail,
            at=now,
            used=used,
            measures=self._measures(used),
        )
        return End(event=events.TurnInterrupted(key=run.key, trial=trial), records=[requeued])

    def fail(self, reason: FailureReason, detail: str) -> End:
        """End the turn, and with it its conversation."""
        return self._finish(events.TurnFailed(key=self.key, reason=reason), TurnState.FAILED, reason, detail)

    def cut_off(self) -> End:
        """End the turn, since its conversation has ended."""
        return self._finish(events.TurnCutOff(key=self.key), TurnState.CANCELLED, FailureReason.CANCELLED)

    def _finish(
        self, event: events.TurnEvent, state: TurnState, reason: str | None = None, detail: str | None = None
    ) -> End:
        turn = self._state.turns.finish_turn(self.key, state, reason, detail)
        if state is TurnState.COMPLETED:
            reusable, reused = self._prompts.compare_cache(turn)
            self._state.counters.reusable_tokens += reusable
            self._state.counters.reused_tokens += reused
        now = datetime.now(UTC)
        used = self._used(now, stands=state is TurnState.COMPLETED)
        measures = self._measures(used)
        agent = self._agent
        ended = records.TurnEnded(
            turn=turn, at=now, used=used, model=agent.model, measures=measures, waited_for=agent.waits_for
        )
        return End(event=event, records=[ended])

    def _measures(self, used: Used) -> AttemptMeasures:
        attempt, told = self._run.attempt, self._run.attempts[-1]
        return measures_of(attempt.place, attempt.answer, used, told.outcome, told.reason)

    def _used(self, now: datetime, *, stands: bool) -> Used:
        attempt = self._run.attempt
        return used_by(key_of(self._prompts.job, self._agent, now), attempt.answer, attempt.seconds, stands=stands)


def _is_refused(outcome: Outcome) -> bool:
    return isinstance(outcome, RequestFailed) and outcome.reason is FailureReason.ENGINE_REJECTED

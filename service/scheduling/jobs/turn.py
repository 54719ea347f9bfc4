"""One turn of a job from its first slot to its end: what its workers are asked, and what each end means for it."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace
from typing_extensions import override

from service.conversations.job import JobId, Mode, TurnKey
from service.conversations.log_fields import of_job
from service.conversations.measures import AttemptMeasures
from service.conversations.prompt_messages import Rejected
from service.conversations.prompt_record import PromptRecord
from service.conversations.states import ENDED_TURNS, TurnState
from service.conversations.transcript import Attempt, Charges, Turn, UnfinishedTurn
from service.conversations.turn_failures import leaves
from service.conversations.until import NOTHING, TurnDigest
from service.errors import StoreUnavailable
from service.scheduling.attempt import RunningAttempt, usage_key
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.endings import ending_of
from service.scheduling.jobs.judging import TRIES, AnswerJudge, constraint_of
from service.scheduling.jobs.lent_slots import LentSlots, TurnSlot
from service.scheduling.jobs.memory_cut import cut_memory
from service.scheduling.jobs.prompts import JobPrompts
from service.scheduling.jobs.tool_calls import TurnCalls, describe_calls
from service.scheduling.jobs.turn_record import record_so_far, said_in, with_answer
from service.scheduling.work import End, OnSlot, RunCounters, SchedulerStore
from service.store import records
from service.store.records import StoredToolCall
from transport.request import Constraint
from workers.log_context import line_about
from workers.offload.pool import asked_for
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.requests.request import CONSTRAINTS, Demand
from workers.requests.slots import Lease
from workers.supervised import SupervisedWorker

MOST_JUDGED: Final = 64  # answers of a key that are judged without a slot: their turns would pile up
STORE_PAUSE_S: Final = 1.0  # before a turn is ready again whose calls of tools could not be read
logger = logging.getLogger(__name__)


class TurnSurroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings that all turns of jobs read and write; owned by ``JobTurns``.

    ``note_end`` takes a turn that has ended.
    """

    jobs: Mapping[JobId, JobPrompts]
    note_end: Callable[[Turn], None]
    outlet: SchedulerStore
    counters: RunCounters
    slots: LentSlots
    judged: Counter[str | None] = msgspec.field(default_factory=Counter)  # answers without a slot, by their keys
    has_several_keys: Callable[[], bool] = lambda: False


class JobTurn(OnSlot):
    """A turn that was on a slot and has not ended, as it is known; written by the scheduler alone.

    ``attempt`` is the one that runs, or the last one.
    """

    def __init__(
        self,
        key: TurnKey,
        attempt: RunningAttempt,
        queued_at: datetime,
        so_far: UnfinishedTurn | None,
        around: TurnSurroundings,
    ) -> None:
        self.key = key
        self.attempt = attempt
        self._around = around
        self._prompts = around.jobs[key.job_id]
        self._agent = self._prompts.agent(key)
        self._until = self._prompts.conversations[key.conversation_id].until
        self._prompt: PromptRecord | None = None  # of the attempt, once it was made
        self._slot: TurnSlot | None = None  # while it runs
        self._has_left = False  # its slot, while its answer is judged
        self._owner = self._prompts.job.owner
        self._fault: str | None = None  # of the answer that was judged
        self._fulfils: tuple[int, ...] = ()  # the conditions that it fulfils by itself
        self.charges = so_far.charges if so_far else Charges()
        self.attempts: list[Attempt] = list(so_far.attempts) if so_far else []
        self.rejected: list[Rejected] = list(so_far.rejected) if so_far else []
        self._queued_at = so_far.queued_at if so_far else queued_at
        self.ready_at = queued_at  # for the attempt that runs, or for the next one
        self._started_at = (so_far.started_at if so_far else None) or attempt.started_at

    def __repr__(self) -> str:
        return f"<JobTurn {self.key} attempts={len(self.attempts)} {self.attempt!r}>"

    @property
    def may_run_again(self) -> bool:
        """Always: nobody has seen its answer."""
        return True

    def begin_attempt(self, attempt: RunningAttempt) -> None:
        """Begin another attempt."""
        self.attempt, self._prompt = attempt, None

    # Looking

    @property
    def so_far(self) -> UnfinishedTurn:
        """The attempts and charges of the turn, as the next life of the service would need them."""
        return UnfinishedTurn(
            key=self.key,
            attempts=tuple(self.attempts),
            rejected=tuple(self.rejected),
            charges=self.charges,
            queued_at=self._queued_at,
            started_at=self._started_at,
        )

    @property
    def attempt_so_far(self) -> Attempt:
        """The attempt that runs, as far as it is."""
        return record_so_far(self.attempt, self._prompt)

    def attempts_so_far(self, *, is_running: bool) -> Turn:
        """Return the turn with its attempts and times alone, which costs less than all of it; the running one too."""
        running = (self.attempt_so_far,) if is_running else ()
        return Turn(
            key=self.key,
            state=TurnState.IN_FLIGHT if is_running else TurnState.READY,
            attempts=(*self.attempts, *running),
            queued_at=self._queued_at,
            started_at=self._started_at,
            first_token_at=self.attempt.first_token_at,
        )

    def snapshot(self, state: TurnState, reason: str | None = None, detail: str | None = None) -> Turn:
        """Return the turn as it stands in a transcript, in ``state``."""
        turn = Turn(
            key=self.key,
            role=self._agent.role,
            state=state,
            reason=reason,
            detail=detail,
            attempts=tuple(self.attempts),
            queued_at=self._queued_at,
            started_at=self._started_at,
            finished_at=datetime.now(UTC) if state in ENDED_TURNS else None,
            leaves=state is TurnState.FAILED and leaves(self._agent, reason),
        )
        return with_answer(turn, self.attempt, has_markup=self._agent.markup)

    # Running

    @override
    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        slots = self._around.slots
        asked_for.set(self._owner)
        try:
            with slots.hold(self.key, worker.spec.name, self.attempt, lease) as self._slot:
                outcome = await self._ask(worker)
            if isinstance(outcome, Completed) and (self._until or self._agent.validation is not None):
                await self._judge()
        except StoreUnavailable as error:
            logger.warning("turn %s: %s", self.key, error)
            await anyio.sleep(STORE_PAUSE_S)
            return Cancelled(reason=CancelReason.STORE_LOST)
        finally:
            slots.forget(self.key)
            if self._has_left:
                self._around.judged[self._owner] -= 1
                self._has_left = False
        return outcome

    async def _judge(self) -> None:
        """Judge a complete answer: whether it is valid, and then which conditions it fulfils."""
        answer, began_at, judge = self.attempt.answer, time.monotonic(), self._answer_judge()
        self._fault = await judge.find_fault(answer.text)
        if self._fault is None and self._until:
            words = said_in(answer, has_markup=self._agent.markup).words
            self._fulfils = await judge.find_fulfilled(words, [signal.name for signal in answer.signals])
        if self._has_left:
            self.attempt.lent_s += time.monotonic() - began_at

    def _answer_judge(self) -> AnswerJudge:
        place, overruns = self._prompts.places[self._agent.id], self._prompts.overruns
        return AnswerJudge(self._agent, place, self._until, overruns, self._leave_slot, self._give_up)

    def _leave_slot(self) -> None:
        """Let another turn have the slot while others judge the answer, unless too many are judged by now."""
        judged = self._around.judged
        if self._slot is not None and not self._has_left and judged[self._owner] < MOST_JUDGED:
            self._has_left = True
            judged[self._owner] += 1
            self._slot.leave_for_good()

    def _give_up(self, path: str, pattern: str | None) -> None:
        text = "job %s: %s ran out of time %d times, and is not tried any more: %s"
        logger.warning(text, self.key.job_id, path, TRIES, pattern, extra=line_about(of_job(self.key.job_id)))
        self._around.outlet.append_nowait([records.GivenUp(key=self.key, path=path, pattern=pattern)], lambda: None)

    async def _ask(self, worker: SupervisedWorker) -> Outcome:
        version = worker.weights.version if worker.weights else None
        fault = self._prompts.check_weights(self.key, version)
        if fault is not None:
            return RequestFailed(reason=FailureReason.WEIGHTS_CHANGED, detail=fault)
        earlier: Sequence[StoredToolCall] = ()
        if self._agent.tools:  # once: what this attempt calls is no earlier one's
            with anyio.CancelScope() as self.attempt.scope:
                earlier = await self._around.outlet.calls_of(self.key)
        is_own = not CONSTRAINTS.isdisjoint(worker.spec.params)  # the operator's, who has the last word on a model
        constraint = None if is_own else constraint_of(self._agent)
        if constraint is None:
            return await self._perform(worker, earlier, self._demand(None, is_own=is_own), is_told=False)
        plan = worker.requests.constraints.plan(constraint)
        demand = self._demand(constraint) if plan.is_sent else None
        outcome = await self._perform(worker, earlier, demand, is_told=plan.is_told)
        answer = self.attempt.answer
        if plan.is_sent and isinstance(outcome, Completed) and answer.constrained_by is not None:
            worker.requests.constraints.note_answer(constraint, answer.text)
        if answer.constrained_by is not None and _is_refused(outcome):
            without = await self._perform(worker, earlier, None, is_told=True)
            if isinstance(without, Completed):
                logger.warning("turn %s: its constraint is told in words: %s", self.key, outcome)
                worker.requests.constraints.note_refused(constraint)
            return without
        return outcome

    def _demand(self, constraint: Constraint | None, *, is_own: bool = False) -> Demand | None:
        """Return the demand on the answer: ``constraint``, or that of the author's or the model's parameters.

        ``is_own``: the model's say something.
        """
        if constraint is None and not is_own and not self._agent.is_constrained:
            return None
        is_met = self._answer_judge().is_worth_keeping if self._agent.validation is not None else None
        return Demand(constraint=constraint, is_met=is_met, at_once=bool(self.rejected))

    async def _perform(
        self, worker: SupervisedWorker, earlier: Sequence[StoredToolCall], demand: Demand | None, *, is_told: bool
    ) -> Outcome:
        attempt, key, prompts, outlet = self.attempt, self.key, self._prompts, self._around.outlet
        owner = prompts.job.owner if self._around.has_several_keys() else None
        if self._agent.memory is not None:
            ending = await cut_memory(prompts, key, attempt, worker, outlet.append, owner)
            if ending is not None:
                return ending
        if attempt.cancelled is not None:
            return attempt.cancelled
        journal = addition = None
        if self._agent.tools:
            journal, addition = TurnCalls(key, earlier, outlet.append), describe_calls(earlier)
        request, self._prompt = prompts.request(
            key, self.rejected, attempt.started_at, worker.spec, is_told=is_told, addition=addition
        )
        attempt.answer.own_tokens = None if owner is None else prompts.own_tokens(key)
        asked = replace(
            request,
            cache_owner=owner,
            owner=prompts.job.owner,
            journal=journal,
            demand=demand,
            is_watched=outlet.is_followed(key.job_id),
            slot=self._slot,
        )
        attempt.request = worker.requests.prepare(asked, attempt.answer)
        return await worker.requests.perform(asked, attempt.answer, attempt.request)

    # Ending

    @override
    def end_attempt(self, outcome: Outcome) -> None:
        self.attempt.end()
        state, reason, detail = ending_of(outcome)
        ended = replace(self.attempt_so_far, outcome=state, reason=reason, detail=detail)
        # Those of the answer that stands are the turn's.
        self.attempts.append(replace(ended, tool_calls=()) if isinstance(outcome, Completed) else ended)

    @override
    def complete(self) -> End:
        """Take a complete answer, unless it was made with other weights than its conversation's, or is not valid."""
        key, answer = self.key, self.attempt.answer
        versions = [version for version in (answer.first_version, answer.last_version) if version is not None]
        changed = next((fault for version in versions if (fault := self._prompts.pin_weights(key, version))), None)
        if changed is not None:
            self._refuse_answer(FailureReason.WEIGHTS_CHANGED, changed)
            return self.fail(FailureReason.WEIGHTS_CHANGED, changed)
        fault, self._fault = self._fault, None
        if fault is not None:
            return self._reject(fault)
        words = said_in(answer, has_markup=self._agent.markup).words
        self._prompts.discussion(key.conversation_id).add(key.agent_id, key.round, words)
        completed = events.TurnCompleted(
            key=key,
            seconds=self.attempt.seconds,
            reading=self.attempt.reading,
            digest=self._digest(words) if self._until or self._prompts.job.mode is Mode.LED else NOTHING,
        )
        return self._finish(completed, TurnState.COMPLETED)

    def _digest(self, words: str) -> TurnDigest:
        usage = self.attempt.answer.usage
        return self._prompts.digest(self.key, self._fulfils, words, usage.completion_tokens if usage else None)

    def _reject(self, fault: str) -> End:
        """Ask again for an answer that is not valid, unless that was done often enough."""
        self.rejected.append((self.attempt.answer.text, fault))
        self._refuse_answer(FailureReason.INVALID_ANSWER, fault)
        validation = self._agent.validation
        if validation is not None and len(self.rejected) <= validation.retries:
            again = self.run_again(FailureReason.INVALID_ANSWER, fault, None)
            return replace(again, event=events.TurnRejected(key=self.key))
        return self.fail(FailureReason.VALIDATION_EXHAUSTED, f"the last of {len(self.rejected)} answers: {fault}")

    def _refuse_answer(self, reason: FailureReason, detail: str) -> None:
        """Mark the last attempt as failed: its answer is complete, and does not stand."""
        calls = tuple(self.attempt.answer.tool_calls)
        self.attempts[-1] = replace(
            self.attempts[-1], outcome=TurnState.FAILED, reason=reason, detail=detail, tool_calls=calls
        )

    @override
    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        if reason != FailureReason.INVALID_ANSWER:
            logger.warning("turn %s: %s: %s; it runs again", self.key, reason, detail)
        measures = self._measures()
        requeued = records.TurnRequeued(
            key=self.key,
            so_far=self.so_far,
            worker=self.attempt.worker,
            reason=reason,
            detail=detail,
            at=datetime.now(UTC),
            used=(self._whose, measures.used),
            measures=measures,
        )
        return End(event=events.TurnInterrupted(key=self.key, trial=trial), records=[requeued])

    @override
    def fail(self, reason: FailureReason, detail: str) -> End:
        """End the turn, and with it its conversation."""
        if reason is FailureReason.CONTEXT_OVERFLOW and self._agent.memory is None:
            detail = f"{detail}; memory: {{keep: auto}} bounds what an agent is shown of the past"
        return self._finish(events.TurnFailed(key=self.key, reason=reason), TurnState.FAILED, reason, detail)

    @override
    def cut_off(self) -> End:
        return self._finish(events.TurnCutOff(key=self.key), TurnState.CANCELLED, FailureReason.CANCELLED)

    def _finish(
        self, event: events.TurnEvent, state: TurnState, reason: str | None = None, detail: str | None = None
    ) -> End:
        turn, agent, counters = self.snapshot(state, reason, detail), self._agent, self._around.counters
        if state is TurnState.COMPLETED:
            turn = replace(turn, fulfils=self._fulfils)
        self._around.note_end(turn)
        if state is TurnState.COMPLETED:
            if self._prompts.memories.are_any:
                self._prompts.memories.note_size(turn)
            reusable, reused = self._prompts.compare_cache(turn)
            counters.reusable_tokens += reusable
            counters.reused_tokens += reused
        measures = self._measures()
        ended = records.TurnEnded(
            turn=turn,
            at=datetime.now(UTC),
            used=(self._whose, measures.used),
            model=agent.model,
            measures=measures,
            waited_for=agent.waits_for,
            readers=agent.visible_to,
        )
        return End(event=event, records=[ended])

    def _measures(self) -> AttemptMeasures:
        told = self.attempts[-1]
        return self.attempt.measures(self._agent.model, told.outcome, told.reason)

    @property
    def _whose(self) -> records.UsageKey:
        return usage_key(self._agent, self._prompts.job.owner, self.key.job_id)


def _is_refused(outcome: Outcome) -> bool:
    return isinstance(outcome, RequestFailed) and outcome.reason is FailureReason.ENGINE_REJECTED

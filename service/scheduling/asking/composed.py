"""The asking of a composed turn: its agent, the words of its conversation, memory, tools and constraints.

``service/scheduling/asking/posted.py`` asks turns with a client's own body.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

import anyio
import msgspec
from msgspec.structs import replace

from service.conversations.job.job import Agent, TurnKey
from service.conversations.record.findings import fault_beside
from service.conversations.record.log_fields import of_job
from service.conversations.record.transcript import UnfinishedTurn
from service.conversations.talk.prompt_messages import Rejected
from service.conversations.talk.prompt_record import PromptRecord
from service.errors import StoreUnavailable
from service.scheduling.asking.judging import TRIES, AnswerJudge, constraint_of
from service.scheduling.asking.lent_slots import LentSlots, TurnSlot
from service.scheduling.asking.memory_cut import cut_memory
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.asking.tool_calls import TurnCalls, describe_calls
from service.scheduling.attempt import RunningAttempt
from service.scheduling.turn_record import said_in
from service.scheduling.work import SchedulerStore
from service.store import records
from service.store.records import StoredToolCall
from transport.events import Usage
from transport.request import ChatRequest, Constraint
from workers.log_context import line_about
from workers.offload.pool import asked_for
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome, RequestFailed
from workers.policy.continuation import Continuation
from workers.requests.answer import NOTHING
from workers.requests.halves import HalfAnswer
from workers.requests.request import CONSTRAINTS, Demand
from workers.requests.request_ends import is_refused
from workers.requests.slots import Lease
from workers.requests.stored_half import StoredHalf, digest_of, from_store, to_store
from workers.supervised import SupervisedWorker

MOST_JUDGED: Final = 64  # answers of a key judged without a slot at once; more turns would pile up
# The ends after which the next attempt starts over: its words are not kept.
STARTS_OVER: Final[Mapping[Continuation, Collection[str]]] = {
    Continuation.ON: frozenset({FailureReason.INVALID_ANSWER, FailureReason.WEIGHTS_CHANGED}),
    Continuation.OVER_WEIGHTS: frozenset({FailureReason.INVALID_ANSWER}),
    Continuation.OFF: frozenset(FailureReason),
}
STORE_PAUSE_S: Final = 1.0  # seconds before a turn is ready again after its tool calls could not be read
logger = logging.getLogger(__name__)


class AskingSurroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that all composed turns share; with ``has_several_keys`` prompt caches are separate by key."""

    outlet: SchedulerStore
    slots: LentSlots
    judged: Counter[str | None] = msgspec.field(default_factory=Counter)  # answers judged without a slot, by key
    has_several_keys: Callable[[], bool] = lambda: False


class ComposedAsking:
    """The requests of one turn; ``prompt`` is the record of the attempt's prompt, once made.

    ``half`` is what the attempt, or the next one, goes on from. ``fulfils`` are the conditions of ``until`` that the
    judged answer meets on its own.
    """

    def __init__(self, key: TurnKey, agent: Agent, prompts: JobPrompts, around: AskingSurroundings) -> None:
        self._key = key
        self._agent = agent
        self._prompts = prompts
        self._around = around
        self._owner = prompts.job.owner
        self.until = prompts.conversations[key.conversation_id].until
        self.prompt: PromptRecord | None = None
        self.fulfils: tuple[int, ...] = ()
        self.whole: None = None  # the record has the words of its answer
        self._attempt: RunningAttempt  # the newest one
        self._continuation = Continuation.ON
        self.half: HalfAnswer | None = None
        self._digested: tuple[ChatRequest | None, str] = (None, "")  # the newest request whose half was stored
        self._made_at: datetime | None = None  # the time of the prompt that ``half`` answers
        self._described: Sequence[StoredToolCall] = ()  # the calls that this prompt describes
        self._rejected: Sequence[Rejected] = ()  # the turn's rejected answers so far
        self._slot: TurnSlot | None = None  # set while the attempt runs
        self._has_left = False  # the slot was given to others while the answer is judged
        self._fault: str | None = None  # the fault of the judged answer

    def __repr__(self) -> str:
        return f"<ComposedAsking {self._key}>"

    def forget_attempt(self) -> None:
        """Forget the prompt of the previous attempt."""
        self.prompt = None

    def keep_half(self, attempt: RunningAttempt, reason: str) -> HalfAnswer | None:
        """Keep what the attempt has written, for the next one to go on from; None if that one starts over."""
        is_over = reason in STARTS_OVER[self._continuation]
        half = None if is_over else attempt.answer.half or None
        self.half = None if half is None else replace(half, counted=None)  # by the record of this attempt
        if half is None:
            self._made_at = None
        return half

    def restore(self, kept: StoredHalf) -> None:
        """Go on from half an answer of an earlier life of the service."""
        self.half, self._made_at = from_store(kept), kept.made_at

    @property
    def kept(self) -> StoredHalf | None:
        """The half that the next attempt goes on from, for the store."""
        half, made_at = self.half, self._made_at
        return None if half is None or made_at is None else to_store(half, made_at, half.counted)

    def half_so_far(self, attempt: RunningAttempt) -> StoredHalf | None:
        """Return the half that the running attempt has written, for the store; None if the next starts over."""
        made_at, half = self._made_at, attempt.answer.half
        if made_at is None or not half or self._continuation is Continuation.OFF:
            return None
        if half.asked is not None:
            if self._digested[0] is not half.asked:
                self._digested = half.asked, digest_of(half.asked)
            half = replace(half, asked=None, digest=self._digested[1])
        counted = NOTHING
        if attempt.answer.is_continued:
            parts = attempt.answer.cost_parts
            counted = parts.earlier + Usage(0, parts.dropped, 0)
        counted += Usage(0, attempt.lost_tokens, 0)
        return to_store(half, made_at, counted)

    def take_fault(self) -> str | None:
        """Return the fault of the judged answer, None if it is valid; reset it for the next answer."""
        fault, self._fault = self._fault, None
        return fault

    async def run(
        self, attempt: RunningAttempt, so_far: UnfinishedTurn, worker: SupervisedWorker, lease: Lease
    ) -> Outcome:
        """Ask a worker, judge its answer, and give the slot back."""
        self._attempt, self._rejected = attempt, so_far.rejected
        slots = self._around.slots
        asked_for.set(self._owner)
        try:
            with slots.hold(self._key, worker.spec.name, self._attempt, lease) as self._slot:
                outcome = await self._ask(worker)
            if isinstance(outcome, Completed) and (self.until or self._agent.validation is not None):
                await self._judge()
        except StoreUnavailable as error:
            logger.warning("turn %s: %s", self._key, error)
            await anyio.sleep(STORE_PAUSE_S)
            return Cancelled(reason=CancelReason.STORE_LOST)
        finally:
            slots.forget(self._key)
            if self._has_left:
                self._around.judged[self._owner] -= 1
                self._has_left = False
        return outcome

    async def _judge(self) -> None:
        """Judge a complete answer: whether it is valid, then which conditions it meets."""
        answer, began_at, judge = self._attempt.answer, time.monotonic(), self._answer_judge()
        self._fault = await judge.find_fault(answer.text)
        if self._agent.validation is not None:
            self._fault = fault_beside(answer, self._fault)
        if self._fault is None and self.until and not answer.is_declined:
            words = said_in(answer, has_markup=self._agent.markup).words
            self.fulfils = await judge.find_fulfilled(words, [signal.name for signal in answer.signals])
        if self._has_left:
            self._attempt.lent_s += time.monotonic() - began_at

    def _answer_judge(self) -> AnswerJudge:
        place, overruns = self._prompts.places[self._agent.id], self._prompts.overruns
        return AnswerJudge(self._agent, place, self.until, overruns, self._leave_slot, self._give_up)

    def _leave_slot(self) -> None:
        """Let another turn have the slot while the answer is judged elsewhere, unless too many are."""
        judged = self._around.judged
        if self._slot is not None and not self._has_left and judged[self._owner] < MOST_JUDGED:
            self._has_left = True
            judged[self._owner] += 1
            self._slot.leave_for_good()

    def _give_up(self, path: str, pattern: str | None) -> None:
        text = "job %s: %s ran out of time %d times, and is not tried any more: %s"
        logger.warning(text, self._key.job_id, path, TRIES, pattern, extra=line_about(of_job(self._key.job_id)))
        self._around.outlet.append_nowait([records.GivenUp(key=self._key, path=path, pattern=pattern)], lambda: None)

    async def _ask(self, worker: SupervisedWorker) -> Outcome:
        version = worker.weights.version if worker.weights else None
        self._continuation = self._prompts.job.continuation or worker.spec.continuation
        if self.half is not None and not worker.requests.may_go_on_with(self.half, self._continuation):
            self._drop_half()
        fault = self._prompts.check_weights(self._key, version)
        if fault is not None:
            return RequestFailed(reason=FailureReason.WEIGHTS_CHANGED, detail=fault)
        earlier: Sequence[StoredToolCall] = ()
        if self._agent.tools:  # read once: calls of this attempt are not earlier ones
            with anyio.CancelScope() as self._attempt.scope:
                earlier = await self._around.outlet.calls_of(self._key)
            if self.half is not None and len(earlier) > len(self.half.tool_calls):
                self._drop_half()  # a call came after it: the prompt must tell of that
        is_own = not CONSTRAINTS.isdisjoint(worker.spec.params)  # the operator's own constraint takes precedence
        constraint = None if is_own else constraint_of(self._agent)
        has_tools = bool(self._agent.tools or self._agent.exit_tools)
        constraints = worker.requests.constraints
        if constraints.may_be_ignored:
            with anyio.CancelScope() as self._attempt.scope:
                await worker.requests.try_server(has_constraint=constraint is not None, has_tools=has_tools)
        if constraint is None:
            return await self._perform(worker, earlier, self._demand(None, is_own=is_own), is_told=False)
        plan = constraints.plan(constraint)
        demand = self._demand(constraint) if plan.is_sent else None
        outcome = await self._perform(worker, earlier, demand, is_told=plan.is_told)
        answer = self._attempt.answer
        if plan.is_sent and isinstance(outcome, Completed) and answer.constrained_by is not None:
            worker.requests.constraints.note_answer(constraint, answer.text)
        if answer.constrained_by is not None and is_refused(outcome):
            without = await self._perform(worker, earlier, None, is_told=True)
            if isinstance(without, Completed):
                logger.warning("turn %s: its constraint is only said in words: %s", self._key, outcome)
                worker.requests.constraints.note_refused(constraint)
            return without
        return outcome

    def _drop_half(self) -> None:
        if self.half is not None:
            counted = self.half.kept if self.half.counted is None else self.half.counted
            self._attempt.lost_tokens += counted.completion_tokens
        self.half = self._made_at = None

    def _demand(self, constraint: Constraint | None, *, is_own: bool = False) -> Demand | None:
        """Return the demand on the answer: ``constraint``, or that of the author's or the model's parameters.

        ``is_own`` says that the model's parameters constrain answers.
        """
        if constraint is None and not is_own and not self._agent.is_constrained:
            return None
        is_met = self._answer_judge().is_worth_keeping if self._agent.validation is not None else None
        return Demand(constraint=constraint, is_met=is_met, at_once=bool(self._rejected))

    async def _perform(
        self, worker: SupervisedWorker, earlier: Sequence[StoredToolCall], demand: Demand | None, *, is_told: bool
    ) -> Outcome:
        attempt, key, prompts, outlet = self._attempt, self._key, self._prompts, self._around.outlet
        owner = prompts.job.owner if self._around.has_several_keys() else None
        if self._agent.memory is not None and self.half is None:
            ending = await cut_memory(prompts, key, attempt, worker, outlet.append, owner)
            if ending is not None:
                return ending
        if attempt.cancelled is not None:
            return attempt.cancelled
        journal = addition = None
        if self._agent.tools:
            if self._made_at is None:
                self._described = earlier
            kept = () if self.half is None else self.half.tool_calls
            journal, addition = TurnCalls(key, earlier, outlet.append, kept), describe_calls(self._described)
        made_at = self._made_at or attempt.started_at
        request, self.prompt = prompts.request(
            key,
            self._rejected,
            made_at,
            worker.spec,
            hears_all=self._made_at is None and not self._rejected,  # a re-prompt only adds a reason
            is_told=is_told,
            addition=addition,
        )
        if self._made_at is not None:
            self.prompt = replace(self.prompt, made_at=made_at)
        self._made_at = made_at
        attempt.answer.own_tokens = None if owner is None else prompts.own_tokens(key)
        asked = replace(
            request,
            cache_owner=owner,
            owner=prompts.job.owner,
            journal=journal,
            demand=demand,
            is_watched=outlet.is_followed(key.job_id),
            slot=self._slot,
            records=self._agent.record,
        )
        if self.half is not None and not attempt.answer.is_continued:
            attempt.answer.go_on_from(self.half)
        attempt.request = worker.requests.prepare(asked.job_name, attempt.answer)
        return await worker.requests.perform(asked, attempt.answer, attempt.request)

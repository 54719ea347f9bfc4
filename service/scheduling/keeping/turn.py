"""One turn of a job from its first slot to its end: its record, and the effect of each end."""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec.structs import replace
from typing_extensions import override

from service.conversations.job.job import JobId, Mode, TurnKey
from service.conversations.job.states import ENDED_TURNS, TurnState
from service.conversations.job.until import NOTHING, TurnDigest
from service.conversations.record.measures import AttemptMeasures
from service.conversations.record.transcript import Attempt, Turn, UnfinishedTurn
from service.conversations.talk.prompt_messages import Rejected
from service.conversations.talk.turn_failures import leaves
from service.scheduling.asking.composed import AskingSurroundings, ComposedAsking
from service.scheduling.asking.posted import RecordedAsking
from service.scheduling.asking.prompts import JobPrompts
from service.scheduling.attempt import RunningAttempt, usage_key
from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.endings import ending_of
from service.scheduling.keeping.token_keeper import TokenKeeper
from service.scheduling.turn_record import record_so_far, said_in, with_answer
from service.scheduling.work import End, OnSlot, RunCounters
from service.store import records
from workers.outcome import Cancelled, CancelReason, Completed, FailureReason, Outcome
from workers.requests.slots import Lease
from workers.requests.tokens import logprobs_mode
from workers.supervised import SupervisedWorker

KEEP_S: Final = 1.0  # seconds after which what an attempt has written is stored
KEEP_TOKENS: Final = 256  # tokens after which it is stored sooner
logger = logging.getLogger(__name__)


class TurnSurroundings(msgspec.Struct, frozen=True, kw_only=True):
    """The objects that all turns of jobs share; owned by ``JobTurns``.

    ``note_end`` gets each turn that has ended.
    """

    jobs: Mapping[JobId, JobPrompts]
    note_end: Callable[[Turn], None]
    counters: RunCounters
    asking: AskingSurroundings
    tokens: TokenKeeper = msgspec.field(default_factory=TokenKeeper)


class JobTurn(OnSlot):
    """A turn that was on a slot and has not ended; written by the scheduler alone.

    ``attempt`` is the running or the last one.
    """

    def __init__(
        self,
        key: TurnKey,
        attempt: RunningAttempt,
        queued_at: datetime,
        so_far: UnfinishedTurn,
        around: TurnSurroundings,
    ) -> None:
        self.key = key
        self.attempt = attempt
        self._around = around
        self._prompts = around.jobs[key.job_id]
        self._agent = self._prompts.agent(key)
        posted = self._prompts.conversations[key.conversation_id].posted
        self._asked = (
            ComposedAsking(key, self._agent, self._prompts, around.asking)
            if posted is None
            else RecordedAsking(key, posted)
        )
        self.charges = so_far.charges
        self.attempts = list(so_far.attempts)
        self.rejected: list[Rejected] = list(so_far.rejected)
        self._queued_at = so_far.queued_at
        self.ready_at = queued_at  # for the running attempt, or for the next one
        self._started_at = so_far.started_at or attempt.started_at
        self._kept_tokens, self._kept_s = 0, 0.0  # the durable part of the running attempt; 0 before the first look
        self._has_stored = so_far.half is not None
        self._args: Mapping[str, object] = {}  # flags of the newest attempt's engine
        if so_far.half is not None:
            self._asked.restore(so_far.half)

    def __repr__(self) -> str:
        return f"<JobTurn {self.key} attempts={len(self.attempts)} {self.attempt!r}>"

    @property
    def may_run_again(self) -> bool:
        """Always true: an answer counts only once it is complete."""
        return True

    def begin_attempt(self, attempt: RunningAttempt) -> None:
        """Begin another attempt."""
        self.attempt = attempt
        self._kept_tokens, self._kept_s = 0, 0.0
        self._asked.forget_attempt()

    # Looking

    @property
    def so_far(self) -> UnfinishedTurn:
        """The attempts and charges of the turn, as the next life of the service needs them."""
        return UnfinishedTurn(
            key=self.key,
            attempts=tuple(self.attempts),
            rejected=tuple(self.rejected),
            charges=self.charges,
            queued_at=self._queued_at,
            started_at=self._started_at,
            half=None if self._asked.half is None else self._asked.kept,
        )

    def take_half(self, now_s: float) -> records.HalfWritten | None:
        """Return the half that the running attempt has written, if it is due; ``now_s`` is a monotonic time."""
        self._kept_s = self._kept_s or now_s
        new = self.attempt.answer.output_tokens - self._kept_tokens
        if new <= 0 or (now_s - self._kept_s < KEEP_S and new < KEEP_TOKENS):
            return None
        self._kept_tokens, self._kept_s = self._kept_tokens + new, now_s
        half = self._asked.half_so_far(self.attempt)
        if half is None and not self._has_stored:
            return None
        self._has_stored = half is not None
        state, reason, detail = ending_of(Cancelled(reason=CancelReason.SHUTDOWN))
        running = replace(self.attempt_so_far, outcome=state, reason=reason, detail=detail)
        so_far = replace(self.so_far, attempts=(*self.attempts, running), half=half)
        return records.HalfWritten(key=self.key, so_far=so_far)

    @property
    def attempt_so_far(self) -> Attempt:
        """The record of the running attempt so far."""
        return record_so_far(self.attempt, self._asked.prompt)

    def attempts_so_far(self, *, is_running: bool) -> Turn:
        """Return the turn with only its attempts and times, which costs less than a full snapshot."""
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
        """Return the turn as a transcript shows it, in ``state``."""
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
        turn = with_answer(turn, self.attempt, has_markup=self._agent.markup)
        return turn if self._asked.whole is None else replace(turn, answer=self._asked.whole)

    # Running

    @override
    async def run(self, worker: SupervisedWorker, lease: Lease) -> Outcome:
        self._args = worker.spec.args
        return await self._asked.run(self.attempt, self.so_far, worker, lease)

    # Ending

    @override
    def end_attempt(self, outcome: Outcome) -> None:
        self.attempt.end()
        state, reason, detail = ending_of(outcome)
        ended = replace(self.attempt_so_far, outcome=state, reason=reason, detail=detail)
        # The calls of a valid answer are stored with the turn.
        self.attempts.append(replace(ended, tool_calls=()) if isinstance(outcome, Completed) else ended)

    @override
    def complete(self) -> End:
        """Complete the turn, unless its answer is not valid or was made with other weights than its conversation's."""
        key, answer = self.key, self.attempt.answer
        versions = [version for version in (answer.first_version, answer.last_version) if version is not None]
        changed = next((fault for version in versions if (fault := self._prompts.pin_weights(key, version))), None)
        if changed is not None:
            self._refuse_answer(FailureReason.WEIGHTS_CHANGED, changed)
            return self.fail(FailureReason.WEIGHTS_CHANGED, changed)
        if (fault := self._asked.take_fault()) is not None:
            return self._reject(fault)
        words = said_in(answer, has_markup=self._agent.markup).words
        self._prompts.discussion(key.conversation_id).add(key.agent_id, key.round, words)
        completed = events.TurnCompleted(
            key=key,
            seconds=self.attempt.seconds,
            reading=self.attempt.reading,
            digest=self._digest(words) if self._asked.until or self._prompts.job.mode is Mode.LED else NOTHING,
        )
        return self._finish(completed, TurnState.COMPLETED)

    def _digest(self, words: str) -> TurnDigest:
        usage = self.attempt.answer.usage
        return self._prompts.digest(self.key, self._asked.fulfils, words, usage.completion_tokens if usage else None)

    def _reject(self, fault: str) -> End:
        """Ask again after an answer that is not valid, unless its retries are used up."""
        self.rejected.append((self.attempt.answer.text, fault))
        self._refuse_answer(FailureReason.INVALID_ANSWER, fault)
        validation = self._agent.validation
        if validation is not None and len(self.rejected) <= validation.retries:
            again = self.run_again(FailureReason.INVALID_ANSWER, fault, None)
            return replace(again, event=events.TurnRejected(key=self.key))
        return self.fail(FailureReason.VALIDATION_EXHAUSTED, f"the last of {len(self.rejected)} answers: {fault}")

    def _refuse_answer(self, reason: FailureReason, detail: str) -> None:
        """Mark the last attempt as failed: its answer is complete but does not count."""
        calls = tuple(self.attempt.answer.tool_calls)
        self.attempts[-1] = replace(
            self.attempts[-1], outcome=TurnState.FAILED, reason=reason, detail=detail, tool_calls=calls
        )

    @override
    def run_again(self, reason: str, detail: str, trial: Trial | None) -> End:
        if reason != FailureReason.INVALID_ANSWER:
            logger.warning("turn %s: %s: %s; it runs again", self.key, reason, detail)
        self.attempt.half = self._asked.keep_half(self.attempt, reason)
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
        """End the turn, and its conversation with it."""
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
        tokens = None
        if state is TurnState.COMPLETED:
            turn = replace(turn, fulfils=self._asked.fulfils)
            if agent.record is not None:
                turn, tokens = self._with_tokens(turn)
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
            tokens=tokens,
        )
        return End(event=event, records=[ended])

    def _with_tokens(self, turn: Turn) -> tuple[Turn, bytes | None]:
        end = self._prompts.chains.get((self.key.conversation_id, self.key.agent_id))
        recorded, packed = self._around.tokens.pack_turn(end, self.attempt.answer, logprobs_mode(self._args))
        turn = replace(turn, recorded=recorded)
        self._prompts.note_chain(turn)
        return turn, packed

    def _measures(self) -> AttemptMeasures:
        last = self.attempts[-1]
        return self.attempt.measures(self._agent.model, last.outcome, last.reason)

    @property
    def _whose(self) -> records.UsageKey:
        return usage_key(self._agent, self._prompts.job.owner, self.key.job_id)

"""One turn from the moment it is ready to its end, over all its attempts."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

import anyio

from service.conversations.charges import Charges
from service.conversations.job import Agent, TurnKey
from service.conversations.markup import Said, read_markup
from service.conversations.prompt_messages import Rejected
from service.conversations.states import ENDED_TURNS, TurnState
from service.conversations.transcript import Attempt, TokenUsage, Turn, UnfinishedTurn
from service.scheduling.answer_validity import judge
from service.scheduling.core.queue.affinity import PromptReading
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.policy.liveness import Verdict
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest

WHY: Final[Mapping[CancelReason, str | None]] = {
    CancelReason.CONVERSATION_ENDED: None,
    CancelReason.SHUTDOWN: "Roundhouse was stopped",
    CancelReason.WEIGHTS: "its engine was given new weights, and ended what was in flight (mode: abort)",
    CancelReason.STORE_LOST: "the store could not be read",
    CancelReason.LEASE_LOST: "this node could not renew its lease, and another may take over",
}
CANCELLED: Final[Mapping[CancelReason, FailureReason]] = {
    CancelReason.CONVERSATION_ENDED: FailureReason.CANCELLED,
    CancelReason.WEIGHTS: FailureReason.WEIGHTS_CHANGED,
}
QUIET: Final = frozenset({Verdict.SILENT, Verdict.STALLED, Verdict.DEAD})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a turn in flight is: tokens of the prompt read, of the answer written, and the watch's verdict on it.

    ``silent_s`` is 0 until the watch calls it silent; ``silence_limit_s`` is how long it may be.
    """

    key: TurnKey
    prompt_tokens_done: int
    prompt_tokens: int | None
    output_tokens: int
    tokens_per_s: float
    verdict: str | None
    silent_s: int
    silence_limit_s: float | None


class TurnRun:
    """What is known of a turn that has not ended; written by the scheduler alone."""

    def __init__(self, key: TurnKey, agent: Agent, queued_at: datetime, so_far: UnfinishedTurn | None = None) -> None:
        self.key = key
        self._agent = agent
        self.charges = Charges()
        self.attempts: list[Attempt] = []
        self._is_cut_off = False
        self.is_interrupted = False
        self._queued_at = queued_at
        self._started_at: datetime | None = None
        self._attempt_at: datetime | None = None
        self._scope = anyio.CancelScope()
        self._worker: str | None = None
        self._incarnation: int | None = None
        self.answer: Answer | None = None
        self.running: InFlightRequest | None = None
        self.rejected: list[Rejected] = []
        self._fault: str | None = None  # of the answer that was judged
        self.seconds = 0.0  # for which the last attempt held its slot
        self._began_at = 0.0
        if so_far is not None:  # in an earlier life of the service
            self.charges = so_far.charges
            self.attempts, self.rejected = list(so_far.attempts), list(so_far.rejected)
            self._queued_at, self._started_at = so_far.queued_at, so_far.started_at

    def __repr__(self) -> str:
        return f"<TurnRun {self.key} worker={self._worker} attempts={len(self.attempts)}>"

    def begin_attempt(self, worker: str, incarnation: int) -> tuple[Answer, anyio.CancelScope]:
        """Note that the turn is on a slot; return what its answer goes into, and the scope to ask for it in."""
        self._attempt_at = datetime.now(UTC)
        self._started_at = self._started_at or self._attempt_at
        self._worker, self._incarnation = worker, incarnation
        self._scope = anyio.CancelScope()
        self.is_interrupted = False
        if self._is_cut_off:  # it was cut off before its task had its first turn
            self._scope.cancel()
        self.answer, self.running = Answer(time.monotonic), None
        self._began_at = time.monotonic()
        return self.answer, self._scope

    @property
    def so_far(self) -> UnfinishedTurn:
        """What the turn has behind it, as the next life of the service would need it."""
        return UnfinishedTurn(
            key=self.key,
            attempts=tuple(self.attempts),
            rejected=tuple(self.rejected),
            charges=self.charges,
            queued_at=self._queued_at,
            started_at=self._started_at,
        )

    def interrupt(self) -> None:
        """End the attempt that is running; the turn itself goes on later."""
        self.is_interrupted = True
        self._scope.cancel()

    def cut_off(self) -> None:
        """End the attempt that is running, or is about to."""
        self._is_cut_off = True
        self._scope.cancel()

    @property
    def reading(self) -> PromptReading | None:
        """What the engine has read for the newest generation, as far as it has told."""
        generation = self.answer.generation if self.answer else None
        if generation is None or generation.usage is None or generation.first_token_at is None:
            return None
        usage, asked_at = generation.usage, generation.begun_at or generation.started_at
        return PromptReading(
            fresh_tokens=usage.prompt_tokens - usage.cached_tokens,
            seconds=max(0.0, generation.first_token_at - asked_at),
            context_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    @property
    def rejections(self) -> int:
        """How many answers were not valid."""
        return len(self.rejected)

    @property
    def said(self) -> Said:
        """What the answer says to others so far, and what it keeps to itself."""
        text = self.answer.text if self.answer else ""
        if not self._agent.markup:
            return Said(words=text)
        said = read_markup(text)
        # The words beside a tool's call are a message of their own, and one for all calls of that message.
        calls = self.answer.tool_calls if self.answer else []
        earlier = dict.fromkeys(read_markup(call.said).thinking for call in calls)
        return replace(said, thinking="\n\n".join(thought for thought in (*earlier, said.thinking) if thought))

    async def judge_answer(self) -> None:
        """Find out whether a complete answer is valid; its slot may be another turn's meanwhile."""
        if self._agent.validation is not None and self.answer is not None:
            self._fault = await judge(self._agent.validation, self.answer.text)

    def take_answer(self) -> str | None:
        """Take a complete answer that was judged; return why it is not valid, if so."""
        fault, self._fault = self._fault, None
        if fault is not None:
            self.rejected.append((self.answer.text if self.answer else "", fault))
            self.refuse_answer(FailureReason.VALIDATION_EXHAUSTED, fault)
        return fault

    def refuse_answer(self, reason: FailureReason, detail: str) -> None:
        """Note that a complete answer does not stand."""
        calls = tuple(self.answer.tool_calls) if self.answer else ()
        self.attempts[-1] = replace(
            self.attempts[-1], outcome=TurnState.FAILED, reason=reason, detail=detail, tool_calls=calls
        )

    @property
    def weight_versions(self) -> tuple[int | None, int | None]:
        """The versions of its engine's weights that the answer began and ended with."""
        return (self.answer.first_version, self.answer.last_version) if self.answer else (None, None)

    def end_attempt(self, outcome: Outcome) -> None:
        """Keep what an attempt has brought, however it ended."""
        state, reason, detail = _ending(outcome)
        if self.answer is None or self._attempt_at is None or self._worker is None or self._incarnation is None:
            raise RuntimeError(f"{self!r} has no attempt to end")
        self.seconds = time.monotonic() - self._began_at
        self.attempts.append(
            Attempt(
                outcome=state,
                reason=reason,
                detail=detail,
                text=self.answer.text,
                worker=self._worker,
                incarnation=self._incarnation,
                started_at=self._attempt_at,
                finished_at=datetime.now(UTC),
                # Those of the answer that stands are the turn's.
                tool_calls=() if isinstance(outcome, Completed) else tuple(self.answer.tool_calls),
            )
        )

    def snapshot(self, state: TurnState, reason: str | None = None, detail: str | None = None) -> Turn:
        """Return the turn as it stands in a transcript, in ``state``."""
        answer = self.answer
        usage = answer.usage if answer else None
        said = self.said
        is_over = state in ENDED_TURNS
        return Turn(
            key=self.key,
            state=state,
            reason=reason,
            detail=detail,
            text=said.words,
            thinking="\n\n".join(thought for thought in (answer.reasoning if answer else "", said.thinking) if thought),
            tool_calls=tuple(answer.tool_calls) if answer else (),
            signals=tuple(answer.signals) if answer else (),
            finish_reason=answer.finish_reason if answer else None,
            attempts=tuple(self.attempts),
            usage=TokenUsage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
            if usage
            else TokenUsage(),
            worker=self._worker,
            incarnation=self._incarnation,
            weight_version=answer.first_version if answer else None,
            weight_version_end=answer.last_version if answer else None,
            queued_at=self._queued_at,
            started_at=self._started_at,
            first_token_at=self._first_token_at(),
            finished_at=datetime.now(UTC) if is_over else None,
        )

    def progress(self) -> Progress:
        """Return how far the attempt on a slot is."""
        answer = self.answer
        generation = answer.generation if answer else None
        told = generation.prompt_progress if generation else None
        judged = self.running.judgement if self.running else None
        return Progress(
            key=self.key,
            prompt_tokens_done=told.processed if told else 0,
            prompt_tokens=told.total if told else None,
            output_tokens=answer.output_tokens if answer else 0,
            tokens_per_s=generation.tokens_per_s if generation else 0.0,
            verdict=judged.verdict if judged else None,
            silent_s=int(judged.silent_s) if judged and judged.verdict in QUIET else 0,
            silence_limit_s=judged.limit_s if judged else None,
        )

    def _first_token_at(self) -> datetime | None:
        answer = self.answer
        if answer is None or answer.first_token_at is None or self._attempt_at is None:
            return None
        return self._attempt_at + timedelta(seconds=answer.first_token_at - answer.started_at)


def _ending(outcome: Outcome) -> tuple[TurnState, str | None, str | None]:
    match outcome:
        case Completed():
            return TurnState.COMPLETED, None, None
        case EngineFailed() | RequestFailed():
            return TurnState.FAILED, outcome.reason, outcome.detail
        case Cancelled():
            return TurnState.CANCELLED, CANCELLED.get(outcome.reason, FailureReason.SHUTDOWN), WHY[outcome.reason]
        case _:
            assert_never(outcome)

"""One try of a turn on one incarnation of one worker, while it runs and until the next one begins."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, assert_never

import anyio
import msgspec
from msgspec.structs import replace

from service.conversations.markup import Said, read_markup
from service.conversations.prompt_record import PromptRecord, keep_exchanges
from service.conversations.states import TurnState
from service.conversations.transcript import Attempt, TokenUsage, Turn
from service.scheduling.attempt_usage import AttemptPlace
from service.scheduling.core.queue.affinity import PromptReading
from workers.outcome import Cancelled, CancelReason, Completed, EngineFailed, FailureReason, Outcome, RequestFailed
from workers.requests.answer import Answer
from workers.requests.in_flight import InFlightRequest

WHY: Final[Mapping[CancelReason, str | None]] = {
    CancelReason.CONVERSATION_ENDED: None,
    CancelReason.SHUTDOWN: "Roundhouse was stopped",
    CancelReason.WEIGHTS: "its engine was given new weights, and ended what was in flight (mode: abort)",
    CancelReason.CACHE_FULL: "the KV cache had no room for it beside the others; the youngest gives way",
    CancelReason.SLOT_LOST: "it had lent its slot while its tools ran, and the engine is not there any more",
    CancelReason.STORE_LOST: "the store could not be read",
    CancelReason.LEASE_LOST: "it runs again: this node could not renew its lease, or is upgraded in place",
}
CANCELLED: Final[Mapping[CancelReason, FailureReason]] = {
    CancelReason.CONVERSATION_ENDED: FailureReason.CANCELLED,
    CancelReason.WEIGHTS: FailureReason.WEIGHTS_CHANGED,
    CancelReason.CACHE_FULL: FailureReason.CACHE_FULL,
    CancelReason.SLOT_LOST: FailureReason.SLOT_LOST,
}


class RunningAttempt:
    """An attempt as it is known; written by the runner of the turn and the request that it makes."""

    def __init__(self, worker: str, incarnation: int) -> None:
        self.worker = worker
        self._incarnation = incarnation
        self.started_at = datetime.now(UTC)
        self._began_at = time.monotonic()
        self.answer = Answer(time.monotonic)
        self.request: InFlightRequest | None = None  # once it was sent
        self.prompt: PromptRecord | None = None  # once it was made
        self.scope = anyio.CancelScope()
        self.is_interrupted = False  # by us; its turn goes on later
        self.seconds = 0.0  # for which it held its slot, once it has ended
        self.lent_s = 0.0  # for which others had it, while its tools ran

    def __repr__(self) -> str:
        return f"<RunningAttempt {self.worker}#{self._incarnation} {self.answer!r}>"

    @property
    def place(self) -> AttemptPlace:
        """Its worker, and its beginning."""
        return AttemptPlace(
            worker=self.worker, incarnation=self._incarnation, began_at=self.started_at, began_s=self._began_at
        )

    def interrupt(self) -> None:
        """End it; the turn itself goes on later."""
        self.is_interrupted = True
        self.scope.cancel()

    def end_attempt(self, outcome: Outcome) -> Attempt:
        """End the attempt; return its record."""
        self.seconds = time.monotonic() - self._began_at - self.lent_s
        state, reason, detail = _ending(outcome)
        attempt = replace(self.so_far(), outcome=state, reason=reason, detail=detail, finished_at=datetime.now(UTC))
        # Those of the answer that stands are the turn's.
        return replace(attempt, tool_calls=()) if isinstance(outcome, Completed) else attempt

    def so_far(self) -> Attempt:
        """Return the record of the attempt so far."""
        return Attempt(
            outcome=TurnState.IN_FLIGHT,
            reason=None,
            detail=None,
            text=self.answer.text,
            worker=self.worker,
            incarnation=self._incarnation,
            started_at=self.started_at,
            finished_at=datetime.now(UTC),
            tool_calls=tuple(self.answer.tool_calls),
            constrained_by=self.answer.constrained_by,
            prompt=self.prompt_so_far,
        )

    @property
    def prompt_so_far(self) -> PromptRecord | None:
        """The kept part of its prompt, with the exchanges with tools by which it has grown."""
        if self.prompt is None:
            return None
        return msgspec.structs.replace(
            self.prompt, exchanges=keep_exchanges(self.answer.exchanges), thought=self.answer.thought
        )

    @property
    def reading(self) -> PromptReading | None:
        """The engine's reading for the newest generation, as far as it has told."""
        generation = self.answer.generation
        if generation.usage is None or generation.first_token_at is None:
            return None
        usage, asked_at = generation.usage, generation.begun_at or generation.started_at
        return PromptReading(
            fresh_tokens=usage.prompt_tokens - usage.cached_tokens,
            seconds=max(0.0, generation.first_token_at - asked_at),
            context_tokens=usage.prompt_tokens + usage.completion_tokens,
            answer_tokens=usage.completion_tokens,
            answer_s=max(0.0, generation.last_progress_at - generation.first_token_at),
        )

    def said(self, *, has_markup: bool) -> Said:
        """Return the answer so far: its public words, and its thoughts."""
        if not has_markup:
            return Said(words=self.answer.text)
        said = read_markup(self.answer.text)
        # The words beside a tool's call are a message of their own, and one for all calls of that message.
        earlier = dict.fromkeys(read_markup(call.said).thinking for call in self.answer.tool_calls)
        return replace(said, thinking="\n\n".join(thought for thought in (*earlier, said.thinking) if thought))

    def describe(self, turn: Turn, *, has_markup: bool) -> Turn:
        """Return ``turn`` with what this attempt has brought."""
        answer, said = self.answer, self.said(has_markup=has_markup)
        usage = answer.usage
        return replace(
            turn,
            text=said.words,
            thinking="\n\n".join(thought for thought in (answer.reasoning, said.thinking) if thought),
            tool_calls=tuple(answer.tool_calls),
            signals=tuple(answer.signals),
            finish_reason=answer.finish_reason,
            usage=TokenUsage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=min(usage.cached_tokens, answer.told_cost.cached_tokens),
            )
            if usage
            else TokenUsage(),
            worker=self.worker,
            incarnation=self._incarnation,
            weight_version=answer.first_version,
            weight_version_end=answer.last_version,
            first_token_at=self.first_token_at,
        )

    @property
    def first_token_at(self) -> datetime | None:
        """When it had its first token, None where it has none."""
        if self.answer.first_token_at is None:
            return None
        return self.started_at + timedelta(seconds=self.answer.first_token_at - self._began_at)


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

"""The record of a turn's attempt, for transcripts, displays and the store."""

from datetime import UTC, datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.job.job import TurnKey
from service.conversations.job.markup import Said, read_markup
from service.conversations.job.states import TurnState
from service.conversations.record.findings import findings_of
from service.conversations.record.transcript import Attempt, TokenUsage, Turn
from service.conversations.talk.prompt_record import PromptRecord, keep_exchanges
from service.scheduling.attempt import RunningAttempt
from workers.policy.liveness import Verdict
from workers.requests.answer import Answer
from workers.tools.thoughts import split_thoughts

QUIET: Final = frozenset({Verdict.SILENT, Verdict.STALLED, Verdict.DEAD})


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a turn in flight: tokens read and written, and the watch's verdict.

    ``silent_s`` is 0 until the watch calls it silent. ``silence_limit_s`` is how long it may be.
    """

    key: TurnKey
    prompt_tokens_done: int
    prompt_tokens: int | None
    output_tokens: int
    tokens_per_s: float
    verdict: str | None
    silent_s: int
    silence_limit_s: float | None


def progress_of(key: TurnKey, attempt: RunningAttempt) -> Progress:
    """Return the progress of an attempt on a slot."""
    answer, request = attempt.answer, attempt.request
    read, judged = answer.generation.prompt_progress, request.judgement if request else None
    return Progress(
        key=key,
        prompt_tokens_done=read.processed if read else 0,
        prompt_tokens=read.total if read else None,
        output_tokens=answer.output_tokens,
        tokens_per_s=answer.generation.tokens_per_s,
        verdict=judged.verdict if judged else None,
        silent_s=int(judged.silent_s) if judged and judged.verdict in QUIET else 0,
        silence_limit_s=judged.limit_s if judged else None,
    )


def record_so_far(attempt: RunningAttempt, prompt: PromptRecord | None) -> Attempt:
    """Return the record of an attempt so far, with its prompt and the exchanges added to it."""
    answer = attempt.answer
    if prompt is not None:
        prompt = replace(prompt, exchanges=keep_exchanges(answer.exchanges), thought=answer.thought)
    return Attempt(
        outcome=TurnState.IN_FLIGHT,
        reason=None,
        detail=None,
        text=answer.text,
        worker=attempt.worker,
        incarnation=attempt.incarnation,
        started_at=attempt.started_at,
        finished_at=datetime.now(UTC),
        tool_calls=tuple(answer.tool_calls),
        constrained_by=answer.constrained_by,
        prompt=prompt,
        continued_at=answer.cost_parts.at_tokens if answer.is_continued else 0,
    )


def said_in(answer: Answer, *, has_markup: bool) -> Said:
    """Return the public words and the thoughts of an answer so far."""
    if not has_markup:
        text = answer.text
        public, thinking = split_thoughts(text)
        return Said(words=text if public == text else public.strip(), thinking=thinking)
    said = read_markup(answer.text)
    # The words beside a tool call are a message of their own, shared by all calls of that message.
    earlier = dict.fromkeys(read_markup(call.said).thinking for call in answer.tool_calls)
    return replace(said, thinking="\n\n".join(thought for thought in (*earlier, said.thinking) if thought))


def with_answer(turn: Turn, attempt: RunningAttempt, *, has_markup: bool) -> Turn:
    """Return ``turn`` with the results of an attempt."""
    answer = attempt.answer
    said, usage = said_in(answer, has_markup=has_markup), answer.usage
    return replace(
        turn,
        text=said.words,
        thinking="\n\n".join(thought for thought in (answer.reasoning, said.thinking) if thought),
        tool_calls=tuple(answer.tool_calls),
        signals=tuple(answer.signals),
        finish_reason=answer.generation.finish_reason,
        findings=findings_of(answer, said.words) if turn.state is TurnState.COMPLETED else (),
        usage=TokenUsage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=min(usage.cached_tokens, answer.told_cost.cached_tokens),
        )
        if usage
        else TokenUsage(),
        worker=attempt.worker,
        incarnation=attempt.incarnation,
        weight_version=answer.first_version,
        weight_version_end=answer.last_version,
        first_token_at=attempt.first_token_at,
    )

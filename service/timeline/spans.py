"""The attempts of a job's turns as spans of time on their workers (specification, "Timeline").

A large job has a hundred thousand, so the garbage collector does not track them (``gc=False``): scanning them would
block the process, and they form no cycles.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Turn

DETAIL_CHARS: Final = 200  # kept characters of a failure's detail: the transcript has all


class ToolName(msgspec.Struct, frozen=True, gc=False):
    """The name of a called tool."""

    name: str


class AttemptTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The times of a stored attempt."""

    outcome: TurnState
    reason: str | None
    detail: str | None
    worker: str
    incarnation: int
    started_at: datetime
    finished_at: datetime
    tool_calls: tuple[ToolName, ...] = ()


class Tokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The tokens of a stored turn."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class TurnTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The times of a stored turn: all but its words, which may be megabytes."""

    key: TurnKey
    attempts: tuple[AttemptTimes, ...]
    queued_at: datetime | None
    state: TurnState = TurnState.READY  # the store has no state for an unfinished turn
    tool_calls: tuple[ToolName, ...] = ()
    usage: Tokens = Tokens()
    first_token_at: datetime | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt; times are in seconds after the timeline's origin, and unknown fields are left out.

    ``number`` counts the attempts of the turn from 1, ``row`` the places of its worker from 0. It waited for its slot
    from ``queued_s`` to ``started_s``; one without ``finished_s`` is running.
    """

    conversation: str
    agent: str
    round: int
    number: int
    worker: str
    incarnation: int
    outcome: TurnState
    started_s: float
    row: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    reason: str | None = None
    detail: str | None = None
    tools: tuple[str, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


def times_of(turn: Turn) -> TurnTimes:
    """Return the times of a turn that is not stored yet."""
    return msgspec.convert(turn, TurnTimes, from_attributes=True)


def spans_of(turn: TurnTimes, origin: datetime) -> list[Span]:
    """Return a turn's attempts, in their order.

    An attempt after the first has waited since the one before it ended. Tokens and the first token are known only for
    the last one.
    """
    spans: list[Span] = []
    queued_at = turn.queued_at
    for number, attempt in enumerate(turn.attempts, start=1):
        is_last = number == len(turn.attempts)
        is_running = attempt.outcome is TurnState.IN_FLIGHT
        first = turn.first_token_at if is_last else None
        if first is not None and first < attempt.started_at:  # it belongs to an earlier attempt
            first = None
        usage = turn.usage if is_last else Tokens()
        calls = attempt.tool_calls or (turn.tool_calls if is_last else ())
        spans.append(
            Span(
                conversation=turn.key.conversation_id,
                agent=turn.key.agent_id,
                round=turn.key.round,
                number=number,
                worker=attempt.worker,
                incarnation=attempt.incarnation,
                outcome=attempt.outcome,
                started_s=seconds(attempt.started_at, origin),
                queued_s=None if queued_at is None else seconds(queued_at, origin),
                first_token_s=None if first is None else seconds(first, origin),
                finished_s=None if is_running else seconds(attempt.finished_at, origin),
                reason=attempt.reason,
                detail=None if attempt.detail is None else attempt.detail[:DETAIL_CHARS],
                tools=tuple(call.name for call in calls),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            )
        )
        queued_at = attempt.finished_at
    return spans


class GatheredSpans:
    """The attempts of a job's turns, each turn once, though one that ends during the read is added twice.

    ``running`` are turns on slots, taken before anything is read; then unfinished ones are added, then ended ones.
    """

    def __init__(self, origin: datetime, running: Iterable[TurnTimes]) -> None:
        self._origin = origin
        self._open = {turn.key: turn for turn in running}
        self._spans: list[Span] = []

    def __repr__(self) -> str:
        return f"<GatheredSpans {len(self._spans)} of ended turns, {len(self._open)} turns have not ended>"

    def add_unfinished(self, turns: Iterable[TurnTimes]) -> None:
        """Add turns that were on a slot and have not ended; running ones, which know more, stay."""
        for turn in turns:
            self._open.setdefault(turn.key, turn)

    def add_ended(self, turns: Iterable[TurnTimes]) -> None:
        """Add ended turns, which replace unfinished ones."""
        for turn in turns:
            self._open.pop(turn.key, None)
            self._spans += spans_of(turn, self._origin)

    def drain(self) -> list[Span]:
        """Return all attempts, unordered."""
        spans, self._spans = self._spans, []
        for turn in self._open.values():
            spans += spans_of(turn, self._origin)
        return spans


def seconds(at: datetime, origin: datetime) -> float:
    """Return the seconds from the origin to a moment, to the microsecond."""
    return round((at - origin).total_seconds(), 6)

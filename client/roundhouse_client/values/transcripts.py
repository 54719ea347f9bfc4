"""Conversations as they were held, and what was really asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage(Value):
    """The tokens of a turn; None is not known."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Value):
    """One try of a turn on one engine; ``text`` is what came, whole or not.

    ``constrained_by`` is the engine's parameter that held the model to its validation, None where none did.
    """

    outcome: str
    reason: str | None
    detail: str | None
    text: str
    worker: str
    incarnation: int
    started_at: datetime
    finished_at: datetime
    tool_calls: tuple[Mapping[str, object], ...]
    constrained_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited(Value):
    """The conversation of a job in which a turn was spoken; the job may have been deleted."""

    job: str
    conversation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMemory(Value):
    """The part of the discussion that a turn was shown: from a round on.

    ``summary_of`` are the first and the last of the rounds for which a summary stood, None where nothing did.
    """

    from_round: int
    summary_of: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Value):
    """One agent speaking once in one round; rounds count from 0. It was spoken ``by`` a model or a caller.

    One that is ``inherited`` was spoken in another conversation; of ``kind`` ``summary`` it sums up what its agent is
    shown no more.
    """

    agent: str
    role: str
    round: int
    state: str
    reason: str | None
    detail: str | None
    text: str
    thinking: str
    tool_calls: tuple[Mapping[str, object], ...]
    signals: tuple[Mapping[str, object], ...]
    finish_reason: str | None
    attempts: tuple[Attempt, ...]
    usage: TokenUsage
    worker: str | None
    incarnation: int | None
    weight_version: int | None
    weight_version_end: int | None
    queued_at: datetime | None
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None
    by: str = "model"
    kind: str = "turn"
    inherited: Inherited | None = None
    memory: TurnMemory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedTurn(Value):
    """A turn that a caller is to speak; it is waited for ``until`` then, or for ever."""

    job: str
    conversation: str
    agent: str
    round: int
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedTurns(Value):
    """Turns that callers are to speak, the oldest first."""

    awaited: tuple[AwaitedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript(Value):
    """One conversation; turns in the order in which they became visible.

    ``ended_by`` is ``rounds``, or the condition that ended it: its place in ``until``, and the ``agent`` alone in it;
    or the ``leader`` that did.
    None where it is not completed. ``left`` are the agents that left before that.
    """

    id: str
    state: str
    reason: str | None
    metadata: Mapping[str, object]
    turns: tuple[Turn, ...]
    ended_by: object = None
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlace(Value):
    """The place of a turn in its job."""

    conversation: str
    agent: str
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp(Value):
    """A pattern, or without one a schema, that is not tried any more from a turn on: it ran out of time too often.

    ``path`` is where it stands in the job; of a condition, in its conversation's ``until``.
    """

    path: str
    pattern: str | None
    since: TurnPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Value):
    """All transcripts of a job that has ended; the client gives them one by one."""

    id: str
    state: str
    given_up: tuple[GivenUp, ...]
    conversations: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt(Value):
    """The prompt of one attempt: messages as the engine was sent them, parameters, and definitions of tools.

    None where an older version of Roundhouse asked, and kept nothing of it.
    """

    messages: tuple[Mapping[str, object], ...] | None
    params: Mapping[str, object] | None
    tools: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompts(Value):
    """The prompts of a turn: an entry for each of its attempts, in their order."""

    attempts: tuple[AskedPrompt, ...]

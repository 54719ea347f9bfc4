"""Transcripts of conversations, and their exact prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage(Value):
    """The tokens of a turn; None where not known."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt(Value):
    """One try of a turn on one engine; ``text`` is its answer, complete or not.

    ``constrained_by`` is the engine's parameter that enforced the validation, None without one.
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
class Continued(Value):
    """A break in an answer: the tokens before it, why it broke off there, and the worker that went on."""

    at_tokens: int
    because: str | None
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited(Value):
    """The job and conversation in which an inherited turn was spoken; the job may be deleted."""

    job: str
    conversation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMemory(Value):
    """A turn's memory window: the discussion from a round on.

    ``summary_of`` are the first and last rounds that a summary replaced, None without a summary.
    """

    from_round: int
    summary_of: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn(Value):
    """The recorded tokens of a turn's answer; ``partial`` lists what of the record is not whole."""

    tokens: int
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Value):
    """One agent's words in one round; rounds count from 0. It was spoken ``by`` a model or a caller.

    An ``inherited`` one was spoken in another conversation; one of ``kind`` ``summary`` sums up rounds outside its
    agent's memory window.
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
    findings: tuple[str, ...] = ()
    continued: tuple[Continued, ...] = ()
    recorded: RecordedTurn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedTurn(Value):
    """A turn that waits for a caller, ``until`` then or for ever."""

    job: str
    conversation: str
    agent: str
    round: int
    since: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedTurns(Value):
    """Turns that wait for callers, the oldest first."""

    awaited: tuple[AwaitedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript(Value):
    """One conversation; turns are in the order in which they became visible.

    ``ended_by`` is ``rounds``, the condition that ended it, by its place in ``until`` with the ``agent`` that met it,
    or the ``leader`` that ended it.
    It is None unless the conversation is completed. ``left`` are the agents that left before the end.
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
    """A pattern, or without one a schema, that is not tried from a turn on, as it ran out of time too often.

    ``path`` is its path in the job; for a condition, in its conversation's ``until``.
    """

    path: str
    pattern: str | None
    since: TurnPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Value):
    """All transcripts of an ended job; the client yields them one by one."""

    id: str
    state: str
    given_up: tuple[GivenUp, ...]
    conversations: tuple[Transcript, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt(Value):
    """The prompt of one attempt: messages as sent to the engine, parameters, and tool definitions.

    None if it is not known: the turn was inherited from a job that was deleted since.
    """

    messages: tuple[Mapping[str, object], ...] | None
    params: Mapping[str, object] | None
    tools: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompts(Value):
    """The prompts of a turn, one per attempt, in order."""

    attempts: tuple[AskedPrompt, ...]

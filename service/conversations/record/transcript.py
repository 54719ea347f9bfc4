"""The records of turns, their charges, and conversations, as callers see them (specification, "Transcripts")."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

import msgspec

from service.conversations.job.client_request import WholeAnswer
from service.conversations.job.job import JobId, SpokenBy, TurnKey, TurnKind
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.until import Ending
from service.conversations.job.wording import DEFAULT_ROLE
from service.conversations.record.token_arrays import TurnTokens
from service.conversations.talk.prompt_record import PromptRecord
from workers.requests.stored_half import StoredHalf
from workers.tools.calls import Signal, ToolRecord

TURNS_A_PIECE: Final = 100
OF_DECISIONS: Final = ("key", "fulfils", "leaves")  # fields of a turn that no transcript shows
TIMES: Final = ("queued_at", "started_at", "first_token_at", "finished_at")
TIMES_OF_ATTEMPTS: Final = ("started_at", "finished_at")


class Charges(msgspec.Struct, frozen=True, kw_only=True):
    """The deaths and refusals of a turn since an engine last answered it.

    ``is_suspect`` says that it was on an engine that died. ``deaths`` counts engines that died with it alone,
    ``outside`` those that a signal from outside ended while it was there. ``refusals`` are by engines that answered
    others, ``stalls`` silences of engines that worked meanwhile. ``refused_at`` is the time of the last refusal, in
    seconds since the epoch, ``refused_s`` the time asked since the first one. ``service_ends`` counts crashes of the
    service while it was at work.
    """

    is_suspect: bool = False
    deaths: int = 0
    outside: int = 0
    refusals: int = 0
    refused_at: float | None = None
    refused_s: float = 0.0
    stalls: int = 0
    service_ends: int = 0

    def cleared(self) -> "Charges":
        """Return the remaining charges after an engine's answer, or once another turn explains its death."""
        return Charges(service_ends=self.service_ends)


class TokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a turn; None is unknown."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a turn on one incarnation of one worker; ``text`` is its answer, complete or not.

    ``constrained_by`` is the engine's parameter that constrained the answer, None without one. ``prompt`` is the record
    from which the prompt can be rebuilt.
    """

    outcome: TurnState
    reason: str | None
    detail: str | None
    text: str
    worker: str
    incarnation: int
    started_at: datetime
    finished_at: datetime
    tool_calls: tuple[ToolRecord, ...] = ()
    constrained_by: str | None = None
    prompt: PromptRecord | None = None
    continued_at: int = 0  # tokens of an earlier attempt's answer that it went on from

    @property
    def prompted_at(self) -> datetime:
        """The time at which its prompt was made."""
        return self.started_at if self.prompt is None else self.prompt.made_at or self.started_at


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation in which an inherited turn was spoken."""

    job: JobId
    conversation: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a transcript; all times are UTC.

    ``fulfils`` holds the indexes of the conditions of its conversation that it fulfils on its own. A failed turn with
    ``leaves`` is its agent's last one. ``by`` is the kind of speaker, ``inherited`` its conversation if it is another.
    A posted turn has the engine's whole ``answer``. ``recorded`` stands for its tokens, which are stored apart.
    """

    key: TurnKey
    role: str = DEFAULT_ROLE
    by: SpokenBy = SpokenBy.MODEL
    kind: TurnKind = TurnKind.TURN
    inherited: Origin | None = None  # its original conversation; never stored, but read for an heir
    state: TurnState
    reason: str | None = None
    detail: str | None = None
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolRecord, ...] = ()
    signals: tuple[Signal, ...] = ()
    finish_reason: str | None = None
    findings: tuple[str, ...] = ()  # for a completed turn (``findings.Finding``)
    attempts: tuple[Attempt, ...] = ()
    usage: TokenUsage = TokenUsage()
    worker: str | None = None
    incarnation: int | None = None
    weight_version: int | None = None  # at its first token
    weight_version_end: int | None = None  # at its last token
    queued_at: datetime | None = None
    started_at: datetime | None = None
    first_token_at: datetime | None = None
    finished_at: datetime | None = None
    fulfils: tuple[int, ...] = ()
    leaves: bool = False
    recorded: TurnTokens | None = None
    answer: WholeAnswer | msgspec.UnsetType = msgspec.UNSET

    @property
    def is_heard(self) -> bool:
        """Whether later prompts show it; a summary is shown to its reader."""
        return self.state is TurnState.COMPLETED or self.leaves


class UnfinishedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts and charges of a turn that will run again.

    ``rejected`` holds its answers that were not valid, with the reasons. The next attempt goes on from ``half``.
    """

    key: TurnKey
    attempts: tuple[Attempt, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    charges: Charges = Charges()
    queued_at: datetime
    started_at: datetime | None = None
    half: StoredHalf | None = None


def rfc3339(at: datetime | None) -> str | None:
    """Return a UTC time in RFC 3339, to the microsecond."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def turn_document(turn: Turn) -> dict[str, object]:
    """Return a turn for a transcript: its fields, without those for decisions only."""
    fields = msgspec.to_builtins(turn, builtin_types=(datetime,))
    for name in OF_DECISIONS:
        del fields[name]
    marks = list[dict[str, object]]()
    for before, attempt in pairwise(turn.attempts):
        if attempt.continued_at:
            marks.append({"at_tokens": attempt.continued_at, "because": before.reason, "worker": attempt.worker})
        elif attempt.text or attempt is turn.attempts[-1]:  # it started over: none of the words so far are its own
            marks.clear()
    fields["continued"] = marks
    for attempt in fields["attempts"]:
        del attempt["prompt"], attempt["continued_at"]  # the prompt has a route of its own
        _write_times(attempt, TIMES_OF_ATTEMPTS)
    _write_times(fields, TIMES)
    if turn.recorded is not None:
        del fields["recorded"]["chain"]
    if turn.answer is not msgspec.UNSET:
        fields["answer"]["body"] = turn.answer.body.decode(errors="replace")
    place = {"agent": turn.key.agent_id, "role": turn.role, "round": turn.key.round}
    return {**place, "by": turn.by.value, "kind": turn.kind.value, "memory": _memory_of(turn), **fields}


def _write_times(fields: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        fields[name] = rfc3339(fields[name])


def _memory_of(turn: Turn) -> object:
    """Return the part of the discussion that a turn was shown, None for all of it."""
    prompt = turn.attempts[-1].prompt if turn.attempts else None
    if prompt is None or not prompt.from_round:
        return None
    return {"from_round": prompt.from_round, "summary_of": [0, prompt.from_round - 1] if prompt.is_summed else None}


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation with its turns, in the order in which they became visible.

    ``ending`` is what ended it early, ``left`` the agents that left before that, in order.
    """

    id: str
    metadata: Mapping[str, object]
    state: ConversationState
    reason: str | None
    ending: Ending | None
    left: tuple[str, ...]
    turns: Sequence[Turn]

    @property
    def head(self) -> dict[str, object]:
        """The beginning of its transcript."""
        return {
            "id": self.id,
            "state": self.state.value,
            "reason": self.reason,
            "ended_by": ended_by(self.state, self.ending),
            "left": self.left,
            "metadata": dict(self.metadata),
        }


def ended_by(state: ConversationState, ending: Ending | None) -> object:
    """Return the ending of a completed conversation as callers see it, None for others."""
    if state is not ConversationState.COMPLETED:
        return None
    return "rounds" if ending is None else ending.document


def transcript_pieces(conversation: ConversationRecord) -> Iterator[bytes]:
    """Yield the JSON of a transcript in pieces of some turns each, so that no piece takes long."""
    turns = conversation.turns
    yield msgspec.json.encode(conversation.head)[:-1] + b',"turns":['
    for begin in range(0, len(turns), TURNS_A_PIECE):
        piece = msgspec.json.encode([turn_document(turn) for turn in turns[begin : begin + TURNS_A_PIECE]])
        yield (b"," if begin else b"") + piece[1:-1]
    yield b"]}"


def transcript_document(conversation: ConversationRecord) -> dict[str, object]:
    """Return a transcript."""
    return {**conversation.head, "turns": [turn_document(turn) for turn in conversation.turns]}

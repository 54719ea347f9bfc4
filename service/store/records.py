"""The facts that the service stores, in the past tense and applied in order, and the values that the store returns."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Final

import msgspec

from service.conversations.job.job import Job, JobId, TurnKey
from service.conversations.job.states import ConversationState, JobState, TurnState
from service.conversations.job.until import Ending
from service.conversations.job.wording import ConversationWords
from service.conversations.record.awaited_turn import AwaitedTurn
from service.conversations.record.heritage import Share
from service.conversations.record.measures import AttemptMeasures, UsageCounts
from service.conversations.record.transcript import Turn, UnfinishedTurn

Place = tuple[JobId, str]  # a conversation
decode_turn: Final = msgspec.json.Decoder(Turn).decode
decode_unfinished: Final = msgspec.json.Decoder(UnfinishedTurn).decode


def encode_turn(turn: Turn | UnfinishedTurn) -> str:
    """Return the JSON of a turn."""
    return msgspec.json.encode(turn).decode()


class ConversationFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact about a conversation."""

    job_id: JobId
    conversation_id: str

    @property
    def place(self) -> Place:
        """The conversation of the fact."""
        return self.job_id, self.conversation_id


class TurnFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact about a turn."""

    key: TurnKey

    @property
    def place(self) -> Place:
        """The turn's conversation."""
        return self.key[:2]


class ConversationMoved(ConversationFact, frozen=True, kw_only=True):
    """A conversation has changed its state.

    ``ending`` is the condition that ended it, if any. ``most`` is the number of turns that it could have had, if some
    of them do not exist.
    """

    state: ConversationState
    reason: str | None
    at: datetime
    ending: Ending | None = None
    most: int | None = None


class ConversationWorded(ConversationFact, frozen=True, kw_only=True):
    """A conversation speaks to a model for the first time; ``words`` holds those of all its models so far."""

    words: ConversationWords


class MemoryCut(TurnFact, frozen=True, kw_only=True):
    """From this turn on, rounds before ``from_round`` are hidden from its agent; without an agent's name, from all."""

    from_round: int


class GivenUp(TurnFact, frozen=True, kw_only=True):
    """From this turn on, a pattern, or a schema without one, is no longer tried: it timed out too often.

    ``path`` is its place in the job's document, or for ``until`` in the conversation's.
    """

    path: str
    pattern: str | None = None

    @property
    def document(self) -> dict[str, object]:
        """The form that callers see."""
        since = {"conversation": self.key.conversation_id, "agent": self.key.agent_id, "round": self.key.round}
        return {"path": self.path, "pattern": self.pattern, "since": since}


class TurnMoved(TurnFact, frozen=True, kw_only=True):
    """A turn is ready, waits for a caller (``demand``), or is on a slot of ``worker`` after ``waited_s`` seconds."""

    state: TurnState
    worker: str | None
    at: datetime
    model: str = ""
    waited_s: float | None = None
    demand: AwaitedTurn | None = None


class UsageKey(msgspec.Struct, frozen=True, kw_only=True):
    """The subject of a usage row; an empty string means no key, no job or no agent. ``day`` is a date in UTC."""

    day: str
    key_name: str
    job_id: str
    agent: str
    model: str


Used = tuple[UsageKey, UsageCounts]


class TurnEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A turn has ended; ``used`` and ``measures`` are its last attempt's, if that ended with it.

    ``waited_for`` holds the agents that had to speak before it in its round. ``readers`` holds those that read it in
    later rounds; None is all. ``tokens`` are its recorded ones, packed.
    """

    turn: Turn
    at: datetime
    used: Used | None = None
    model: str = ""
    measures: AttemptMeasures | None = None
    waited_for: Collection[str] = ()
    readers: Collection[str] | None = None
    tokens: bytes | None = None

    @property
    def place(self) -> Place:
        """The turn's conversation."""
        return self.turn.key[:2]


class TurnRequeued(TurnFact, frozen=True, kw_only=True):
    """An attempt of a turn has failed, and the turn runs again; ``used`` and ``measures`` are that attempt's."""

    so_far: UnfinishedTurn
    worker: str
    reason: str
    detail: str
    at: datetime
    used: Used | None = None
    measures: AttemptMeasures | None = None


class HalfWritten(TurnFact, frozen=True, kw_only=True):
    """A turn in flight has written a part of its answer; ``so_far`` has it, and the running attempt as cut off."""

    so_far: UnfinishedTurn


class RequestUsed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a client's request has ended; it has no conversation, and only its usage is stored."""

    used: Used


class ToolCallStarted(TurnFact, frozen=True, kw_only=True):
    """A tool call is about to be made; ``call`` is the same for the same call in another attempt of the turn.

    ``number`` counts the turn's calls over all its attempts; ``arguments`` is JSON.
    """

    call: str
    number: int
    name: str
    arguments: str
    policy: str
    at: datetime


class ToolCallEnded(TurnFact, frozen=True, kw_only=True):
    """A tool call has ended; ``outcome`` is JSON."""

    call: str
    outcome: str
    at: datetime


Fact = (
    ConversationMoved
    | ConversationWorded
    | MemoryCut
    | GivenUp
    | TurnMoved
    | TurnEnded
    | TurnRequeued
    | HalfWritten
    | ToolCallStarted
    | ToolCallEnded
)
Record = Fact | RequestUsed


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A new job; ``document`` is the posted JSON, ``key_until`` the expiry of its idempotency key.

    ``shares`` refers to the turns that its conversations inherit, ``inherited`` holds these turns, ``words`` the words
    of their source conversations.
    """

    job: Job
    document: str
    body_hash: str
    idempotency_key: str | None
    created_at: datetime
    key_until: datetime | None = None
    shares: Mapping[str, Sequence[Share]] = msgspec.field(default_factory=dict)
    inherited: Mapping[str, Sequence[Turn]] = msgspec.field(default_factory=dict)
    words: Mapping[str, ConversationWords] = msgspec.field(default_factory=dict)


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job as stored."""

    id: JobId
    number: int
    name: str
    state: JobState
    body_hash: str
    metadata: Mapping[str, object]
    total_conversations: int
    total_turns: int
    is_cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    is_metadata_cut: bool = False  # it is larger than a list shows
    owner: str | None = None  # the name of the key that posted it


class StoredEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job; ``data`` is JSON."""

    number: int
    kind: str
    data: str


class StoredToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call in the journal of a turn; ``arguments`` and ``outcome`` are JSON, None if not known."""

    call: str
    number: int
    name: str
    arguments: str
    policy: str
    outcome: str | None


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a job's conversations and ended turns in each state, and of awaited turns.

    ``given_up`` lists the first patterns and schemas that are no longer tried, shortened.
    """

    conversations: dict[ConversationState, int]
    turns: dict[TurnState, int]
    awaited: int = 0
    given_up: Sequence[GivenUp] = ()

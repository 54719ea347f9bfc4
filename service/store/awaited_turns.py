"""The turns that wait for callers: one row each, from the start of the wait until a node takes the caller's words over.

The caller's words and the end of the wait race for ``is_said``.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

import msgspec

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ConversationState
from service.conversations.record.awaited_turn import AwaitedTurn
from service.conversations.record.transcript import Turn
from service.errors import ConversationNotFound, JobNotFound
from service.store import event_rows, turn_rows
from service.store.databases.database import Connection, Membership, value_of
from service.store.event_rows import Events
from service.store.records import TurnEnded, decode_turn

_SAY: Final = (
    "UPDATE awaited_turns SET is_said = 1"
    " WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND is_said = 0 AND EXISTS"
    " (SELECT 1 FROM conversations WHERE conversations.job_id = awaited_turns.job_id"
    " AND conversations.id = awaited_turns.conversation_id AND conversations.state IN ('queued', 'running'))"
    " AND EXISTS (SELECT 1 FROM jobs WHERE jobs.id = awaited_turns.job_id AND jobs.is_cancel_requested = 0)"
)
_IS_SAID: Final = (
    "SELECT is_said FROM awaited_turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ?"
)
_FORGET_SAID: Final = (
    "DELETE FROM awaited_turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND is_said = 1"
)
_AT: Final = (
    "SELECT open_turns.job_id, conversation_id, agent, round, since, until, demands.demand FROM open_turns"
    " JOIN demands ON demands.job_id = open_turns.job_id AND digest = open_turns.demand"
    " WHERE open_turns.job_id = ? AND conversation_id = ? AND agent = ? AND round = ?"
)
_COUNT: Final = "SELECT count(*) FROM open_turns WHERE is_said = 0"
_COUNT_OF_KEY: Final = (
    "SELECT count(*) FROM open_turns JOIN jobs ON jobs.id = open_turns.job_id AND jobs.key_name = ? WHERE is_said = 0"
)
_PARKED: Final = (
    "SELECT job_id, count(DISTINCT conversation_id) FROM open_turns WHERE is_said = 0 AND owner IS NULL GROUP BY job_id"
)
# Not by the index of owners: a node may run many more conversations than callers have spoken in.
_SAID_TO: Final = (
    "SELECT turns.record FROM open_turns JOIN turns ON turns.job_id = open_turns.job_id"
    " AND turns.conversation_id = open_turns.conversation_id AND turns.agent = open_turns.agent"
    " AND turns.round = open_turns.round WHERE is_said = 1 AND coalesce(owner, '') = ? ORDER BY turns.number"
)
_decode = msgspec.json.Decoder(AwaitedTurn).decode


class OpenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that waits for a caller; times are in seconds since the epoch, by the database's clock."""

    key: TurnKey
    since: float
    until: float | None

    @property
    def since_at(self) -> datetime:
        """The start of the wait."""
        return datetime.fromtimestamp(self.since, UTC)

    @property
    def until_at(self) -> datetime | None:
        """The end of the wait, None without a limit."""
        return None if self.until is None else datetime.fromtimestamp(self.until, UTC)


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of waiting turns: those of a job, of a conversation, of a key's jobs, or all."""

    job_id: JobId | None = None
    conversation_id: str | None = None
    owner: str | None = None


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """The number of turns that wait for callers, and by job of conversations that only callers can move on."""

    turns: int = 0
    parked: Mapping[str, int] = MappingProxyType({})


class SpokenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A stored turn of a caller; ``is_new`` is true if this call has stored it."""

    turn: Turn
    is_new: bool


Found = tuple[OpenTurn, AwaitedTurn] | Turn | ConversationState


# Writing


def say(connection: Connection, membership: Membership, turn: Turn) -> SpokenTurn | None:
    """Store a caller's words or the end of its wait; return None if the turn does not wait.

    A turn that is already stored is returned unchanged.
    """
    stored = turn_rows.find(connection, turn.key)
    if stored is not None:
        return SpokenTurn(turn=stored, is_new=False)
    if not connection.execute(_SAY, tuple(turn.key)).rowcount:
        return None
    events: Events = []
    turn_rows.end(connection, TurnEnded(turn=turn, at=turn.finished_at or datetime.now(UTC)), events)
    event_rows.write(connection, events)
    membership.wake(connection, turn.key.job_id, turn.key.conversation_id)
    membership.notify([turn.key.job_id], is_work=True)
    return SpokenTurn(turn=turn, is_new=True)


def leave(connection: Connection, membership: Membership, awaited: Collection[TurnKey]) -> None:
    """Let any node claim a conversation if a caller has spoken one of the ``awaited`` turns meanwhile.

    The node that leaves it knows all other words of its callers.
    """
    is_said = False
    for key in awaited:
        is_said |= bool(value_of(connection, _IS_SAID, tuple(key)))
    job_id, conversation_id = next(iter(awaited))[:2]
    if is_said:
        membership.wake(connection, job_id, conversation_id)
    else:
        connection.execute(
            "DELETE FROM awaited_turns WHERE job_id = ? AND conversation_id = ? AND is_said = 1",
            (job_id, conversation_id),
        )


def forget_said(connection: Connection, keys: Collection[TurnKey]) -> None:
    """Forget words that the node of their conversation has taken over, and heard just now; the turns stay stored."""
    for key in keys:
        if connection.execute(_FORGET_SAID, tuple(key)).rowcount:
            turn_rows.hear(connection, key)


# Reading


def find(connection: Connection, key: TurnKey) -> Found:
    """Return a waiting turn with its rules, an ended turn, or the state of the conversation.

    JobNotFound or ConversationNotFound if either does not exist.
    """
    ended = turn_rows.find(connection, key)
    if ended is not None:
        return ended
    row = connection.execute(_AT, tuple(key)).fetchone()
    if row is not None:
        return as_open(row[:-1]), _decode(row[-1])
    state = value_of(connection, "SELECT state FROM conversations WHERE job_id = ? AND id = ?", key[:2])
    if state is not None:
        return ConversationState(state)
    if value_of(connection, "SELECT 1 FROM jobs WHERE id = ?", (key.job_id,)) is None:
        raise JobNotFound(key.job_id)
    raise ConversationNotFound(key.job_id, key.conversation_id)


def rules(connection: Connection, job_id: str, digest: str) -> AwaitedTurn:
    """Return the rules for a caller's words."""
    return _decode(value_of(connection, "SELECT demand FROM demands WHERE job_id = ? AND digest = ?", (job_id, digest)))


def listed(connection: Connection, which: Which, after: int, limit: int) -> list[OpenTurn]:
    """List turns that wait for callers, the oldest first, skipping ``after``.

    ConversationNotFound if ``which`` names a conversation that does not exist.
    """
    # One statement per question: only constants make use of an index.
    named = {
        "open_turns.job_id = ?": which.job_id,
        "conversation_id = ?": which.conversation_id,
        "jobs.key_name = ?": which.owner,
    }
    given = {condition: value for condition, value in named.items() if value is not None}
    joined = "" if which.owner is None else " JOIN jobs ON jobs.id = open_turns.job_id"
    sql = (
        "SELECT open_turns.job_id, conversation_id, agent, round, since, until"  # noqa: S608
        f" FROM open_turns{joined} WHERE {' AND '.join(('is_said = 0', *given))}"
        " ORDER BY since, open_turns.job_id, conversation_id, agent LIMIT ? OFFSET ?"
    )
    rows = connection.execute(sql, (*given.values(), limit, after)).fetchall()
    if not rows and which.job_id is not None and which.conversation_id is not None:
        place = (which.job_id, which.conversation_id)
        if connection.execute("SELECT 1 FROM conversations WHERE job_id = ? AND id = ?", place).fetchone() is None:
            raise ConversationNotFound(*place)
    return [as_open(row) for row in rows]


def count(connection: Connection, job_id: JobId) -> int:
    """Count the turns of a job that wait for callers."""
    waiting: int = value_of(connection, f"{_COUNT} AND job_id = ?", (job_id,))
    return waiting


def count_all(connection: Connection, owner: str | None) -> Awaited:
    """Count the turns that wait for callers, of a key or of all, and all conversations that only callers move on."""
    sql, values = (_COUNT, ()) if owner is None else (_COUNT_OF_KEY, (owner,))
    return Awaited(
        turns=value_of(connection, sql, values), parked={row[0]: int(row[1]) for row in connection.execute(_PARKED)}
    )


def agents(connection: Connection, job_id: JobId) -> dict[str, list[str]]:
    """List the agents of a job that wait for their callers, by conversation."""
    by_conversation: dict[str, list[str]] = {}
    rows = connection.execute(
        "SELECT conversation_id, agent FROM open_turns WHERE is_said = 0 AND job_id = ?"
        " ORDER BY conversation_id, agent",
        (job_id,),
    )
    for conversation_id, agent in rows:
        by_conversation.setdefault(conversation_id, []).append(agent)
    return by_conversation


def said_to(connection: Connection, node_id: str) -> list[Turn]:
    """List the callers' turns that a node has not taken over yet, in conversations that it runs."""
    return [decode_turn(row[0]) for row in connection.execute(_SAID_TO, (node_id,))]


def as_open(row: Sequence[object]) -> OpenTurn:
    """Convert a row to a waiting turn."""
    job_id, conversation_id, agent, number, since, until = row
    return OpenTurn(
        key=TurnKey(JobId(str(job_id)), str(conversation_id), str(agent), int(str(number))),
        since=float(str(since)),
        until=None if until is None else float(str(until)),
    )

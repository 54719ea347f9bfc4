"""The turns that callers are to speak: one row each from when its turn is awaited until its words are taken over.

The rows of a conversation that has ended mean nothing. A word and the end of a wait race for ``is_said``.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

import msgspec

from service.conversations.awaited_turn import AwaitedTurn
from service.conversations.job import JobId, TurnKey
from service.conversations.states import ConversationState
from service.conversations.transcript import Turn
from service.errors import ConversationNotFound, JobNotFound
from service.store import operations
from service.store.databases.database import Connection, Membership
from service.store.records import TurnEnded, TurnMoved, decode_turn

OPEN: Final = (
    "awaited_turns JOIN conversations ON conversations.job_id = awaited_turns.job_id"
    " AND conversations.id = awaited_turns.conversation_id AND conversations.state IN ('queued', 'running')"
)
GAP_S: Final = 2.5  # nobody has looked for so long though it was time: no node served
NEAR_S: Final = 30.0  # a wait that ends so soon is looked at each LOOK_S, any other each BEAT_S
LOOK_S: Final = 1.0
BEAT_S: Final = 15.0
DUE_AT_ONCE: Final = 100
_COLUMNS: Final = "awaited_turns.job_id, conversation_id, agent, round, since, until"
_DEMANDED: Final = " JOIN demands ON demands.job_id = awaited_turns.job_id AND digest = awaited_turns.demand"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AwaitedTurn).decode


class OpenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is awaited; times are in seconds since the epoch, in the database's time."""

    key: TurnKey
    since: float
    until: float | None

    @property
    def since_at(self) -> datetime:
        """The moment from when it is awaited."""
        return datetime.fromtimestamp(self.since, UTC)

    @property
    def until_at(self) -> datetime | None:
        """The moment until when."""
        return None if self.until is None else datetime.fromtimestamp(self.until, UTC)


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """Which awaited turns are meant: of a job or a conversation of it, of the jobs of a key, or all."""

    job_id: JobId | None = None
    conversation_id: str | None = None
    owner: str | None = None


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """The number of turns that callers are waited for, and of the conversations of each job that nothing else moves."""

    turns: int = 0
    parked: Mapping[str, int] = MappingProxyType({})


class SpokenTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The stored turn of a place, whether it is this one's words, and whether they are new."""

    turn: Turn
    is_new: bool


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """Turns whose wait is over, each with its demands, and the seconds until somebody has to look again, if ever."""

    turns: Sequence[tuple[OpenTurn, AwaitedTurn]]
    pause_s: float | None


# Writing


def begin(connection: Connection, membership: Membership, record: TurnMoved, demand: AwaitedTurn) -> bool:
    """Await a turn from now on; return False if it is awaited already."""
    now = membership.now(connection)
    _follow_clock(connection, now)
    until = None if demand.wait_s is None else now + demand.wait_s
    if until is not None:  # nobody looks while nothing ends: only from now on
        connection.execute(
            "UPDATE waits SET seen = ?, pause_s = 0 WHERE NOT EXISTS"  # noqa: S608
            f" (SELECT 1 FROM {OPEN} WHERE is_said = 0 AND until > 0)",
            (now,),
        )
    text = _encode(demand).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    connection.execute(
        "INSERT INTO demands (job_id, digest, demand) VALUES (?, ?, ?) ON CONFLICT (job_id, digest) DO NOTHING",
        (record.key.job_id, digest, text),
    )
    inserted = connection.execute(
        "INSERT INTO awaited_turns (job_id, conversation_id, agent, round, since, until, demand)"
        " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id, conversation_id, agent, round) DO NOTHING",
        (*record.key, now, until, digest),
    )
    return bool(inserted.rowcount)


def say(connection: Connection, membership: Membership, turn: Turn) -> SpokenTurn | None:
    """Store the words of an awaited turn, or that nobody has said any; None if it is not awaited.

    A turn that is stored already stays as it is, and is returned.
    """
    row = connection.execute(
        f"SELECT record FROM turns WHERE {operations.PLACE} AND kind = 'turn'",  # noqa: S608
        tuple(turn.key),
    ).fetchone()
    if row is not None:
        return SpokenTurn(turn=decode_turn(row[0]), is_new=False)
    taken = connection.execute(
        f"UPDATE awaited_turns SET is_said = 1 WHERE {operations.PLACE} AND is_said = 0 AND EXISTS"  # noqa: S608
        " (SELECT 1 FROM conversations WHERE conversations.job_id = awaited_turns.job_id"
        " AND conversations.id = awaited_turns.conversation_id AND conversations.state IN ('queued', 'running'))",
        tuple(turn.key),
    )
    if not taken.rowcount:
        return None
    events: operations.Events = []
    at = turn.finished_at or datetime.now(UTC)
    operations.apply(connection, TurnEnded(turn=turn, at=at), events)
    operations.write_events(connection, events)
    membership.wake(connection, turn.key.job_id, turn.key.conversation_id)
    membership.notify(connection, [turn.key.job_id], is_work=True)
    return SpokenTurn(turn=turn, is_new=True)


def leave(connection: Connection, membership: Membership, awaited: Collection[TurnKey]) -> None:
    """Let a conversation be claimed again, if any of the turns that it is left with has been said by now.

    Whatever else was said of it its node has taken over.
    """
    is_said = False
    for key in awaited:
        row = connection.execute(f"SELECT is_said FROM awaited_turns WHERE {operations.PLACE}", tuple(key)).fetchone()  # noqa: S608
        is_said |= row is not None and bool(row[0])
    job_id, conversation_id = next(iter(awaited))[:2]
    if is_said:
        membership.wake(connection, job_id, conversation_id)
    else:
        connection.execute(
            "DELETE FROM awaited_turns WHERE job_id = ? AND conversation_id = ? AND is_said = 1",
            (job_id, conversation_id),
        )


def forget_said(connection: Connection, keys: Collection[TurnKey]) -> None:
    """Forget words that their conversations' node has taken over; the turns are stored."""
    for key in keys:
        connection.execute(f"DELETE FROM awaited_turns WHERE {operations.PLACE} AND is_said = 1", tuple(key))  # noqa: S608


def take_due(connection: Connection, membership: Membership) -> Due:
    """Return the turns whose wait is over now, some at a time; time in which nobody looked does not count."""
    connection.execute("UPDATE waits SET seen = seen")  # one node at a time: each adds a gap that it has seen
    now = membership.now(connection)
    looked_until = _follow_clock(connection, now)
    if now - looked_until > GAP_S:
        connection.execute(
            "UPDATE awaited_turns SET until = until + (? - CASE WHEN since > ? THEN since ELSE ? END)"
            " WHERE until > 0 AND is_said = 0",
            (now, looked_until, looked_until),
        )
    rows = connection.execute(
        f"SELECT {_COLUMNS}, awaited_turns.demand FROM {OPEN}"  # noqa: S608
        " WHERE is_said = 0 AND until <= ? ORDER BY until LIMIT ?",
        (now, DUE_AT_ONCE),
    ).fetchall()
    pause_s = 0.0 if len(rows) == DUE_AT_ONCE else _pause_s(ends_next(connection, after=now), now)
    connection.execute("UPDATE waits SET seen = ?, pause_s = ?", (now, pause_s or 0.0))
    demands = {place: _demand(connection, *place) for place in {(str(row[0]), str(row[-1])) for row in rows}}
    return Due(turns=[(_open(row[:-1]), demands[str(row[0]), str(row[-1])]) for row in rows], pause_s=pause_s)


def _follow_clock(connection: Connection, now: float) -> float:
    """Move all waits back by as much as the clock was set back since the last look; return until when was looked."""
    row = connection.execute("SELECT seen, pause_s FROM waits").fetchone()
    if row is None:
        return now
    seen, pause_s = float(row[0]), float(row[1])
    if now >= seen:
        return min(now, seen + pause_s)
    connection.execute(
        "UPDATE awaited_turns SET since = since - ?, until = until - ? WHERE is_said = 0", (seen - now, seen - now)
    )
    connection.execute("UPDATE waits SET seen = ?", (now,))
    return now


def _pause_s(until: float | None, now: float) -> float | None:
    return None if until is None else min(BEAT_S, max(LOOK_S, until - NEAR_S - now))


def _demand(connection: Connection, job_id: str, digest: str) -> AwaitedTurn:
    row = connection.execute("SELECT demand FROM demands WHERE job_id = ? AND digest = ?", (job_id, digest)).fetchone()
    assert row is not None  # noqa: S101 - it is written with each turn
    return _decode(row[0])


# Reading


def ends_next(connection: Connection, after: float = 0.0) -> float | None:
    """Return when the next wait ends, of those that end later than ``after``; None if none does."""
    row = connection.execute(
        f"SELECT until FROM {OPEN} WHERE is_said = 0 AND until > ? ORDER BY until LIMIT 1",  # noqa: S608
        (after,),
    ).fetchone()
    return None if row is None else float(row[0])


Found = tuple[OpenTurn, AwaitedTurn] | Turn | ConversationState


def of_place(key: TurnKey) -> Callable[[Connection], Found]:
    """Return a turn that is awaited, with its demands, or has ended, or else the state of its conversation.

    JobNotFound or ConversationNotFound where it is not there.
    """

    def query(connection: Connection) -> Found:
        ended = connection.execute(
            f"SELECT record FROM turns WHERE {operations.PLACE} AND kind = 'turn'",  # noqa: S608
            tuple(key),
        ).fetchone()
        if ended is not None:
            return decode_turn(ended[0])
        row = connection.execute(
            f"SELECT {_COLUMNS}, demands.demand FROM {OPEN}{_DEMANDED}"  # noqa: S608
            " WHERE awaited_turns.job_id = ? AND conversation_id = ? AND agent = ? AND round = ?",
            tuple(key),
        ).fetchone()
        if row is not None:
            return _open(row[:-1]), _decode(row[-1])
        state = connection.execute(
            "SELECT state FROM conversations WHERE job_id = ? AND id = ?", (key.job_id, key.conversation_id)
        ).fetchone()
        if state is None:
            if connection.execute("SELECT 1 FROM jobs WHERE id = ?", (key.job_id,)).fetchone() is None:
                raise JobNotFound(key.job_id)
            raise ConversationNotFound(key.job_id, key.conversation_id)
        return ConversationState(state[0])

    return query


def listed(which: Which, after: int, limit: int) -> Callable[[Connection], list[OpenTurn]]:
    """List turns that are awaited, the oldest first, without the first ``after``."""
    conditions, values = ["is_said = 0"], list[object]()
    for column, value in (
        ("awaited_turns.job_id", which.job_id),
        ("conversation_id", which.conversation_id),
        ("jobs.key_name", which.owner),
    ):
        if value is not None:  # a statement for each question: an index is of use for constants alone
            conditions.append(f"{column} = ?")
            values.append(value)
    joined = "" if which.owner is None else " JOIN jobs ON jobs.id = awaited_turns.job_id"

    def query(connection: Connection) -> list[OpenTurn]:
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM {OPEN}{joined} WHERE {' AND '.join(conditions)}"  # noqa: S608
            " ORDER BY since, awaited_turns.job_id, conversation_id, agent LIMIT ? OFFSET ?",
            (*values, limit, after),
        )
        return [_open(row) for row in rows]

    return query


def count(job_id: JobId) -> Callable[[Connection], int]:
    """Count the turns of a job that are awaited."""

    def query(connection: Connection) -> int:
        row = connection.execute(
            f"SELECT count(*) FROM {OPEN} WHERE is_said = 0 AND awaited_turns.job_id = ?",  # noqa: S608
            (job_id,),
        ).fetchone()
        return 0 if row is None else int(row[0])

    return query


def count_all(owner: str | None) -> Callable[[Connection], Awaited]:
    """Count the turns that are awaited of a key, or of all, and what they park of all jobs."""

    def query(connection: Connection) -> Awaited:
        of_owner = "" if owner is None else " JOIN jobs ON jobs.id = awaited_turns.job_id AND jobs.key_name = ?"
        turns = connection.execute(
            f"SELECT count(*) FROM {OPEN}{of_owner} WHERE is_said = 0",  # noqa: S608
            () if owner is None else (owner,),
        ).fetchone()
        parked = connection.execute(
            f"SELECT conversations.job_id, count(DISTINCT conversations.id) FROM {OPEN}"  # noqa: S608
            " WHERE is_said = 0 AND conversations.owner IS NULL GROUP BY conversations.job_id"
        )
        return Awaited(turns=int(turns[0]) if turns else 0, parked={row[0]: int(row[1]) for row in parked})

    return query


def agents(job_id: JobId) -> Callable[[Connection], dict[str, list[str]]]:
    """List the agents of a job that callers are to speak for now, by their conversations."""

    def query(connection: Connection) -> dict[str, list[str]]:
        by_conversation: dict[str, list[str]] = {}
        rows = connection.execute(
            f"SELECT conversation_id, agent FROM {OPEN} WHERE is_said = 0 AND awaited_turns.job_id = ?"  # noqa: S608
            " ORDER BY conversation_id, agent",
            (job_id,),
        )
        for conversation_id, agent in rows:
            by_conversation.setdefault(conversation_id, []).append(agent)
        return by_conversation

    return query


def said_to(node_id: str) -> Callable[[Connection], list[Turn]]:
    """List the turns that callers have spoken of conversations that a node runs, and that it has not taken over."""

    def query(connection: Connection) -> list[Turn]:
        rows = connection.execute(
            f"SELECT turns.record FROM {OPEN} JOIN turns ON turns.job_id = awaited_turns.job_id"  # noqa: S608
            " AND turns.conversation_id = awaited_turns.conversation_id AND turns.agent = awaited_turns.agent"
            # Not by the index of owners: a node may run many more conversations than anything was said of.
            " AND turns.round = awaited_turns.round WHERE is_said = 1 AND coalesce(owner, '') = ?"
            " ORDER BY turns.number",
            (node_id,),
        )
        return [decode_turn(row[0]) for row in rows]

    return query


def _open(row: Sequence[object]) -> OpenTurn:
    job_id, conversation_id, agent, number, since, until = row
    return OpenTurn(
        key=TurnKey(JobId(str(job_id)), str(conversation_id), str(agent), int(str(number))),
        since=float(str(since)),
        until=None if until is None else float(str(until)),
    )

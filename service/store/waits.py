"""The waits for callers: their start, their end, and the one-row table with the last look for ended waits.

Time in which no node looked does not count: a gap moves all waits back by its length.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from service.conversations.job.job import TurnKey
from service.conversations.record.awaited_turn import AwaitedTurn
from service.store.awaited_turns import OpenTurn, as_open, rules
from service.store.databases.database import Connection, Membership, value_of

GAP_S: Final = 2.5  # delay of a look that shows that no node was serving
NEAR_S: Final = 30.0  # waits that end within this time are checked every LOOK_S, others every BEAT_S
LOOK_S: Final = 1.0
BEAT_S: Final = 15.0
DUE_AT_ONCE: Final = 100
# No node looks while no wait has an end, so the next look counts from now.
_BEGIN_LOOKS: Final = (
    "UPDATE waits SET seen = ?, pause_s = 0 WHERE NOT EXISTS (SELECT 1 FROM open_turns WHERE is_said = 0 AND until > 0)"
)
_BEGIN: Final = (
    "INSERT INTO awaited_turns (job_id, conversation_id, agent, round, since, until, demand)"
    " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id, conversation_id, agent, round) DO NOTHING"
)
_POSTPONE: Final = (
    "UPDATE awaited_turns SET until = until + (? - CASE WHEN since > ? THEN since ELSE ? END)"
    " WHERE until > 0 AND is_said = 0"
)
_DUE: Final = (
    "SELECT job_id, conversation_id, agent, round, since, until, demand FROM open_turns"
    " WHERE is_said = 0 AND until <= ? ORDER BY until LIMIT ?"
)
_encode = msgspec.json.Encoder().encode


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """Turns whose wait is over, with their rules, and the seconds until the next look, None without one."""

    turns: Sequence[tuple[OpenTurn, AwaitedTurn]]
    pause_s: float | None


def begin(connection: Connection, membership: Membership, key: TurnKey, demand: AwaitedTurn) -> bool:
    """Let a turn wait for its caller from now on; return False if it already waits."""
    now = membership.now(connection)
    _follow_clock(connection, now)
    until = None if demand.wait_s is None else now + demand.wait_s
    if until is not None:
        connection.execute(_BEGIN_LOOKS, (now,))
    text = _encode(demand).decode()
    digest = hashlib.sha256(text.encode()).hexdigest()
    connection.execute(
        "INSERT INTO demands (job_id, digest, demand) VALUES (?, ?, ?) ON CONFLICT (job_id, digest) DO NOTHING",
        (key.job_id, digest, text),
    )
    return bool(connection.execute(_BEGIN, (*key, now, until, digest)).rowcount)


def take_due(connection: Connection, membership: Membership) -> Due:
    """Return at most ``DUE_AT_ONCE`` turns whose wait is over."""
    connection.execute("UPDATE waits SET seen = seen")  # one node at a time, since each adds the gap that it finds
    now = membership.now(connection)
    looked_until = _follow_clock(connection, now)
    if now - looked_until > GAP_S:
        connection.execute(_POSTPONE, (now, looked_until, looked_until))
    rows = connection.execute(_DUE, (now, DUE_AT_ONCE)).fetchall()
    pause_s = 0.0 if len(rows) == DUE_AT_ONCE else _pause_s(ends_next(connection, after=now), now)
    connection.execute("UPDATE waits SET seen = ?, pause_s = ?", (now, pause_s or 0.0))
    found = {place: rules(connection, *place) for place in {(str(row[0]), str(row[-1])) for row in rows}}
    return Due(turns=[(as_open(row[:-1]), found[str(row[0]), str(row[-1])]) for row in rows], pause_s=pause_s)


def ends_next(connection: Connection, after: float = 0.0) -> float | None:
    """Return the first end of a wait after ``after``; None without one."""
    sql = "SELECT until FROM open_turns WHERE is_said = 0 AND until > ? ORDER BY until LIMIT 1"
    until: float | None = value_of(connection, sql, (after,))
    return until


def _follow_clock(connection: Connection, now: float) -> float:
    """Move all waits back if the clock was set back since the last look; return the end of that look's time."""
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

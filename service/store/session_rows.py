"""Sessions, and the exchanges of each: a request with its answer and the tokens of both."""

import zlib
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec

from service.conversations.record.rollout import Reward
from service.conversations.record.session import (
    ExchangeHead,
    KnownEnd,
    Posted,
    Session,
    SessionExchange,
    SessionWanted,
)
from service.conversations.record.token_arrays import pack, unpack
from service.conversations.record.transcript import rfc3339
from service.errors import RewardConflict, SessionNotFound, SessionsFull
from service.store.databases.database import Connection, value_of
from service.store.event_rows import to_json

MOST_SESSIONS: Final = 100_000
MOST_EXCHANGES: Final = 10_000  # in one session: each of them is looked at for each prompt
EXPIRED_A_WRITE: Final = 100
LEVEL: Final = 6
_COLUMNS: Final = "id, owner, settings, created_at, expires_at"
_decode_metrics = msgspec.json.Decoder(dict[str, float]).decode
_decode_messages = msgspec.json.Decoder(list[dict[str, object]]).decode


class SessionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The exchanges of a session, those whose delivery is uncertain, and its reward."""

    exchanges: int
    uncertain: int
    reward: Reward | None


class PackedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange with its arrays and messages as they are stored; None where the store has no room for them."""

    exchange: SessionExchange
    tokens: bytes | None
    messages: bytes | None

    @property
    def size(self) -> int:
        """The bytes of both."""
        return len(self.tokens or b"") + len(self.messages or b"")


_decode_settings = msgspec.json.Decoder(SessionWanted).decode
_decode_head = msgspec.json.Decoder(ExchangeHead).decode


def pack_exchange(exchange: SessionExchange) -> PackedExchange:
    """Pack an exchange for the store."""
    return PackedExchange(
        exchange=exchange,
        tokens=None if exchange.tokens is None else pack([exchange.tokens]),
        messages=zlib.compress(msgspec.json.encode(exchange.messages), LEVEL),
    )


def add(connection: Connection, session: Session) -> None:
    """Store a new session.

    Raises:
        SessionsFull: there are too many.
    """
    if value_of(connection, "SELECT count(*) FROM sessions") >= MOST_SESSIONS:
        raise SessionsFull(f"there are {MOST_SESSIONS} sessions already")
    settings = _fields_of(SessionWanted, session)
    connection.execute(
        f"INSERT INTO sessions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)",  # noqa: S608 - names of ours
        (session.id, session.owner, to_json(settings), rfc3339(session.created_at), rfc3339(session.expires_at)),
    )


def find_live(connection: Connection, session_id: str) -> Session:
    """Return a session that has not expired.

    Raises:
        SessionNotFound: there is none.
    """
    session = find(connection, session_id)
    if session.expires_at <= datetime.now(UTC):
        raise SessionNotFound(session_id)
    return session


def find_with_room(connection: Connection, session_id: str) -> Session:
    """Return a session that has not expired, and that may have another exchange.

    Raises:
        SessionNotFound: there is none.
        SessionsFull: it has too many exchanges.
    """
    session = find_live(connection, session_id)
    if value_of(connection, "SELECT count(*) FROM exchanges WHERE session_id = ?", (session_id,)) >= MOST_EXCHANGES:
        raise SessionsFull(f"the session has {MOST_EXCHANGES} exchanges already")
    return session


def find(connection: Connection, session_id: str) -> Session:
    """Return a session, also one that has expired a moment ago.

    Raises:
        SessionNotFound: there is none.
    """
    sql = f"SELECT {_COLUMNS} FROM sessions WHERE id = ?"  # noqa: S608 - names of ours
    row = connection.execute(sql, (session_id,)).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    return Session(
        id=row[0],
        owner=row[1],
        created_at=datetime.fromisoformat(row[3]),
        expires_at=datetime.fromisoformat(row[4]),
        **_fields_of(SessionWanted, _decode_settings(row[2])),
    )


def find_with_ends(connection: Connection, session_id: str) -> tuple[Session, list[KnownEnd]]:
    """Return a session and the places from which a prompt may go on.

    Raises:
        SessionNotFound: there is none.
    """
    return find(connection, session_id), known_ends(connection, session_id)


def touch(connection: Connection, session: Session) -> None:
    """Let a session live on from now.

    Raises:
        SessionNotFound: it was deleted.
    """
    expires_at = rfc3339(datetime.now(UTC) + timedelta(seconds=session.ttl_s))
    changed = connection.execute("UPDATE sessions SET expires_at = ? WHERE id = ?", (expires_at, session.id))
    if not changed.rowcount:
        raise SessionNotFound(session.id)


def delete(connection: Connection, session_id: str) -> None:
    """Delete a session with its exchanges."""
    connection.execute("DELETE FROM sessions WHERE id = ?", (session_id,))


def is_settling(connection: Connection, session_id: str, seconds: float) -> bool:
    """Whether an exchange of the last ``seconds`` is uncertain: its client may have it at any moment."""
    since = rfc3339(datetime.now(UTC) - timedelta(seconds=seconds))
    sql = "SELECT 1 FROM exchanges WHERE session_id = ? AND is_certain = 0 AND at > ? LIMIT 1"
    return connection.execute(sql, (session_id, since)).fetchone() is not None


def counts(connection: Connection, session_id: str) -> SessionCounts:
    """Count the exchanges of a session."""
    sql = "SELECT count(*), coalesce(sum(1 - is_certain), 0) FROM exchanges WHERE session_id = ?"
    exchanges, uncertain = connection.execute(sql, (session_id,)).fetchone() or (0, 0)
    return SessionCounts(exchanges=exchanges, uncertain=int(uncertain), reward=reward(connection, session_id))


def known_ends(connection: Connection, session_id: str) -> list[KnownEnd]:
    """List the places from which a prompt may go on."""
    # The last of two alike ends counts
    sql = "SELECT number, head FROM exchanges WHERE session_id = ? ORDER BY is_certain, number"
    rows = connection.execute(sql, (session_id,))
    heads = [(row[0], _decode_head(row[1])) for row in rows]
    return [
        KnownEnd(number=number, messages=head.message_count, end=head.end)
        for number, head in heads
        if head.end is not None
    ]


def repeat(connection: Connection, session_id: str, marks: Collection[str]) -> None:
    """Make exchanges certain whose answers a later request repeats; of alike answers one explains it."""
    sql = "SELECT mark, max(number), max(is_certain) FROM exchanges WHERE session_id = ? GROUP BY mark"
    for mark, newest, is_explained in connection.execute(sql, (session_id,)).fetchall():
        if mark in marks and not is_explained:
            make_certain(connection, session_id, newest)


def make_certain(connection: Connection, session_id: str, number: int) -> None:
    """Record that a client has an answer."""
    sql = "UPDATE exchanges SET is_certain = 1 WHERE session_id = ? AND number = ?"
    connection.execute(sql, (session_id, number))


def add_exchange(connection: Connection, session: Session, packed: PackedExchange, marks: Collection[str]) -> int:
    """Store an exchange, whose delivery is uncertain; return its number. ``marks`` are of the answers that it repeats.

    Raises:
        SessionNotFound: the session was deleted.
    """
    touch(connection, session)  # others that number its exchanges wait
    exchange = packed.exchange
    if exchange.follows is not None:
        make_certain(connection, session.id, exchange.follows)
    repeat(connection, session.id, marks)
    last = value_of(connection, "SELECT max(number) FROM exchanges WHERE session_id = ?", (session.id,))
    head = _fields_of(ExchangeHead, exchange)
    number, now = int(last or 0) + 1, rfc3339(datetime.now(UTC))
    connection.execute(
        "INSERT INTO exchanges (session_id, number, at, is_certain, mark, head, tokens, messages)"
        " VALUES (?, ?, ?, 0, ?, ?, ?, ?)",
        (session.id, number, now, exchange.mark, to_json(head), packed.tokens, packed.messages),
    )
    return number


def exchanges(connection: Connection, session_id: str, *, has_messages: bool = True) -> list[SessionExchange]:
    """List the exchanges of a session in their order, with their messages or without."""
    messages = "messages" if has_messages else "NULL"
    rows = connection.execute(
        f"SELECT number, is_certain, mark, head, tokens, {messages} FROM exchanges"  # noqa: S608 - names of ours
        " WHERE session_id = ? ORDER BY number",
        (session_id,),
    )
    return [
        SessionExchange(
            number=number,
            is_certain=bool(is_certain),
            mark=mark,
            tokens=None if tokens is None else unpack(bytes(tokens))[0],
            messages=_unpack_messages(packed),
            **_fields_of(ExchangeHead, _decode_head(head)),
        )
        for number, is_certain, mark, head, tokens, packed in rows
    ]


def _fields_of(kind: type[msgspec.Struct], value: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in kind.__struct_fields__}


def _unpack_messages(packed: bytes | None) -> Sequence[Posted]:
    return [{"role": "assistant"}] if packed is None else _decode_messages(zlib.decompress(bytes(packed)))


def reward(connection: Connection, session_id: str) -> Reward | None:
    """Return the reward of a session."""
    row = connection.execute("SELECT reward, metrics FROM sessions WHERE id = ?", (session_id,)).fetchone()
    return None if row is None or row[0] is None else Reward(reward=row[0], metrics=_decode_metrics(row[1]))


def put_reward(connection: Connection, session: Session, given: Reward) -> bool:
    """Store the reward of a session; return whether it is new.

    Raises:
        RewardConflict: there is another one.
        SessionNotFound: the session was deleted.
    """
    touch(connection, session)
    known = reward(connection, session.id)
    if known is not None and known != given:
        raise RewardConflict("the session")
    if known is None:
        sql = "UPDATE sessions SET reward = ?, metrics = ? WHERE id = ?"
        connection.execute(sql, (given.reward, to_json(given.metrics), session.id))
    return known is None


def has_expired(connection: Connection) -> bool:
    """Whether any session has expired."""
    row = connection.execute("SELECT 1 FROM sessions WHERE expires_at <= ? LIMIT 1", (rfc3339(datetime.now(UTC)),))
    return row.fetchone() is not None


def delete_expired(connection: Connection) -> int:
    """Delete some of the sessions that have expired; return their number."""
    sql = "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)"
    return connection.execute(sql, (rfc3339(datetime.now(UTC)), EXPIRED_A_WRITE)).rowcount


def size(connection: Connection) -> int:
    """Return the bytes of all exchanges."""
    sql = "SELECT coalesce(sum(coalesce(length(tokens), 0) + coalesce(length(messages), 0)), 0) FROM exchanges"
    return int(value_of(connection, sql))

"""Ended turns, unfinished turns with attempts, and memory cuts.

The numbers of ended turns are the order in which they became visible. Rows of ended turns never change, but a caller's
turn gets its number when its conversation hears it.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from service.conversations.job.job import JobId, SpokenBy, TurnKey, TurnKind
from service.conversations.job.states import TurnState
from service.conversations.record.transcript import Turn, UnfinishedTurn
from service.store import event_rows
from service.store.databases.database import FEW, Connection, some_of, value_of
from service.store.event_rows import Events
from service.store.records import (
    HalfWritten,
    MemoryCut,
    TurnEnded,
    TurnRequeued,
    decode_turn,
    decode_unfinished,
    encode_turn,
)
from service.timeline.spans import TurnTimes

TURNS_A_PAGE: Final = 500
_END: Final = (
    "INSERT INTO turns (job_id, conversation_id, agent, round, kind, state, reason, record)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_KEEP_TOKENS: Final = (
    "INSERT INTO turn_tokens (number, tokens) SELECT number, ? FROM turns"
    " WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND kind = 'turn'"
)
_END_ONCE: Final = f"{_END} ON CONFLICT DO NOTHING"
_REQUEUE: Final = (
    "INSERT INTO unfinished_turns (job_id, conversation_id, agent, round, record) VALUES (?, ?, ?, ?, ?)"
    " ON CONFLICT (job_id, conversation_id, agent, round) DO UPDATE SET record = excluded.record"
)
_FORGET: Final = "DELETE FROM unfinished_turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ?"
_TAKE_OUT: Final = (
    "DELETE FROM turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND kind = 'turn'"
    " AND EXISTS (SELECT 1 FROM turns AS later WHERE later.job_id = turns.job_id"
    " AND later.conversation_id = turns.conversation_id AND later.number > turns.number)"
)
_UNHEARD: Final = "SELECT conversation_id, agent, round FROM awaited_turns WHERE job_id = ? AND is_said = 1"
_AT: Final = (
    "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? AND kind = 'turn'"
)


class _Statements(NamedTuple):
    """The same queries for one of the two tables."""

    of_job: str
    of_conversation: str
    page: str  # by the key, which both tables index: no page sorts the whole job


_ENDED: Final = _Statements(
    "SELECT record, conversation_id FROM turns WHERE job_id = ? ORDER BY number",
    "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? ORDER BY number",
    # Without summaries: each is made on its reader's slot.
    "SELECT record, conversation_id, agent, round FROM turns WHERE job_id = ? AND kind = 'turn'"
    " AND (conversation_id, agent, round) > (?, ?, ?) ORDER BY conversation_id, agent, round LIMIT ?",
)
_UNFINISHED: Final = _Statements(
    "SELECT record, conversation_id FROM unfinished_turns WHERE job_id = ? ORDER BY round",
    "SELECT record FROM unfinished_turns WHERE job_id = ? AND conversation_id = ? ORDER BY round",
    "SELECT record, conversation_id, agent, round FROM unfinished_turns WHERE job_id = ?"
    " AND (conversation_id, agent, round) > (?, ?, ?) ORDER BY conversation_id, agent, round LIMIT ?",
)


class TokensSaid(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a turn's answers."""

    completion_tokens: int | None = None


class TurnHead(msgspec.Struct, gc=False):
    """The part of an ended turn that a list shows."""

    key: TurnKey
    state: TurnState
    text: str = ""
    detail: str | None = None
    usage: TokensSaid = TokensSaid()
    kind: TurnKind = TurnKind.TURN
    started_at: datetime | None = None
    finished_at: datetime | None = None


class After(NamedTuple):
    """The turn before a page."""

    conversation: str = ""
    agent: str = ""
    round: int = -1


Page = tuple[list[TurnTimes], After | None]
_decode_head = msgspec.json.Decoder(TurnHead).decode
_decode_times = msgspec.json.Decoder(TurnTimes).decode


# Writing


def end(connection: Connection, fact: TurnEnded, events: Events) -> None:
    """Write an ended turn; a turn that is already stored raises a database error.

    A summary may be stored already, and so may a cancelled turn of a caller who has spoken meanwhile.
    """
    turn = fact.turn
    is_callers = turn.state is TurnState.CANCELLED and turn.by is SpokenBy.CALLER
    may_be_there = is_callers or turn.kind is TurnKind.SUMMARY
    inserted = connection.execute(
        _END_ONCE if may_be_there else _END,
        _row(turn),
    )
    if may_be_there and not inserted.rowcount:
        return
    if fact.tokens is not None:
        connection.execute(_KEEP_TOKENS, (fact.tokens, *turn.key))
    if turn.attempts and turn.kind is TurnKind.TURN:
        connection.execute(_FORGET, tuple(turn.key))
    kind = {} if turn.kind is TurnKind.TURN else {"kind": turn.kind.value}
    ended = {"state": turn.state.value, "reason": turn.reason, "worker": turn.worker, **kind}
    event_rows.add_turn_event(events, turn.key, fact.at, **ended)


def hear(connection: Connection, key: TurnKey) -> None:
    """Put a caller's turn behind the others of its conversation, which has heard them before it."""
    turn = find(connection, key)
    if turn is not None and connection.execute(_TAKE_OUT, tuple(key)).rowcount:
        connection.execute(_END, _row(turn))


def hear_last(connection: Connection, keys: Collection[TurnKey]) -> None:
    """Put callers' turns of a conversation that ended before it heard them behind its others, in their order."""
    job_id, conversation_id = next(iter(keys))[:2]
    for turn in ended(connection, job_id, [conversation_id]):
        if turn.key in keys:
            hear(connection, turn.key)


def requeue(connection: Connection, fact: TurnRequeued | HalfWritten, events: Events) -> bool:
    """Write the attempts of a turn that runs again, or may have to; return whether that is an event."""
    connection.execute(_REQUEUE, (*fact.key, encode_turn(fact.so_far)))
    if isinstance(fact, HalfWritten):
        return False
    failed = {"state": "ready", "worker": fact.worker, "reason": fact.reason, "detail": fact.detail}
    event_rows.add_turn_event(events, fact.key, fact.at, **failed)
    return True


def _row(turn: Turn) -> tuple[object, ...]:
    return (*turn.key, turn.kind.value, turn.state.value, turn.reason, encode_turn(turn))


def cut_memory(connection: Connection, fact: MemoryCut) -> None:
    """Write a memory cut, unless it is known."""
    connection.execute(
        "INSERT INTO memory_cuts (job_id, conversation_id, agent, round, from_round) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (*fact.key, fact.from_round),
    )


# Reading


def find(connection: Connection, key: TurnKey) -> Turn | None:
    """Return an ended turn, or None."""
    stored = value_of(connection, _AT, tuple(key))
    return None if stored is None else decode_turn(stored)


def ended(connection: Connection, job_id: JobId, conversations: Collection[str]) -> list[Turn]:
    """List the ended turns of a job's conversations, in the order in which they became visible."""
    turns = [decode_turn(each) for each in _records(connection, _ENDED, job_id, conversations)]
    unheard = {TurnKey(job_id, *row) for row in connection.execute(_UNHEARD, (job_id,))}
    return sorted(turns, key=lambda turn: turn.key in unheard) if unheard else turns


def unfinished(connection: Connection, job_id: JobId, conversations: Collection[str]) -> list[UnfinishedTurn]:
    """List the turns of a job's conversations that were on a slot and will run again."""
    return [decode_unfinished(each) for each in _records(connection, _UNFINISHED, job_id, conversations)]


def _records(
    connection: Connection, statements: _Statements, job_id: JobId, conversations: Collection[str]
) -> list[str]:
    if len(conversations) > FEW:
        wanted = frozenset(conversations)
        return [row[0] for row in connection.execute(statements.of_job, (job_id,)) if row[1] in wanted]
    return [
        row[0]
        for conversation_id in conversations
        for row in connection.execute(statements.of_conversation, (job_id, conversation_id))
    ]


def ended_page(connection: Connection, job_id: JobId, after: After) -> Page:
    """Return the times of a page of ended turns, and the start of the next page, None after the last."""
    return _page(connection, _ENDED.page, job_id, after)


def unfinished_page(connection: Connection, job_id: JobId, after: After) -> Page:
    """Return the times of a page of turns that run again, and the start of the next page, None after the last."""
    return _page(connection, _UNFINISHED.page, job_id, after)


def _page(connection: Connection, sql: str, job_id: JobId, after: After) -> Page:
    rows = connection.execute(sql, (job_id, *after, TURNS_A_PAGE)).fetchall()
    return [_decode_times(row[0]) for row in rows], After(*rows[-1][1:]) if len(rows) == TURNS_A_PAGE else None


def memory_cuts(connection: Connection, job_id: JobId, conversations: Collection[str]) -> list[MemoryCut]:
    """List the memory cuts of a job's conversations."""
    which, values = some_of("conversation_id", conversations)
    rows = connection.execute(
        f"SELECT conversation_id, agent, round, from_round FROM memory_cuts WHERE job_id = ?{which}",  # noqa: S608
        (job_id, *values),
    )
    return [
        MemoryCut(key=TurnKey(job_id, row[0], row[1], row[2]), from_round=row[3])
        for row in rows
        if row[0] in conversations
    ]


def heads(connection: Connection, job_id: JobId, after: int) -> tuple[list[tuple[int, TurnHead]], int]:
    """List the heads of a job's ended turns with a number above ``after``, and count all its ended turns."""
    rows = connection.execute(
        "SELECT number, record FROM turns WHERE job_id = ? AND number > ? ORDER BY number", (job_id, after)
    )
    found = [(row[0], _decode_head(row[1])) for row in rows]
    return found, value_of(connection, "SELECT count(*) FROM turns WHERE job_id = ?", (job_id,))


def last_heads(connection: Connection, places: Sequence[tuple[JobId, str]]) -> list[tuple[str, TurnHead | None]]:
    """Return, for each conversation, the name of its job and the head of its newest completed turn."""
    found: list[tuple[str, TurnHead | None]] = []
    for job_id, conversation_id in places:
        name = value_of(connection, "SELECT name FROM jobs WHERE id = ?", (job_id,), "")
        last = value_of(
            connection,
            "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? AND kind = 'turn'"
            " AND state = 'completed' ORDER BY number DESC LIMIT 1",
            (job_id, conversation_id),
        )
        found.append((name, None if last is None else _decode_head(last)))
    return found

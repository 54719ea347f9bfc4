"""The store's queries: each returns a function of a reader's connection."""

import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from service.conversations.job import JobId
from service.conversations.states import ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.transcript import Turn, UnfinishedTurn
from service.errors import ConversationNotFound, IdempotencyConflict, JobNotFound
from service.store.records import StoredConversation, StoredEvent, StoredJob, Tally
from service.store.turns import decode_turn, decode_unfinished

T = TypeVar("T")
Query = Callable[[sqlite3.Connection], T]
_JOB_COLUMNS: Final = (
    "id, number, name, state, body_hash, metadata, total_conversations, total_turns, is_cancel_requested,"
    " created_at, started_at, finished_at"
)


def job(job_id: JobId) -> Query[StoredJob]:
    """One job; JobNotFound where there is none."""

    def query(connection: sqlite3.Connection) -> StoredJob:
        row = connection.execute(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE id = ?", (job_id,)).fetchone()  # noqa: S608
        if row is None:
            raise JobNotFound(job_id)
        return _job(row)

    return query


def document(job_id: JobId) -> Query[str]:
    """Return the JSON of a job as it was posted: apart, since it may be megabytes, and only recovery reads it."""

    def query(connection: sqlite3.Connection) -> str:
        row = connection.execute("SELECT document FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise JobNotFound(job_id)
        return str(row[0])

    return query


def jobs(state: JobState | None, limit: int, before: int | None) -> Query[list[StoredJob]]:
    """List jobs, the newest first, with a number below ``before``."""

    def query(connection: sqlite3.Connection) -> list[StoredJob]:
        rows = connection.execute(
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR number < ?2)"  # noqa: S608
            " ORDER BY number DESC LIMIT ?3",
            (state, before, limit),
        )
        return [_job(row) for row in rows]

    return query


def unfinished_jobs() -> Query[list[StoredJob]]:
    """List the jobs that have not ended, the oldest first."""

    def query(connection: sqlite3.Connection) -> list[StoredJob]:
        marks = ", ".join("?" * len(ENDED_JOBS))
        rows = connection.execute(
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE state NOT IN ({marks}) ORDER BY number",  # noqa: S608
            tuple(ENDED_JOBS),
        )
        return [_job(row) for row in rows]

    return query


def job_by_key(idempotency_key: str, body_hash: str) -> Query[StoredJob | None]:
    """Find the job that was posted with a key; IdempotencyConflict where its body was another."""

    def query(connection: sqlite3.Connection) -> StoredJob | None:
        row = connection.execute(
            f"SELECT {_JOB_COLUMNS} FROM jobs WHERE idempotency_key = ?",  # noqa: S608
            (idempotency_key,),
        ).fetchone()
        if row is None:
            return None
        stored = _job(row)
        if stored.body_hash != body_hash:
            raise IdempotencyConflict(idempotency_key, stored.id)
        return stored

    return query


def conversation(job_id: JobId, conversation_id: str) -> Query[StoredConversation]:
    """One conversation with its ended turns; JobNotFound or ConversationNotFound where it is not there."""

    def query(connection: sqlite3.Connection) -> StoredConversation:
        job(job_id)(connection)
        row = connection.execute(
            "SELECT metadata, state, reason FROM conversations WHERE job_id = ? AND id = ?", (job_id, conversation_id)
        ).fetchone()
        if row is None:
            raise ConversationNotFound(job_id, conversation_id)
        turns_of = connection.execute(
            "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? ORDER BY number",
            (job_id, conversation_id),
        )
        return StoredConversation(
            id=conversation_id,
            metadata=msgspec.json.decode(row[0]),
            state=ConversationState(row[1]),
            reason=row[2],
            turns=tuple(decode_turn(turn[0]) for turn in turns_of),
        )

    return query


def conversation_states(job_id: JobId) -> Query[dict[str, ConversationState]]:
    """Return the state of each conversation of a job, in its order."""

    def query(connection: sqlite3.Connection) -> dict[str, ConversationState]:
        rows = connection.execute("SELECT id, state FROM conversations WHERE job_id = ? ORDER BY position", (job_id,))
        return {row[0]: ConversationState(row[1]) for row in rows}

    return query


def turns(job_id: JobId) -> Query[list[Turn]]:
    """List the ended turns of a job, in the order in which they became visible."""

    def query(connection: sqlite3.Connection) -> list[Turn]:
        rows = connection.execute("SELECT record FROM turns WHERE job_id = ? ORDER BY number", (job_id,))
        return [decode_turn(row[0]) for row in rows]

    return query


def unfinished_turns(job_id: JobId) -> Query[list[UnfinishedTurn]]:
    """List the turns of a job that were on a slot and are to run again."""

    def query(connection: sqlite3.Connection) -> list[UnfinishedTurn]:
        rows = connection.execute("SELECT record FROM unfinished_turns WHERE job_id = ?", (job_id,))
        return [decode_unfinished(row[0]) for row in rows]

    return query


def tally(job_id: JobId) -> Query[Tally]:
    """Count a job's conversations and ended turns by state."""

    def query(connection: sqlite3.Connection) -> Tally:
        states = "SELECT state, count(*) FROM {} WHERE job_id = ? GROUP BY state"
        talks = dict(connection.execute(states.format("conversations"), (job_id,)).fetchall())
        ended = dict(connection.execute(states.format("turns"), (job_id,)).fetchall())
        return Tally(
            conversations={ConversationState(state): count for state, count in talks.items()},
            turns={TurnState(state): count for state, count in ended.items()},
        )

    return query


def events(job_id: JobId, after: int, limit: int) -> Query[tuple[list[StoredEvent], bool]]:
    """List events of a job with a number above ``after``, and tell whether none will follow them.

    Both are of one moment: an end that is seen with no events is the end of what was read before. JobNotFound where the
    job is not there.
    """

    def query(connection: sqlite3.Connection) -> tuple[list[StoredEvent], bool]:
        has_ended = job(job_id)(connection).state in ENDED_JOBS
        rows = connection.execute(
            "SELECT number, kind, data FROM events WHERE job_id = ? AND number > ? ORDER BY number LIMIT ?",
            (job_id, after, limit),
        )
        listed = [StoredEvent(number=row[0], kind=row[1], data=row[2]) for row in rows]
        return listed, has_ended and len(listed) < limit

    return query


def _job(row: Sequence[Any]) -> StoredJob:
    return StoredJob(
        id=JobId(row[0]),
        number=row[1],
        name=row[2],
        state=JobState(row[3]),
        body_hash=row[4],
        metadata=msgspec.json.decode(row[5]),
        total_conversations=row[6],
        total_turns=row[7],
        is_cancel_requested=bool(row[8]),
        created_at=datetime.fromisoformat(row[9]),
        started_at=datetime.fromisoformat(row[10]) if row[10] else None,
        finished_at=datetime.fromisoformat(row[11]) if row[11] else None,
    )

"""The store's write operations: each takes the writer's connection inside its transaction."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from service.conversations.job import JobId
from service.conversations.states import ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.transcript import rfc3339
from service.errors import NotEnded
from service.store import reading
from service.store.records import (
    ConversationMoved,
    JobMoved,
    NewJob,
    Record,
    StoredJob,
    TurnEnded,
    TurnMoved,
    TurnRequeued,
)
from service.store.turns import encode_turn


def post(connection: sqlite3.Connection, new: NewJob) -> tuple[StoredJob, bool]:
    """Insert a job, or return the one of the same key and body."""
    if new.idempotency_key is not None:
        stored = reading.job_by_key(new.idempotency_key, new.body_hash)(connection)
        if stored is not None:
            return stored, False
    job = new.job
    connection.execute(
        "INSERT INTO jobs (id, number, name, state, document, idempotency_key, body_hash, metadata,"
        " total_conversations, total_turns, created_at)"
        " VALUES (?, (SELECT coalesce(max(number), 0) + 1 FROM jobs), ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(job.id, job.name, JobState.QUEUED, new.document, new.idempotency_key, new.body_hash),
            *(_json(job.metadata), len(job.conversations), job.total_turns, rfc3339(new.created_at)),
        ),
    )
    connection.executemany(
        "INSERT INTO conversations (job_id, id, position, metadata, state) VALUES (?, ?, ?, ?, ?)",
        [
            (job.id, talk.id, position, _json(talk.metadata), ConversationState.QUEUED)
            for position, talk in enumerate(job.conversations)
        ],
    )
    _tell(connection, job.id, "job", {"state": JobState.QUEUED, "at": rfc3339(new.created_at)})
    return reading.job(job.id)(connection), True


def request_cancel(connection: sqlite3.Connection, job_id: JobId) -> StoredJob:
    """Note that a job is to be cancelled; one that has ended stays as it is."""
    stored = reading.job(job_id)(connection)
    if stored.state not in ENDED_JOBS:
        connection.execute("UPDATE jobs SET is_cancel_requested = 1 WHERE id = ?", (job_id,))
    return stored


def delete(connection: sqlite3.Connection, job_id: JobId) -> None:
    """Delete a job that has ended, and all that is of it."""
    stored = reading.job(job_id)(connection)
    if stored.state not in ENDED_JOBS:
        raise NotEnded(job_id, stored.state)
    connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))


def apply(connection: sqlite3.Connection, records: Sequence[Record]) -> None:
    """Apply facts in their order."""
    for record in records:
        match record:
            case JobMoved():
                _move_job(connection, record)
            case ConversationMoved():
                _move_conversation(connection, record)
            case TurnMoved():
                _tell_turn(connection, record, state=record.state, worker=record.worker)
            case TurnRequeued():
                connection.execute(
                    "INSERT OR REPLACE INTO unfinished_turns (job_id, conversation_id, agent, round, record)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (*record.key, encode_turn(record.so_far)),
                )
                _tell_turn(
                    connection, record, state="ready", worker=record.worker, reason=record.reason, detail=record.detail
                )
            case TurnEnded():
                _end_turn(connection, record)
            case _:
                assert_never(record)


def job_of(record: Record) -> JobId:
    """Return the job that a fact is about."""
    match record:
        case JobMoved() | ConversationMoved():
            return record.job_id
        case TurnMoved() | TurnRequeued():
            return record.key.job_id
        case TurnEnded():
            return record.turn.key.job_id


def _move_job(connection: sqlite3.Connection, record: JobMoved) -> None:
    column = "finished_at" if record.state in ENDED_JOBS else "started_at"
    changed = connection.execute(
        f"UPDATE jobs SET state = ?, {column} = ? WHERE id = ? AND state != ?",  # noqa: S608 - one of two constants
        (record.state, rfc3339(record.at), record.job_id, record.state),
    )
    if changed.rowcount:
        kind = "end" if record.state in ENDED_JOBS else "job"
        _tell(connection, record.job_id, kind, {"state": record.state, "at": rfc3339(record.at)})


def _move_conversation(connection: sqlite3.Connection, record: ConversationMoved) -> None:
    changed = connection.execute(
        "UPDATE conversations SET state = ?, reason = ? WHERE job_id = ? AND id = ? AND state != ?",
        (record.state, record.reason, record.job_id, record.conversation_id, record.state),
    )
    if changed.rowcount:
        fields = {"conversation": record.conversation_id, "state": record.state, "reason": record.reason}
        _tell(connection, record.job_id, "conversation", {**fields, "at": rfc3339(record.at)})


def _end_turn(connection: sqlite3.Connection, record: TurnEnded) -> None:
    turn = record.turn
    connection.execute(
        "INSERT INTO turns (job_id, conversation_id, agent, round, state, reason, record) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (*turn.key, turn.state, turn.reason, encode_turn(turn)),
    )
    if len(turn.attempts) > 1 or (turn.attempts and turn.state is not TurnState.COMPLETED):
        connection.execute(
            "DELETE FROM unfinished_turns WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ?",
            tuple(turn.key),
        )
    fields = {"conversation": turn.key.conversation_id, "agent": turn.key.agent_id, "round": turn.key.round}
    ending = {"state": turn.state, "reason": turn.reason, "worker": turn.worker, "at": rfc3339(record.at)}
    _tell(connection, turn.key.job_id, "turn", {**fields, **ending})


def _tell_turn(connection: sqlite3.Connection, record: TurnMoved | TurnRequeued, **fields: object) -> None:
    key = record.key
    place = {"conversation": key.conversation_id, "agent": key.agent_id, "round": key.round}
    _tell(connection, key.job_id, "turn", {**place, **fields, "at": rfc3339(record.at)})


def _tell(connection: sqlite3.Connection, job_id: JobId, kind: str, data: Mapping[str, object]) -> None:
    connection.execute(
        "INSERT INTO events (job_id, number, kind, data)"
        " VALUES (?, (SELECT coalesce(max(number), 0) + 1 FROM events WHERE job_id = ?), ?, ?)",
        (job_id, job_id, kind, _json(data)),
    )


def _json(document: Mapping[str, object]) -> str:
    return msgspec.json.encode(document).decode()

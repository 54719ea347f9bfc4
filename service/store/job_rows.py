"""Jobs: their rows, which change with each event, their documents, which do not, and their deletion."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.record.transcript import rfc3339
from service.errors import IdempotencyConflict, JobNotFound, NotEnded
from service.store import awaited_turns, heirs
from service.store.databases.database import Connection, Membership, Row
from service.store.event_rows import to_json
from service.store.records import GivenUp, NewJob, StoredJob, Tally

LAST_NUMBER: Final = 2**62
LISTED_METADATA: Final = 4096  # characters of metadata in a list
MOST_GIVEN_UP: Final = 10  # entries of a job in a tally
GIVEN_UP_CHARS: Final = 200  # characters of a pattern in a tally: lists and dashboard frames have many jobs
_JOB: Final = (
    "SELECT id, number, name, state, body_hash, metadata, total_conversations, total_turns, is_cancel_requested,"
    " created_at, started_at, finished_at, key_name FROM jobs JOIN job_documents ON job_id = id WHERE id = ?"
)
_POSTED: Final = _JOB.replace("WHERE id = ?", "WHERE idempotency_key = ? AND (key_until IS NULL OR key_until >= ?)")
_LISTED: Final = _JOB.replace("metadata", "CASE WHEN length(metadata) <= ? THEN metadata ELSE NULL END").replace(
    "WHERE id = ?", "WHERE (CAST(? AS TEXT) IS NULL OR state = ?) AND number < ? ORDER BY number DESC LIMIT ?"
)
_LISTED_OF_KEY: Final = _LISTED.replace(" ORDER BY", " AND key_name = ? ORDER BY")


# Writing


def find_posted(connection: Connection, new: NewJob) -> StoredJob | None:
    """Return the job with the same key and body, or None; an expired key is free again.

    Raises:
        IdempotencyConflict: the key belongs to another body.
    """
    if new.idempotency_key is None:
        return None
    connection.execute(
        "UPDATE jobs SET idempotency_key = NULL WHERE idempotency_key = ? AND key_until < ?",
        (new.idempotency_key, rfc3339(new.created_at)),
    )
    return by_key(connection, new.idempotency_key, new.body_hash, new.created_at)


def columns_of(new: NewJob) -> dict[str, object]:
    """Return the columns of a new job, except its number."""
    job = new.job
    return {
        "id": job.id,
        "key_name": job.owner,
        "name": job.name,
        "state": JobState.QUEUED.value,
        "idempotency_key": new.idempotency_key,
        "key_until": rfc3339(new.key_until),
        "body_hash": new.body_hash,
        "total_conversations": len(job.conversations),
        "total_turns": job.total_turns,
        "unfinished": len(job.conversations),
        "webhook": None if job.webhook is None else to_json(job.webhook.document),
        "created_at": rfc3339(new.created_at),
        "last_event": 1,
    }


def keep_document(connection: Connection, new: NewJob) -> None:
    """Write the document and the metadata of a job; they may be megabytes, and never change."""
    connection.execute(
        "INSERT INTO job_documents (job_id, document, metadata) VALUES (?, ?, ?)",
        (new.job.id, new.document, to_json(new.job.metadata)),
    )


def as_stored(new: NewJob, number: int) -> StoredJob:
    """Return a new job as a read would."""
    return StoredJob(
        id=new.job.id,
        number=number,
        name=new.job.name,
        state=JobState.QUEUED,
        body_hash=new.body_hash,
        metadata=new.job.metadata,
        total_conversations=len(new.job.conversations),
        total_turns=new.job.total_turns,
        is_cancel_requested=False,
        created_at=new.created_at,
        started_at=None,
        finished_at=None,
        owner=new.job.owner,
    )


def give_up(connection: Connection, fact: GivenUp) -> None:
    """Record that a pattern or schema is no longer tried, unless that is known."""
    key = fact.key
    connection.execute(
        "INSERT INTO given_up (job_id, path, pattern, conversation_id, agent, round) VALUES (?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING",
        (key.job_id, fact.path, fact.pattern or "", key.conversation_id, key.agent_id, key.round),
    )


def request_cancel(connection: Connection, membership: Membership, job_id: JobId) -> StoredJob:
    """Request the cancellation of a job; an ended job stays unchanged."""
    stored = job(connection, job_id)
    if stored.state not in ENDED_JOBS:
        connection.execute("UPDATE jobs SET is_cancel_requested = 1 WHERE id = ?", (job_id,))
        membership.notify([job_id], is_work=True)  # a node has to end conversations that no node runs yet
    return stored


def delete(connection: Connection, membership: Membership, job_id: JobId, *, with_heirs: bool) -> list[JobId]:
    """Delete an ended job; heirs of its key keep their inherited turns, or are deleted too (``with_heirs``).

    Return the jobs to cancel: those of other keys that lose inherited turns.

    Raises:
        JobNotFound: there is no such job.
        NotEnded: the job, or an heir that is to be deleted with it, has not ended.
    """
    stored = job(connection, job_id)
    if stored.state not in ENDED_JOBS:
        raise NotEnded(job_id, stored.state)
    going = [job_id, *(heirs.heirs_of(connection, job_id, stored.owner) if with_heirs else ())]
    sources = heirs.sources_of(connection, going)
    heirs.lock(connection, going, sources)
    cancelled: list[JobId] = []
    for each in going:
        cancelled += heirs.keep_for_heirs(connection, each, stored.owner)
        connection.execute("DELETE FROM jobs WHERE id = ?", (each,))
    heirs.drop_unused(connection, sources)
    cancelled += heirs.drop_without_owner(connection, sources, stored.owner)
    membership.notify(cancelled, is_work=bool(cancelled))
    return cancelled


# Reading


def job(connection: Connection, job_id: JobId) -> StoredJob:
    """Return a job; JobNotFound if it does not exist."""
    return _as_job(_row_of(connection, job_id, _JOB))


def owner(connection: Connection, job_id: JobId) -> str | None:
    """Return the name of the key that posted a job, None without a key; JobNotFound if it does not exist."""
    found: str | None = _row_of(connection, job_id, "SELECT key_name FROM jobs WHERE id = ?")[0]
    return found


def document(connection: Connection, job_id: JobId) -> str:
    """Return the JSON of a job as it was posted; JobNotFound if it does not exist."""
    sql = "SELECT document FROM job_documents WHERE job_id = ?"
    return str(_row_of(connection, job_id, sql)[0])


def _row_of(connection: Connection, job_id: JobId, sql: str) -> Row:
    row = connection.execute(sql, (job_id,)).fetchone()
    if row is None:
        raise JobNotFound(job_id)
    return row


def by_key(connection: Connection, idempotency_key: str, body_hash: str, now: datetime) -> StoredJob | None:
    """Return the job posted with an idempotency key that is in force; IdempotencyConflict for another body."""
    row = connection.execute(_POSTED, (idempotency_key, rfc3339(now))).fetchone()
    if row is None:
        return None
    stored = _as_job(row)
    if stored.body_hash != body_hash:
        raise IdempotencyConflict(idempotency_key, stored.id)
    return stored


def listed(
    connection: Connection, state: JobState | None, limit: int, before: int | None, owner: str | None = None
) -> list[StoredJob]:
    """List jobs, the newest first, with a number below ``before``, without large metadata.

    With ``owner`` only jobs that the key with that name has posted.
    """
    of_key = () if owner is None else (owner,)
    values = (LISTED_METADATA, state, state, LAST_NUMBER if before is None else before, *of_key, limit)
    sql = _LISTED_OF_KEY if of_key else _LISTED
    return [_as_job(row) for row in connection.execute(sql, values)]


def to_cancel(connection: Connection) -> list[JobId]:
    """List the unfinished jobs whose cancellation was requested."""
    sql = "SELECT id FROM jobs WHERE state IN ('queued', 'running') AND is_cancel_requested = 1 ORDER BY number"
    return [JobId(row[0]) for row in connection.execute(sql)]


def count_states(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
    """Count all jobs and all conversations by state; reads every row of both."""

    def count(sql: str) -> dict[str, int]:
        return {str(state): int(found) for state, found in connection.execute(sql)}

    jobs = count("SELECT state, COUNT(*) FROM jobs GROUP BY state")
    return jobs, count("SELECT state, COUNT(*) FROM conversations GROUP BY state")


def tally(connection: Connection, job_id: JobId) -> Tally:
    """Count a job's conversations and ended turns by state."""
    of_conversations = "SELECT state, count(*) FROM conversations WHERE job_id = ? GROUP BY state"
    by_state = connection.execute(of_conversations, (job_id,)).fetchall()
    of_turns = "SELECT state, count(*) FROM turns WHERE job_id = ? AND kind = 'turn' GROUP BY state"
    ended = connection.execute(of_turns, (job_id,)).fetchall()
    return Tally(
        conversations={ConversationState(row[0]): row[1] for row in by_state},
        turns={TurnState(row[0]): row[1] for row in ended},
        awaited=awaited_turns.count(connection, job_id),
        given_up=given_up(connection, job_id, MOST_GIVEN_UP, GIVEN_UP_CHARS),
    )


def given_up(connection: Connection, job_id: JobId, limit: int = 2**30, characters: int = 2**30) -> list[GivenUp]:
    """List the patterns and schemas no longer tried in a job, at most ``limit``, shortened to ``characters``."""
    rows = connection.execute(
        "SELECT conversation_id, agent, round, path, substr(pattern, 1, ?) FROM given_up WHERE job_id = ?"
        " ORDER BY path, pattern LIMIT ?",
        (characters, job_id, limit),
    )
    return [GivenUp(key=TurnKey(job_id, row[0], row[1], row[2]), path=row[3], pattern=row[4] or None) for row in rows]


def _as_job(row: Sequence[Any]) -> StoredJob:
    return StoredJob(
        id=JobId(row[0]),
        number=row[1],
        name=row[2],
        state=JobState(row[3]),
        body_hash=row[4],
        metadata=msgspec.json.decode(row[5]) if row[5] is not None else {},
        is_metadata_cut=row[5] is None,
        total_conversations=row[6],
        total_turns=row[7],
        is_cancel_requested=bool(row[8]),
        created_at=datetime.fromisoformat(row[9]),
        started_at=datetime.fromisoformat(row[10]) if row[10] else None,
        finished_at=datetime.fromisoformat(row[11]) if row[11] else None,
        owner=row[12],
    )

"""The store's queries: each returns a function of a reader's connection."""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from service.conversations.job import JobId, TurnKey
from service.conversations.states import ENDED_JOBS, ConversationState, JobState, TurnState
from service.conversations.transcript import ConversationRecord, Turn, UnfinishedTurn, rfc3339
from service.conversations.until import Ending
from service.conversations.wording import ConversationWords, decode_clock, decode_models
from service.errors import ConversationNotFound, IdempotencyConflict, JobNotFound
from service.store import awaited_turns, given_up, heirs
from service.store.databases.database import FEW, Connection
from service.store.records import (
    StoredEvent,
    StoredJob,
    StoredToolCall,
    Tally,
    decode_turn,
    decode_unfinished,
)
from service.timeline.spans import TurnTimes

T = TypeVar("T")
_decode_ending = msgspec.json.Decoder(Ending).decode
Query = Callable[[Connection], T]
LAST_NUMBER: Final = 2**62
LISTED_METADATA: Final = 4096  # characters of a job's metadata that stand in a list
_JOB_COLUMNS: Final = (
    "id, number, name, state, body_hash, metadata, total_conversations, total_turns, is_cancel_requested,"
    " created_at, started_at, finished_at, key_name"
)
_JOBS: Final = "jobs JOIN job_documents ON job_id = id"
TURNS_A_PAGE: Final = 500
MOST_GIVEN_UP: Final = 10  # of a job, where its result is not read
GIVEN_UP_CHARS: Final = 200  # of a pattern there: lists and frames of the dashboard have many jobs
_decode = msgspec.json.Decoder(TurnTimes).decode


def job(job_id: JobId) -> Query[StoredJob]:
    """One job; JobNotFound if it does not exist."""

    def query(connection: Connection) -> StoredJob:
        row = connection.execute(f"SELECT {_JOB_COLUMNS} FROM {_JOBS} WHERE id = ?", (job_id,)).fetchone()  # noqa: S608
        if row is None:
            raise JobNotFound(job_id)
        return _job(row)

    return query


def owner(job_id: JobId) -> Query[str | None]:
    """Return the name of the key that a job was posted with, None where it is nobody's; JobNotFound without the job."""

    def query(connection: Connection) -> str | None:
        row = connection.execute("SELECT key_name FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None:
            raise JobNotFound(job_id)
        return None if row[0] is None else str(row[0])

    return query


def document(job_id: JobId) -> Query[str]:
    """Return the JSON of a job as it was posted: apart, since it may be megabytes, and only recovery reads it."""

    def query(connection: Connection) -> str:
        row = connection.execute("SELECT document FROM job_documents WHERE job_id = ?", (job_id,)).fetchone()
        if row is None:
            raise JobNotFound(job_id)
        return str(row[0])

    return query


def jobs(state: JobState | None, limit: int, before: int | None, owner: str | None = None) -> Query[list[StoredJob]]:
    """List jobs, the newest first, with a number below ``before``; larger metadata is left out.

    With ``owner`` only those that were posted with the key of that name.
    """
    columns = _JOB_COLUMNS.replace(
        "metadata", f"CASE WHEN length(metadata) <= {LISTED_METADATA} THEN metadata ELSE NULL END"
    )

    def query(connection: Connection) -> list[StoredJob]:
        rows = connection.execute(
            f"SELECT {columns} FROM {_JOBS} WHERE (CAST(? AS TEXT) IS NULL OR state = ?)"  # noqa: S608
            f" AND number < ?{'' if owner is None else ' AND key_name = ?'} ORDER BY number DESC LIMIT ?",
            (
                state,
                state,
                LAST_NUMBER if before is None else before,
                *(() if owner is None else (owner,)),
                limit,
            ),
        )
        return [_job(row) for row in rows]

    return query


def to_cancel() -> Query[list[JobId]]:
    """List the jobs with a requested cancellation that have not ended."""

    def query(connection: Connection) -> list[JobId]:
        rows = connection.execute(
            "SELECT id FROM jobs WHERE state IN ('queued', 'running') AND is_cancel_requested = 1 ORDER BY number"
        )
        return [JobId(row[0]) for row in rows]

    return query


def job_by_key(idempotency_key: str, body_hash: str, now: datetime) -> Query[StoredJob | None]:
    """Find the job that was posted with a key which still counts; IdempotencyConflict where its body was another."""

    def query(connection: Connection) -> StoredJob | None:
        row = connection.execute(
            f"SELECT {_JOB_COLUMNS} FROM {_JOBS}"  # noqa: S608
            " WHERE idempotency_key = ? AND (key_until IS NULL OR key_until >= ?)",
            (idempotency_key, rfc3339(now)),
        ).fetchone()
        if row is None:
            return None
        stored = _job(row)
        if stored.body_hash != body_hash:
            raise IdempotencyConflict(idempotency_key, stored.id)
        return stored

    return query


def conversation(job_id: JobId, conversation_id: str, after: int = 0) -> Query[ConversationRecord]:
    """One conversation with its ended turns but the first ``after``.

    JobNotFound or ConversationNotFound where it is not there.
    """

    def query(connection: Connection) -> ConversationRecord:
        job(job_id)(connection)
        row = connection.execute(
            "SELECT metadata, state, reason, ending FROM conversations WHERE job_id = ? AND id = ?",
            (job_id, conversation_id),
        ).fetchone()
        if row is None:
            raise ConversationNotFound(job_id, conversation_id)
        failed = connection.execute(
            "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? AND state = 'failed' ORDER BY number",
            (job_id, conversation_id),
        )
        before = heirs.inherited(job_id, [conversation_id])(connection)
        turns_of = connection.execute(
            "SELECT record FROM turns WHERE job_id = ? AND conversation_id = ? ORDER BY number LIMIT ? OFFSET ?",
            (job_id, conversation_id, LAST_NUMBER, max(0, after - len(before))),
        )
        return ConversationRecord(
            id=conversation_id,
            metadata=msgspec.json.decode(row[0]),
            state=ConversationState(row[1]),
            reason=row[2],
            ending=None if row[3] is None else _decode_ending(row[3]),
            left=tuple(
                turn.key.agent_id for turn in (*before, *(decode_turn(row[0]) for row in failed)) if turn.leaves
            ),
            turns=(*before[after:], *(decode_turn(turn[0]) for turn in turns_of)),
        )

    return query


def count_states(connection: Connection) -> tuple[dict[str, int], dict[str, int]]:
    """Count all jobs by state, and all conversations; every one of them is read for it."""

    def count(sql: str) -> dict[str, int]:
        return {str(state): int(found) for state, found in connection.execute(sql)}

    jobs = count("SELECT state, COUNT(*) FROM jobs GROUP BY state")
    return jobs, count("SELECT state, COUNT(*) FROM conversations GROUP BY state")


def conversation_states(job_id: JobId) -> Query[dict[str, ConversationState]]:
    """Return the state of each conversation of a job, in its order."""

    def query(connection: Connection) -> dict[str, ConversationState]:
        rows = connection.execute("SELECT id, state FROM conversations WHERE job_id = ? ORDER BY position", (job_id,))
        return {row[0]: ConversationState(row[1]) for row in rows}

    return query


def words(job_id: JobId, conversations: Collection[str]) -> Query[dict[str, ConversationWords | None]]:
    """Return the words of the conversations that have any; None of one that had begun before they were stored."""

    def query(connection: Connection) -> dict[str, ConversationWords | None]:
        of_job = (
            "SELECT id, began_at, words FROM conversations LEFT JOIN wordings ON digest = wording"
            " WHERE job_id = ? AND (state != 'queued' OR wording IS NOT NULL)"
        )
        if len(conversations) > FEW:
            wanted = frozenset(conversations)
            rows = [row for row in connection.execute(of_job, (job_id,)) if row[0] in wanted]
        else:
            each = f"{of_job} AND id = ?"
            rows = [row for name in conversations for row in connection.execute(each, (job_id, name))]
        return {name: _words(began_at, text) for name, began_at, text in rows}

    return query


def _words(began_at: str | None, text: str | None) -> ConversationWords | None:
    if began_at is None or text is None:
        return None
    return ConversationWords(began_at=decode_clock(began_at), models=decode_models(text))


def turns(job_id: JobId, conversations: Collection[str]) -> Query[list[Turn]]:
    """List the ended turns of conversations of a job, in the order in which they became visible."""

    def query(connection: Connection) -> list[Turn]:
        return [decode_turn(record) for record in _records(connection, "turns", "number", job_id, conversations)]

    return query


def unfinished_turns(job_id: JobId, conversations: Collection[str]) -> Query[list[UnfinishedTurn]]:
    """List the turns of conversations of a job that were on a slot and are to run again."""

    def query(connection: Connection) -> list[UnfinishedTurn]:
        records = _records(connection, "unfinished_turns", "round", job_id, conversations)
        return [decode_unfinished(record) for record in records]

    return query


def _records(
    connection: Connection, table: str, order: str, job_id: JobId, conversations: Collection[str]
) -> list[str]:
    if len(conversations) > FEW:
        rows = connection.execute(
            f"SELECT record, conversation_id FROM {table} WHERE job_id = ? ORDER BY {order}",  # noqa: S608
            (job_id,),
        )
        wanted = frozenset(conversations)
        return [row[0] for row in rows if row[1] in wanted]
    return [
        row[0]
        for conversation_id in conversations
        for row in connection.execute(
            f"SELECT record FROM {table} WHERE job_id = ? AND conversation_id = ? ORDER BY {order}",  # noqa: S608
            (job_id, conversation_id),
        )
    ]


def tool_calls(key: TurnKey) -> Query[list[StoredToolCall]]:
    """List the calls of tools that a turn has begun, over all its attempts, in their order."""

    def query(connection: Connection) -> list[StoredToolCall]:
        rows = connection.execute(
            "SELECT key, number, name, arguments, policy, outcome FROM tool_calls"
            " WHERE job_id = ? AND conversation_id = ? AND agent = ? AND round = ? ORDER BY number",
            tuple(key),
        )
        return [
            StoredToolCall(call=row[0], number=row[1], name=row[2], arguments=row[3], policy=row[4], outcome=row[5])
            for row in rows
        ]

    return query


def tally(job_id: JobId) -> Query[Tally]:
    """Count a job's conversations and ended turns by state."""

    def query(connection: Connection) -> Tally:
        states = "SELECT state, count(*) FROM {} WHERE job_id = ? GROUP BY state"
        by_state = connection.execute(states.format("conversations"), (job_id,)).fetchall()
        of_turns = "SELECT state, count(*) FROM turns WHERE job_id = ? AND kind = 'turn' GROUP BY state"
        ended = connection.execute(of_turns, (job_id,)).fetchall()
        return Tally(
            conversations={ConversationState(row[0]): row[1] for row in by_state},
            turns={TurnState(row[0]): row[1] for row in ended},
            awaited=awaited_turns.count(job_id)(connection),
            given_up=given_up.of_job(job_id, MOST_GIVEN_UP, GIVEN_UP_CHARS)(connection),
        )

    return query


def events(job_id: JobId, after: int, limit: int) -> Query[tuple[list[StoredEvent], bool]]:
    """List events of a job with a number above ``after``, and tell whether none will follow them.

    Both are of one moment: an end that is seen with no events is the end of what was read before. JobNotFound where the
    job is not there.
    """

    def query(connection: Connection) -> tuple[list[StoredEvent], bool]:
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


class After(NamedTuple):
    """Behind which turn a page begins."""

    conversation: str = ""
    agent: str = ""
    round: int = -1


def ended_turns(job_id: JobId, after: After) -> Query[tuple[list[TurnTimes], After | None]]:
    """Return a page of ended turns, and where the next one begins, None after the last."""
    return _page("turns", job_id, after, " AND kind = 'turn'")  # a summary is made on its reader's slot


def unfinished_turns_of_job(job_id: JobId, after: After) -> Query[tuple[list[TurnTimes], After | None]]:
    """Return a page of turns that were on a slot and have not ended, and where the next one begins."""
    return _page("unfinished_turns", job_id, after)


def _page(table: str, job_id: JobId, after: After, which: str = "") -> Query[tuple[list[TurnTimes], After | None]]:
    def query(connection: Connection) -> tuple[list[TurnTimes], After | None]:
        # By the key, which has an index in both tables: no page sorts the whole job.
        rows = connection.execute(
            f"SELECT record, conversation_id, agent, round FROM {table}"  # noqa: S608
            f" WHERE job_id = ?{which} AND (conversation_id, agent, round) > (?, ?, ?)"
            " ORDER BY conversation_id, agent, round LIMIT ?",
            (job_id, *after, TURNS_A_PAGE),
        ).fetchall()
        turns = [_decode(row[0]) for row in rows]
        return turns, After(*rows[-1][1:]) if len(rows) == TURNS_A_PAGE else None

    return query

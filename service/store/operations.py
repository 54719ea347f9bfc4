"""The store's write operations: each takes the writer's connection inside its transaction."""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, assert_never

import msgspec

from service.conversations.job import JobId, SpokenBy, TurnKey, TurnKind
from service.conversations.states import (
    ENDED_CONVERSATIONS,
    ENDED_JOBS,
    ConversationState,
    JobState,
    TurnState,
    job_state_after,
)
from service.conversations.transcript import ended_by, rfc3339
from service.conversations.wording import encode_clock, encode_models
from service.errors import NotEnded
from service.store import deliveries, given_up, heirs, memory_cuts, queries
from service.store.databases.database import Connection, Membership
from service.store.records import (
    ConversationMoved,
    ConversationWorded,
    Fact,
    GivenUp,
    MemoryCut,
    NewJob,
    StoredJob,
    ToolCallEnded,
    ToolCallStarted,
    TurnEnded,
    TurnMoved,
    TurnRequeued,
    encode_turn,
)

PLACE = "job_id = ? AND conversation_id = ? AND agent = ? AND round = ?"  # of a turn


# Jobs


def find_posted(connection: Connection, new: NewJob) -> StoredJob | None:
    """Return the job of the same key and body, None where there is none; a key that is out of time is free again.

    Raises:
        IdempotencyConflict: the key is another body's.
    """
    if new.idempotency_key is None:
        return None
    connection.execute(
        "UPDATE jobs SET idempotency_key = NULL WHERE idempotency_key = ? AND key_until < ?",
        (new.idempotency_key, rfc3339(new.created_at)),
    )
    return queries.job_by_key(new.idempotency_key, new.body_hash, new.created_at)(connection)


def job_columns(new: NewJob) -> dict[str, object]:
    """Return the columns of a new job, without its number."""
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
    """Write what of a job is large and never changes, apart from its row, which each event rewrites."""
    connection.execute(
        "INSERT INTO job_documents (job_id, document, metadata) VALUES (?, ?, ?)",
        (new.job.id, new.document, to_json(new.job.metadata)),
    )


def tell_posted(connection: Connection, new: NewJob) -> None:
    """Write the first event of a job, which its row counts already."""
    data = {"state": JobState.QUEUED.value, "at": rfc3339(new.created_at)}
    connection.execute(
        "INSERT INTO events (job_id, number, kind, data) VALUES (?, 1, 'job', ?)", (new.job.id, to_json(data))
    )


def as_stored(new: NewJob, number: int) -> StoredJob:
    """Return a job as it would be read now."""
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


def request_cancel(connection: Connection, membership: Membership, job_id: JobId) -> StoredJob:
    """Request the cancellation of a job; a job that has ended stays as it is."""
    stored = queries.job(job_id)(connection)
    if stored.state not in ENDED_JOBS:
        connection.execute("UPDATE jobs SET is_cancel_requested = 1 WHERE id = ?", (job_id,))
        membership.notify(connection, [job_id], is_work=True)  # some node has to end what no node runs yet
    return stored


def delete(connection: Connection, membership: Membership, job_id: JobId, *, with_heirs: bool) -> list[JobId]:
    """Delete a job that has ended, and all that is of it; what heirs of its key have inherited is kept for them.

    ``with_heirs`` deletes their jobs as well. Return jobs that are to be cancelled: they have inherited, and are
    another key's.
    """
    stored = queries.job(job_id)(connection)
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
    membership.notify(connection, cancelled, is_work=bool(cancelled))
    return cancelled


# Facts


class JobEvent(NamedTuple):
    """An event of a job that is to be written with the facts beside it; ``data`` is JSON."""

    job_id: JobId
    kind: str
    data: str


Events = list[JobEvent]  # of the facts of one write so far, to be written behind them


def _tell(events: Events, job_id: JobId, kind: str, data: Mapping[str, object]) -> None:
    events.append(JobEvent(job_id, kind, to_json(data)))


def place_of(record: Fact) -> tuple[JobId, str]:
    """Return the conversation that a fact is about."""
    match record:
        case ConversationMoved() | ConversationWorded():
            return record.job_id, record.conversation_id
        case MemoryCut() | GivenUp() | TurnMoved() | TurnRequeued() | ToolCallStarted() | ToolCallEnded():
            return record.key[:2]
        case TurnEnded():
            return record.turn.key[:2]
        case _:
            assert_never(record)


def apply(
    connection: Connection,
    record: ConversationWorded
    | MemoryCut
    | GivenUp
    | TurnMoved
    | TurnRequeued
    | TurnEnded
    | ToolCallStarted
    | ToolCallEnded,
    events: Events,
) -> None:
    """Write a fact that ends no conversation; what its followers are told is added to ``events``."""
    match record:
        case ConversationWorded():
            keep_words(connection, record)
        case MemoryCut():
            memory_cuts.add(connection, record)
        case GivenUp():
            given_up.add(connection, record)
        case TurnMoved():
            waits = {} if record.demand is None else {"wait_s": record.demand.wait_s}
            _tell_turn(events, record.key, record.at, state=record.state.value, worker=record.worker, **waits)
        case TurnRequeued():
            _requeue_turn(connection, record, events)
        case TurnEnded():
            _end_turn(connection, record, events)
        case ToolCallStarted():
            connection.execute(
                "INSERT INTO tool_calls (job_id, conversation_id, agent, round, key, number, name, arguments, policy,"
                " started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (job_id, conversation_id, agent, round, key)"
                # It is made again: what came of it before says nothing about that.
                " DO UPDATE SET started_at = excluded.started_at, outcome = NULL, ended_at = NULL",
                (
                    *record.key,
                    record.call,
                    record.number,
                    record.name,
                    record.arguments,
                    record.policy,
                    rfc3339(record.at),
                ),
            )
        case ToolCallEnded():
            connection.execute(
                f"UPDATE tool_calls SET outcome = ?, ended_at = ? WHERE {PLACE} AND key = ?",  # noqa: S608
                (record.outcome, rfc3339(record.at), *record.key, record.call),
            )
        case _:
            assert_never(record)


def move_conversation(connection: Connection, record: ConversationMoved, fence: int, events: Events) -> None:
    """Write how far a conversation is, and with it how far its job is."""
    is_over = record.state in ENDED_CONVERSATIONS
    ending = None if record.ending is None else msgspec.json.encode(record.ending).decode()
    changed = connection.execute(
        f"UPDATE conversations SET state = ?, reason = ?, ending = ?{', owner = NULL' if is_over else ''}"  # noqa: S608
        " WHERE job_id = ? AND id = ? AND fence = ? AND state != ?",
        (record.state.value, record.reason, ending, record.job_id, record.conversation_id, fence, record.state.value),
    )
    if not changed.rowcount:
        return
    if not is_over:
        _start_job(connection, record.job_id, record.at, events)
    fields: dict[str, object] = {"conversation": record.conversation_id, "state": record.state.value}
    fields["reason"] = record.reason
    if is_over:
        fields["ended_by"] = ended_by(record.state, record.ending)
    _tell(events, record.job_id, "conversation", {**fields, "at": rfc3339(record.at)})
    if record.most is not None:
        _leave_out(connection, record)
    if is_over:
        connection.execute(
            "DELETE FROM awaited_turns WHERE job_id = ? AND conversation_id = ?",
            (record.job_id, record.conversation_id),
        )
        _count_conversation(connection, record.job_id, record.at, events)


def _leave_out(connection: Connection, record: ConversationMoved) -> None:
    """Take turns off a job that do not exist, since a condition has ended their conversation; some had been tried.

    A caller may have spoken one at that very moment.
    """
    connection.execute(
        "UPDATE jobs SET total_turns = total_turns - ?"
        " + (SELECT count(*) FROM turns WHERE job_id = jobs.id AND conversation_id = ? AND kind = 'turn') WHERE id = ?",
        (record.most, record.conversation_id, record.job_id),
    )
    connection.execute(
        "DELETE FROM unfinished_turns WHERE job_id = ? AND conversation_id = ?",
        (record.job_id, record.conversation_id),
    )


def keep_words(connection: Connection, record: ConversationWorded) -> None:
    """Write the words around a conversation."""
    text = encode_models(record.words.models)
    digest = hashlib.sha256(text.encode()).hexdigest()
    connection.execute(
        "INSERT INTO wordings (digest, words) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING", (digest, text)
    )
    connection.execute(
        "UPDATE conversations SET began_at = ?, wording = ? WHERE job_id = ? AND id = ?",
        (encode_clock(record.words.began_at), digest, record.job_id, record.conversation_id),
    )


def _start_job(connection: Connection, job_id: JobId, at: datetime, events: Events) -> None:
    changed = connection.execute(
        "UPDATE jobs SET state = ?, started_at = ? WHERE id = ? AND state = ?",
        (JobState.RUNNING.value, rfc3339(at), job_id, JobState.QUEUED.value),
    )
    if changed.rowcount:
        _tell(events, job_id, "job", {"state": JobState.RUNNING.value, "at": rfc3339(at)})


def _count_conversation(connection: Connection, job_id: JobId, at: datetime, events: Events) -> None:
    """Take one conversation of a job as ended; end the job with the last, whichever node it was on."""
    row = connection.execute(
        "UPDATE jobs SET unfinished = unfinished - 1 WHERE id = ? RETURNING unfinished, is_cancel_requested", (job_id,)
    ).fetchone()
    if row is None or row[0] > 0:
        return
    ways = connection.execute("SELECT DISTINCT state FROM conversations WHERE job_id = ?", (job_id,)).fetchall()
    ended = frozenset(ConversationState(way[0]) for way in ways)
    state = job_state_after(ended, was_cancelled=bool(row[1]))
    connection.execute("UPDATE jobs SET state = ?, finished_at = ? WHERE id = ?", (state.value, rfc3339(at), job_id))
    _tell(events, job_id, "end", {"state": state.value, "at": rfc3339(at)})
    deliveries.add(connection, job_id, at)


def _requeue_turn(connection: Connection, record: TurnRequeued, events: Events) -> None:
    connection.execute(
        "INSERT INTO unfinished_turns (job_id, conversation_id, agent, round, record) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (job_id, conversation_id, agent, round) DO UPDATE SET record = excluded.record",
        (*record.key, encode_turn(record.so_far)),
    )
    fields = {"worker": record.worker, "reason": record.reason, "detail": record.detail}
    _tell_turn(events, record.key, record.at, state="ready", **fields)


def _end_turn(connection: Connection, record: TurnEnded, events: Events) -> None:
    turn = record.turn
    # A caller may have spoken as the conversation was ended.
    may_be_there = turn.state is TurnState.CANCELLED and turn.by is SpokenBy.CALLER
    but = " ON CONFLICT DO NOTHING" if may_be_there or turn.kind is TurnKind.SUMMARY else ""
    inserted = connection.execute(
        "INSERT INTO turns (job_id, conversation_id, agent, round, kind, state, reason, record)"  # noqa: S608
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)" + but,
        (*turn.key, turn.kind.value, turn.state.value, turn.reason, encode_turn(turn)),
    )
    if but and not inserted.rowcount:
        return
    if turn.attempts and turn.kind is TurnKind.TURN:
        connection.execute(f"DELETE FROM unfinished_turns WHERE {PLACE}", tuple(turn.key))  # noqa: S608
    kind = {} if turn.kind is TurnKind.TURN else {"kind": turn.kind.value}
    _tell_turn(events, turn.key, record.at, state=turn.state.value, reason=turn.reason, worker=turn.worker, **kind)


def _tell_turn(events: Events, key: TurnKey, at: datetime, **fields: object) -> None:
    place = {"conversation": key.conversation_id, "agent": key.agent_id, "round": key.round}
    _tell(events, key.job_id, "turn", {**place, **fields, "at": rfc3339(at)})


def write_events(connection: Connection, events: Sequence[JobEvent]) -> None:
    """Add events to those of their jobs, in their order; numbers have no gaps, whichever node writes."""
    of_jobs: dict[JobId, list[JobEvent]] = {}
    for event in events:
        of_jobs.setdefault(event.job_id, []).append(event)
    for job_id, newest in of_jobs.items():
        row = connection.execute(
            "UPDATE jobs SET last_event = last_event + ? WHERE id = ? RETURNING last_event", (len(newest), job_id)
        ).fetchone()
        if row is not None:
            first = row[0] - len(newest) + 1
            rows = [(job_id, number, event.kind, event.data) for number, event in enumerate(newest, start=first)]
            connection.execute_many("INSERT INTO events (job_id, number, kind, data) VALUES (?, ?, ?, ?)", rows)


def to_json(document: Mapping[str, object]) -> str:
    """Return the JSON of a document."""
    return msgspec.json.encode(document).decode()

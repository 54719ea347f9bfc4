"""The events of jobs, which callers follow: numbered from 1 per job, without gaps."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from service.conversations.job.job import JobId, TurnKey
from service.conversations.job.states import ENDED_JOBS, JobState
from service.conversations.record.transcript import rfc3339
from service.errors import JobNotFound
from service.store.databases.database import Connection
from service.store.records import StoredEvent


class JobEvent(NamedTuple):
    """An event to be written after the facts of one write; ``data`` is JSON."""

    job_id: JobId
    kind: str
    data: str


Events = list[JobEvent]


def add_event(events: Events, job_id: JobId, kind: str, data: Mapping[str, object]) -> None:
    """Add an event of a job."""
    events.append(JobEvent(job_id, kind, to_json(data)))


def add_turn_event(events: Events, key: TurnKey, at: datetime, **fields: object) -> None:
    """Add an event of a turn."""
    place = {"conversation": key.conversation_id, "agent": key.agent_id, "round": key.round}
    add_event(events, key.job_id, "turn", {**place, **fields, "at": rfc3339(at)})


def write_first(connection: Connection, job_id: JobId, at: datetime) -> None:
    """Write the first event of a job; the job's row already counts it."""
    data = to_json({"state": JobState.QUEUED.value, "at": rfc3339(at)})
    connection.execute("INSERT INTO events (job_id, number, kind, data) VALUES (?, 1, 'job', ?)", (job_id, data))


def write(connection: Connection, events: Sequence[JobEvent]) -> None:
    """Write events after those of their jobs, in order, whichever node wrote those."""
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


def listed(connection: Connection, job_id: JobId, after: int, limit: int) -> tuple[list[StoredEvent], bool]:
    """List the events of a job with a number above ``after``, and whether none will follow them.

    Both come from one snapshot, so no event follows an end that was read. JobNotFound without the job.
    """
    row = connection.execute("SELECT state FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None:
        raise JobNotFound(job_id)
    rows = connection.execute(
        "SELECT number, kind, data FROM events WHERE job_id = ? AND number > ? ORDER BY number LIMIT ?",
        (job_id, after, limit),
    )
    found = [StoredEvent(number=row[0], kind=row[1], data=row[2]) for row in rows]
    return found, JobState(row[0]) in ENDED_JOBS and len(found) < limit


def to_json(document: Mapping[str, object]) -> str:
    """Return the JSON of a document."""
    return msgspec.json.encode(document).decode()

"""The webhook outbox: a message is written in the transaction that ends its job."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from secrets import token_hex

import msgspec

from service.conversations.job.job import JobId
from service.conversations.record.transcript import rfc3339
from service.store import job_rows
from service.store.databases.database import Connection, value_of


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One message to one URL; ``id`` is the same for each try, so receivers can detect repeats."""

    id: str
    job_id: JobId
    url: str
    secret: str | None
    body: str
    attempts: int
    created_at: datetime


def add(connection: Connection, job_id: JobId, at: datetime) -> None:
    """Write the message that a job has ended, if its caller asked for one."""
    asked = value_of(connection, "SELECT webhook FROM jobs WHERE id = ?", (job_id,))
    if asked is None:
        return
    webhook = msgspec.json.decode(asked)
    stored = job_rows.job(connection, job_id)
    tally = job_rows.tally(connection, job_id)
    body = {
        "type": "job.ended",
        "timestamp": rfc3339(at),
        "data": {
            "id": stored.id,
            "name": stored.name,
            "state": stored.state.value,
            "created_at": rfc3339(stored.created_at),
            "started_at": rfc3339(stored.started_at),
            "finished_at": rfc3339(stored.finished_at),
            "conversations": {state.value: count for state, count in tally.conversations.items()},
            "turns": {state.value: count for state, count in tally.turns.items()},
            "metadata": stored.metadata,
        },
    }
    connection.execute(
        "INSERT INTO deliveries (id, job_id, url, secret, body, next_at, state, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, 'waiting', ?)",
        (
            *(f"msg_{token_hex(12)}", job_id, webhook["url"], webhook.get("secret")),
            *(msgspec.json.encode(body).decode(), rfc3339(at), rfc3339(at)),
        ),
    )


def is_any_due(connection: Connection, now: datetime) -> bool:
    """Whether any message is due."""
    found = connection.execute(
        "SELECT 1 FROM deliveries WHERE state = 'waiting' AND next_at <= ? LIMIT 1", (rfc3339(now),)
    )
    return found.fetchone() is not None


def of_job(connection: Connection, job_id: JobId) -> list[dict[str, object]]:
    """List the messages of a job, without their bodies."""
    rows = connection.execute(
        "SELECT id, url, state, attempts, last_error, next_at, created_at FROM deliveries WHERE job_id = ?"
        " ORDER BY created_at",
        (job_id,),
    )
    names = ("id", "url", "state", "attempts", "last_error", "next_at", "created_at")
    return [dict(zip(names, row, strict=True)) for row in rows]


def take(connection: Connection, now: datetime, hold_s: float, limit: int) -> list[Delivery]:
    """Take the due messages for ``hold_s`` seconds; a message is due again if its taker is lost."""
    rows = connection.execute(
        "UPDATE deliveries SET next_at = ?, attempts = attempts + 1 WHERE id IN ("
        "SELECT id FROM deliveries WHERE state = 'waiting' AND next_at <= ? ORDER BY next_at LIMIT ?)"
        " AND state = 'waiting' AND next_at <= ?"
        " RETURNING id, job_id, url, secret, body, attempts, created_at",
        (rfc3339(now + timedelta(seconds=hold_s)), rfc3339(now), limit, rfc3339(now)),
    ).fetchall()
    return [
        Delivery(
            id=row[0],
            job_id=JobId(row[1]),
            url=row[2],
            secret=row[3],
            body=row[4],
            attempts=row[5],
            created_at=datetime.fromisoformat(row[6]),
        )
        for row in rows
    ]


def postpone(connection: Connection, delivery_ids: Sequence[str], until: datetime) -> None:
    """Put back messages that were taken but not tried."""
    for delivery_id in delivery_ids:
        connection.execute(
            "UPDATE deliveries SET next_at = ?, attempts = attempts - 1 WHERE id = ? AND state = 'waiting'",
            (rfc3339(until), delivery_id),
        )


def settle(connection: Connection, delivery_id: str, state: str, next_at: datetime, error: str | None) -> None:
    """Record the outcome of a try: ``delivered``, ``given_up``, or ``waiting`` until ``next_at``."""
    connection.execute(
        "UPDATE deliveries SET state = ?, next_at = ?, last_error = ? WHERE id = ? AND state = 'waiting'",
        (state, rfc3339(next_at), error, delivery_id),
    )

"""Deletes expired data: ended jobs, old events, delivered messages, usage, dead nodes."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio

from service.config.schema import StoreConfig
from service.conversations.job.job import JobId
from service.conversations.record.transcript import rfc3339
from service.errors import StoreUnavailable
from service.store import heirs, session_rows, usage
from service.store.databases.database import Connection
from service.store.store import Store

INTERVAL_S: Final = 60.0
JOBS_A_WRITE: Final = 100  # so that other writes do not wait long,
TURNS_A_WRITE: Final = 10_000  # with at most this many turns, or one larger job
logger = logging.getLogger(__name__)


async def release_always(store: Store, in_force: Callable[[], StoreConfig]) -> None:
    """Delete what is due by the present configuration, until cancelled."""
    while True:
        config = in_force()
        pause_s = INTERVAL_S if config.keep_jobs_s is None else max(1.0, min(INTERVAL_S, config.keep_jobs_s / 2))
        try:
            await release(store, config, datetime.now(UTC))
        except StoreUnavailable as error:
            logger.debug("nothing is released: %s", error)
        await anyio.sleep(pause_s)


async def release(store: Store, config: StoreConfig, now: datetime) -> int:
    """Delete what is due; return the number of deleted jobs."""
    count = 0
    if config.keep_jobs_s is not None:
        before = rfc3339(now - timedelta(seconds=config.keep_jobs_s))
        while await store.read(lambda connection: _is_any_older(connection, before)):
            count += await store.write(lambda connection: _release_jobs(connection, before))
    for job_id, last in await store.read(lambda connection: _with_old_events(connection, config.keep_events)):
        await store.write(partial(_release_events, job_id=job_id, last=last))
    settled_before = rfc3339(now - timedelta(seconds=config.keep_keys_s))
    if await store.read(lambda connection: _has_rest(connection, settled_before)):
        await store.write(lambda connection: _release_rest(connection, settled_before))
    if config.keep_usage_days is not None:
        day = (now - timedelta(days=config.keep_usage_days)).date().isoformat()
        if await store.read(lambda connection: usage.has_older(connection, day)):
            await store.write(lambda connection: usage.release(connection, day))
    while await store.read(session_rows.has_expired):
        await store.write(session_rows.delete_expired)
    if count:
        logger.info("released %d jobs that ended more than %g s ago", count, config.keep_jobs_s)
    return count


def _is_any_older(connection: Connection, before: str | None) -> bool:
    row = connection.execute("SELECT 1 FROM jobs WHERE unfinished = 0 AND finished_at < ? LIMIT 1", (before,))
    return row.fetchone() is not None


def _release_jobs(connection: Connection, before: str | None) -> int:
    rows = connection.execute(
        "SELECT id FROM jobs WHERE id IN (SELECT id FROM ("
        " SELECT id, sum(total_turns) OVER (ORDER BY finished_at, id) AS turns,"
        " row_number() OVER (ORDER BY finished_at, id) AS place FROM ("
        " SELECT id, total_turns, finished_at FROM jobs WHERE unfinished = 0 AND finished_at < ?"
        " ORDER BY finished_at, id LIMIT ?) AS oldest) AS due WHERE place = 1 OR turns <= ?)",
        (before, JOBS_A_WRITE, TURNS_A_WRITE),
    ).fetchall()
    due = [JobId(row[0]) for row in rows]
    sources = heirs.sources_of(connection, due)
    heirs.lock(connection, due, sources)
    for job_id in due:
        heirs.keep_for_all(connection, job_id)
        connection.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
    heirs.drop_unused(connection, sources)
    return len(due)


def _with_old_events(connection: Connection, keep: int) -> list[tuple[str, int]]:
    """Return the jobs with too many events, and the last event of each to delete."""
    rows = connection.execute("SELECT id, last_event FROM jobs WHERE last_event > ?", (keep,)).fetchall()
    oldest = "SELECT min(number) FROM events WHERE job_id = ?"
    found = [(row[0], row[1] - keep, connection.execute(oldest, (row[0],)).fetchone()) for row in rows]
    return [(job_id, last) for job_id, last, first in found if first is not None and first[0] <= last]


def _release_events(connection: Connection, job_id: str, last: int) -> None:
    connection.execute("DELETE FROM events WHERE job_id = ? AND number <= ?", (job_id, last))


def _has_rest(connection: Connection, before: str | None) -> bool:
    sent = connection.execute("SELECT 1 FROM deliveries WHERE state <> 'waiting' AND created_at < ? LIMIT 1", (before,))
    dead = connection.execute("SELECT 1 FROM nodes WHERE is_live = 0 AND started_at < ? LIMIT 1", (before,))
    return sent.fetchone() is not None or dead.fetchone() is not None


def _release_rest(connection: Connection, before: str | None) -> None:
    connection.execute("DELETE FROM deliveries WHERE state <> 'waiting' AND created_at < ?", (before,))
    connection.execute("DELETE FROM nodes WHERE is_live = 0 AND started_at < ?", (before,))

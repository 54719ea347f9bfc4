"""Puts a job's timeline together: its stored turns, its running ones, and the states and incidents of workers."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.to_thread
from msgspec.structs import replace

from service.conversations.job.job import JobId
from service.conversations.record.transcript import rfc3339
from service.scheduling.scheduler import Scheduler
from service.store import job_rows, turn_rows
from service.store.databases.database import Connection
from service.store.records import StoredJob
from service.store.store import Store
from service.store.turn_rows import After, Page
from service.timeline.rows import lay_rows
from service.timeline.spans import GatheredSpans, Span, TurnTimes, seconds, times_of
from service.timeline.timeline import Breakdown, StateChange, Timeline, WorkerRows, pieces, with_attempts
from workers.fleet import Fleet
from workers.supervised import SupervisedWorker

RELEASED_AT_ONCE: Final = 4096
AT_ONCE: Final = 2  # timelines made at a time: one of 100,000 attempts takes some 100 MB
PageOf = Callable[[Connection, JobId, After], Page]


class Timelines:
    """Makes the timelines of jobs in threads, a few at a time."""

    def __init__(self, store: Store, scheduler: Scheduler, fleet: Fleet) -> None:
        self._store = store
        self._scheduler = scheduler
        self._fleet = fleet
        self._room = anyio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<Timelines room={self._room.value}>"

    async def of_job(self, job_id: JobId) -> list[bytes]:
        """Return the JSON of a job's timeline so far, in pieces.

        Raises:
            JobNotFound: there is no such job.
        """
        job = await self._store.read(job_rows.job, job_id)
        async with self._room:
            # Before the store: a turn that ends in between is in both, and the stored one counts.
            running = self._scheduler.turns.of_job(job_id)
            waiting, now = self._scheduler.turns.waiting_since(job_id), datetime.now(UTC)
            gathered = GatheredSpans(job.created_at, map(times_of, running))
            await self._read(turn_rows.unfinished_page, job_id, gathered.add_unfinished)
            await self._read(turn_rows.ended_page, job_id, gathered.add_ended)
            timeline = self._without_attempts(job, job.finished_at or now)
            timeline = replace(timeline, waiting=sorted(seconds(since, job.created_at) for since in waiting))
            return await anyio.to_thread.run_sync(_written, timeline, gathered)

    async def _read(self, page: PageOf, job_id: JobId, add: Callable[[list[TurnTimes]], None]) -> None:
        """Add stored turns page by page, in the reading threads."""
        after: After | None = After()
        while after is not None:

            def take(connection: Connection, after: After) -> After | None:
                turns, following = page(connection, job_id, after)
                add(turns)
                return following

            after = await self._store.read(take, after)

    def _without_attempts(self, job: StoredJob, until: datetime) -> Timeline:
        """Return a timeline of this node's workers during the job, without attempts."""
        origin, workers = job.created_at, list(self._fleet)
        changes = [change for worker in workers for change in _changes(worker, origin, until)]
        incidents = [incident for worker in workers for incident in _incidents(worker, origin, until)]
        return Timeline(
            id=job.id,
            name=job.name,
            state=job.state,
            origin=rfc3339(origin) or "",
            until_s=seconds(until, origin),
            workers=[
                WorkerRows(id=each.spec.id, rows=0, model=each.spec.name, slots=each.spec.slots) for each in workers
            ],
            states=sorted(changes, key=lambda change: change.at_s),
            incidents=sorted(incidents, key=lambda incident: incident.at_s),
            attempts=(),
        )


def _written(timeline: Timeline, gathered: GatheredSpans) -> list[bytes]:
    """Return the JSON of a timeline with these attempts, and free them."""
    spans = gathered.drain()
    laid, rows = lay_rows(spans)
    _release(spans)
    made = list(pieces(with_attempts(timeline, laid, rows)))
    _release(laid)
    return made


def _release(spans: list[Span]) -> None:
    """Free spans some at a time: all at once would block every other thread."""
    while spans:
        del spans[-RELEASED_AT_ONCE:]


def _changes(worker: SupervisedWorker, origin: datetime, until: datetime) -> list[StateChange]:
    """Return the states of a worker, beginning with its state when the job came."""
    moves = [move for move in worker.moves if move.at_utc <= until]
    before = [move for move in moves if move.at_utc <= origin]
    return [
        StateChange(
            worker=worker.spec.id,
            at_s=seconds(move.at_utc, origin),
            state=move.state,
            incarnation=move.incarnation,
            because=move.because,
        )
        for move in moves[max(0, len(before) - 1) :]
    ]


def _incidents(worker: SupervisedWorker, origin: datetime, until: datetime) -> list[Breakdown]:
    return [
        Breakdown(
            worker=worker.spec.id,
            at_s=seconds(incident.at, origin),
            incarnation=incident.incarnation,
            reason=incident.reason,
            because=incident.because,
            exit=None if incident.exit is None else str(incident.exit),
        )
        for incident in worker.recorder.incidents
        if origin <= incident.at <= until
    ]

"""Puts a job's timeline together: what is stored of its turns, what runs, and what befell the workers meanwhile."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.to_thread

from service.conversations.job import JobId
from service.conversations.transcript import rfc3339
from service.scheduling.scheduler import Scheduler
from service.store import queries
from service.store.queries import Query
from service.store.records import StoredJob
from service.store.store import Store
from service.store.turn_times import After, ended_turns, unfinished_turns_of_job
from service.timeline.rows import lay_rows
from service.timeline.spans import Span, TurnTimes, seconds, spans_of_all, times_of
from service.timeline.timeline import Breakdown, StateChange, Timeline, WorkerRows
from workers.fleet import Fleet
from workers.supervised import SupervisedWorker

AT_ONCE: Final = 2  # timelines that are put together at a time: one of 100,000 attempts takes some 100 MB
Page = Callable[[JobId, After], Query[tuple[list[TurnTimes], After | None]]]


class Timelines:
    """Makes the timelines of jobs, a few at a time; the event loop only waits for it."""

    def __init__(self, store: Store, scheduler: Scheduler, fleet: Fleet) -> None:
        self._store = store
        self._scheduler = scheduler
        self._fleet = fleet
        self._room = anyio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<Timelines room={self._room.value}>"

    async def of_job(self, job_id: JobId) -> Timeline:
        """Return a job's timeline as it is so far.

        Raises:
            JobNotFound: there is no such job.
        """
        job = await self._store.read(queries.job(job_id))
        async with self._room:
            # Before the store: a turn that ends in between is then there twice, and the stored one stands.
            running = self._scheduler.turns.of_job(job_id)
            now = datetime.now(UTC)
            ended = await self._read(ended_turns, job_id)
            waiting = await self._read(unfinished_turns_of_job, job_id)

            def lay() -> tuple[list[Span], dict[str, int]]:
                return lay_rows(spans_of_all([*ended, *map(times_of, running), *waiting], job.created_at))

            spans, rows = await anyio.to_thread.run_sync(lay)
        return self._timeline(job, spans, rows, job.finished_at or now)

    async def _read(self, page: Page, job_id: JobId) -> list[TurnTimes]:
        turns: list[TurnTimes] = []
        after: After | None = After()
        while after is not None:
            some, after = await self._store.read(page(job_id, after))
            turns += some
        return turns

    def _timeline(self, job: StoredJob, spans: Sequence[Span], rows: dict[str, int], until: datetime) -> Timeline:
        origin = job.created_at
        workers = [worker for worker in self._fleet if worker.spec.id in rows]
        known: dict[str, SupervisedWorker] = {worker.spec.id: worker for worker in workers}
        changes = [change for worker in workers for change in _changes(worker, origin, until)]
        incidents = [incident for worker in workers for incident in _incidents(worker, origin, until)]
        return Timeline(
            id=job.id,
            name=job.name,
            state=job.state,
            origin=rfc3339(origin) or "",
            until_s=seconds(until, origin),
            workers=[_worker(name, count, known.get(name)) for name, count in rows.items()],
            states=sorted(changes, key=lambda change: change.at_s),
            incidents=sorted(incidents, key=lambda incident: incident.at_s),
            attempts=spans,
        )


def _worker(name: str, rows: int, worker: SupervisedWorker | None) -> WorkerRows:
    if worker is None:  # of another node, or of an earlier configuration
        return WorkerRows(id=name, rows=rows)
    return WorkerRows(id=name, rows=rows, model=worker.spec.name, slots=worker.spec.slots)


def _changes(worker: SupervisedWorker, origin: datetime, until: datetime) -> list[StateChange]:
    """Return the states of a worker from the one that it was in when the job came."""
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
        for incident in worker.incidents
        if origin <= incident.at <= until
    ]

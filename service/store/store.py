"""Everything that must outlive the process, on any database."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import anyio
import anyio.to_thread
from msgspec.structs import replace

from service.conversations.job import JobId, TurnKey
from service.conversations.transcript import Turn
from service.errors import StoreError, StoreUnavailable
from service.store import awaited_turns, operations
from service.store.awaited_turns import Due, SpokenTurn
from service.store.claims import Applied, Claims, Place
from service.store.databases.database import Claim, Connection, Database
from service.store.news import ClaimsLost, FactsLost, JobsCommitted, Tell, WriterEvent, WritesFailed
from service.store.records import NewJob, Record, RequestUsed, StoredJob
from service.store.writer import Write, Writer

T = TypeVar("T")
NONE_AWAITED: Final[Mapping[Place, Collection[TurnKey]]] = {}
Query = Callable[[Connection], T]


class Store:
    """Open it with ``open_store``; all of it is called from the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tell: Tell = lambda _event: None
        self._loop = asyncio.get_running_loop()
        self._membership = database.membership()
        self._claims = Claims(self._membership)
        self._writer = Writer(database, self._membership, self._claims.begin_group, self._hear)
        self._failed = anyio.Event()
        self._failure: StoreError | None = None
        self._readers: list[Connection] = []
        self._reader_limit = anyio.CapacityLimiter(database.readers)

    def __repr__(self) -> str:
        return f"<Store {self._database!r} {self._writer!r}>"

    def subscribe(self, tell: Tell) -> None:
        """Tell what happens from now on, in the event loop and in no task."""
        self._tell = tell

    @property
    def node_id(self) -> str:
        """This node among those that share the database."""
        return self._membership.node_id

    @property
    def trouble(self) -> str | None:
        """The trouble of the database, in plain words; None while it is well."""
        return self._writer.trouble

    async def wait_failed(self) -> None:
        """Wait for ever, unless a write fails that no waiting will mend.

        Raises:
            StoreError: it has; what was not acknowledged may be lost, and going on would hide it.
        """
        await self._failed.wait()
        assert self._failure is not None  # noqa: S101 - set before the event
        raise self._failure

    # Writing

    async def post(self, job: NewJob, *, claims: bool) -> tuple[StoredJob, list[Claim], bool]:
        """Store a new job, and claim its conversations if told to; return both and whether it is new.

        The same key and body give the job that is there.

        Raises:
            IdempotencyConflict: the key is another body's.
            StoreUnavailable: the database is in trouble; it is not known to be stored.
        """
        sources = {each.heritage.source[0] for each in job.job.conversations if each.heritage is not None}
        return await self._write(
            frozenset({job.job.id, *sources}),
            lambda connection: self._claims.post(connection, job, claims=claims),
            lambda posted: self._claims.keep(posted[1]),
            key=job.idempotency_key,
        )

    async def claim(self, models: Sequence[str], limit: int | None, job_id: JobId | None = None) -> list[Claim]:
        """Claim conversations that need one of ``models`` next and that no node runs, at most ``limit``.

        With ``job_id`` only those of that job.

        Those that this node has claimed without learning of it come as well.

        Raises:
            StoreUnavailable: another node has taken over meanwhile.
        """
        return await self._write(
            frozenset(),
            lambda connection: self._claims.claim(connection, models, limit, job_id),
            self._claims.keep_told,
            is_kept=True,
        )

    def release_nowait(
        self, wants: Mapping[Place, Sequence[str]], awaited: Mapping[Place, Collection[TurnKey]] = NONE_AWAITED
    ) -> None:
        """Leave conversations to whichever node has workers for one of the models that each needs next.

        Those that only ``awaited`` turns can move are left to none, until a caller has spoken.
        """
        jobs = frozenset(job_id for job_id, _ in wants)
        write = Write(
            operation=lambda connection: self._claims.release(connection, wants, awaited), jobs=jobs, is_kept=True
        )
        self._submit(write, lambda _: self._claims.drop(wants))

    def forget_said_nowait(self, keys: Collection[TurnKey]) -> None:
        """Forget words of callers whose conversations go on here; the turns are stored."""
        write = Write(
            operation=lambda connection: awaited_turns.forget_said(connection, keys), jobs=frozenset(), is_kept=True
        )
        self._submit(write, lambda _: None)

    def forget_claims_nowait(self, places: Collection[Place]) -> None:
        """Take back what a claim has told: the next one tells it again."""
        write = Write(operation=lambda _connection: self._claims.unlearn(places), jobs=frozenset(), is_kept=True)
        self._submit(write, lambda _: self._claims.drop(places))

    async def forget_all_claims(self) -> None:
        """Take back all that claims have told."""
        await self._write(
            frozenset(), lambda _connection: self._claims.unlearn(), lambda _: self._claims.forget_all(), is_kept=True
        )

    async def leave_claims(self) -> None:
        """Leave everything that is claimed to other nodes, now and not when the lease ends.

        Raises:
            StoreUnavailable: they have taken over already.
        """
        await self._write(frozenset(), self._membership.leave, lambda _: self._claims.forget_all(), is_kept=True)

    async def request_cancel(self, job_id: JobId) -> StoredJob:
        """Request a job's cancellation durably; return the job.

        Raises:
            JobNotFound: there is none.
            StoreUnavailable: the database is in trouble.
        """
        return await self._write(
            frozenset({job_id}), lambda connection: operations.request_cancel(connection, self._membership, job_id)
        )

    async def delete(self, job_id: JobId, *, with_heirs: bool = False) -> Sequence[JobId]:
        """Release all that is stored of a job that has ended; ``with_heirs`` the jobs that have inherited of it too.

        Return the jobs that are to be cancelled: they have inherited of it, and are another key's.

        Raises:
            JobNotFound: there is none.
            NotEnded: it has not ended, or one of the heirs.
            StoreUnavailable: the database is in trouble.
        """
        return await self._write(
            frozenset({job_id}),
            lambda connection: operations.delete(connection, self._membership, job_id, with_heirs=with_heirs),
        )

    async def say(self, turn: Turn) -> SpokenTurn | None:
        """Store the words of an awaited turn, or that nobody has said any; return what is stored of its place.

        None if it is not awaited.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        return await self._write(
            frozenset({turn.key.job_id}), lambda connection: awaited_turns.say(connection, self._membership, turn)
        )

    async def take_due(self) -> Due:
        """Return awaited turns whose wait is over, some at a time, and when to look again.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        return await self._write(frozenset(), lambda connection: awaited_turns.take_due(connection, self._membership))

    async def write(self, operation: Query[T]) -> T:
        """Run an operation of ``service.store`` whose caller waits.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        return await self._write(frozenset(), operation)

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Hand in facts that belong together: durable soon, in the order of the calls, or the store fails.

        What is of no job are accounts of requests: they wait a moment for others.

        ``on_durable`` is called in the event loop when they are; never, when the store fails, or when they are of a
        conversation that another node has taken over: those are refused, and the log says so.
        """
        write = self._facts(records)
        self._submit(replace(write, may_wait=not write.jobs), self._take_over, on_success=on_durable)

    async def append(self, records: Sequence[Record]) -> bool:
        """Hand in facts as ``append_nowait`` does, and return when they are durable; False if any was refused."""
        write, done = self._facts(records), anyio.Event()
        self._submit(write, self._take_over, on_success=done.set, on_failure=done.set)
        await done.wait()
        try:
            applied: Applied = write.future.result()
        except StoreUnavailable:  # it is tried again for as long as it is ours: so it is ours no more
            return False
        return not (applied.refused or applied.spoiled)

    async def flush(self) -> None:
        """Return when all that was handed in before is durable, or the store has given up."""
        await self._write(frozenset(), lambda _connection: None, is_kept=True)

    # Reading

    async def read(self, query: Query[T]) -> T:
        """Run one of the queries of ``service.store.queries`` beside the event loop.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._reader_limit)

    # Inside

    def start(self) -> None:
        """Start the writer."""
        self._writer.start()

    def close(self) -> None:
        """Write what was handed in and close all connections."""
        self._writer.close()
        while self._readers:
            self._readers.pop().close()

    def _facts(self, records: Sequence[Record]) -> Write:
        jobs = frozenset(operations.place_of(record)[0] for record in records if not isinstance(record, RequestUsed))

        def is_passing(error: Exception) -> bool:
            return self._database.trouble_of(error) is not None or self._database.is_conflict(error)

        return Write(
            operation=lambda connection: self._claims.apply(connection, records),
            careful=lambda connection: self._claims.apply_carefully(connection, records, is_passing),
            jobs=jobs,
            is_kept=True,
            size=len(records),
        )

    def _take_over(self, applied: Applied) -> None:
        """Take over a committed group's results; in the writer's thread."""
        self._claims.take_over(applied)
        if applied.lost:
            self._hear(FactsLost(count=applied.lost, conversations=tuple(applied.spoiled)))

    async def _write(
        self,
        jobs: frozenset[JobId],
        operation: Query[T],
        on_committed: Callable[[T], None] = lambda _: None,
        *,
        is_kept: bool = False,
        key: str | None = None,
    ) -> T:
        done = anyio.Event()
        write = Write(operation=operation, jobs=jobs, is_kept=is_kept, key=key)
        self._submit(write, on_committed, on_success=done.set, on_failure=done.set)
        await done.wait()
        result: T = write.future.result()
        return result

    def _submit(
        self,
        write: Write,
        on_committed: Callable[[T], None],
        *,
        on_success: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand in a write; ``on_committed`` is called in the writer's thread, the others in the event loop."""

        def take_over(future: "Future[T]") -> None:
            if future.exception() is None:
                on_committed(future.result())
            else:  # it may be stored all the same, and what it has claimed is ours
                self._claims.doubt()
            # The writer never waits for the loop: the loop may be waiting for the writer, to close.
            self._loop.call_soon_threadsafe(tell, future.exception() is None)

        # Neither keeps the write, whose future keeps both: a circle would keep megabytes until the collector comes.
        jobs, handed_in = write.jobs, time.monotonic()

        def tell(is_done: bool) -> None:
            if is_done:
                on_success()
                if jobs:
                    self._tell(JobsCommitted(job_ids=jobs, seconds=time.monotonic() - handed_in))
            else:
                on_failure()

        self._writer.submit(write, take_over)

    def _hear(self, event: WriterEvent) -> None:
        """Take the writer thread's news, and tell it in the event loop."""
        match event:
            case ClaimsLost():
                self._claims.forget_all()
            case WritesFailed():
                self._failure = event.error
                self._loop.call_soon_threadsafe(self._failed.set)
            case _:
                pass
        self._loop.call_soon_threadsafe(lambda: self._tell(event))

    def _read(self, query: Query[T]) -> T:
        try:
            for connection in iter(self._spare_reader, None):
                with suppress(_Stale):  # it broke while it lay idle; the next is another, or new
                    return self._read_with(connection, query, is_new=False)
            return self._read_with(self._database.connect_reader(), query, is_new=True)
        except Exception as error:
            trouble = self._database.trouble_of(error)
            if trouble is None:
                raise
            raise StoreUnavailable(trouble) from error

    def _spare_reader(self) -> Connection | None:
        try:
            return self._readers.pop()  # several threads may ask at once
        except IndexError:
            return None

    def _read_with(self, connection: Connection, query: Query[T], *, is_new: bool) -> T:
        """Run a query in one transaction, so that what it returns is of one moment."""
        try:
            connection.begin()
            try:
                return query(connection)
            finally:
                connection.rollback()
                self._readers.append(connection)
        except Exception as error:
            if self._database.trouble_of(error) is None:
                raise
            with suppress(Exception):
                connection.close()
            if connection in self._readers:
                self._readers.remove(connection)
            if is_new:
                raise
            raise _Stale from error


class _Stale(Exception):
    """A reader's connection that was left over from better times."""


@contextmanager
def open_store(database: Database) -> Iterator[Store]:
    """Run the store of a database that is prepared, for a block; it belongs to the event loop that runs."""
    store = Store(database)
    store.start()
    try:
        yield store
    finally:
        store.close()

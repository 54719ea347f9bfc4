"""The event loop's side of the store's threads: writes that wait for the writer, and reads in threads."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from msgspec.structs import replace

from service.conversations.job.job import JobId
from service.errors import ServiceError, StoreError, StoreUnavailable
from service.store.claims import Claims
from service.store.databases.database import Connection, Database, Query
from service.store.news import ClaimsLost, JobsCommitted, Tell, WriterEvent, WritesFailed

T = TypeVar("T")
Operation = Callable[[Connection], Any]
Answer = tuple["Write", Any]  # a write with its operation's result, or the ServiceError that it raised


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """An operation and its result; a write with ``is_kept`` is retried until the database takes it.

    ``careful`` replaces an operation that cannot be written: it costs more, and loses as little as possible. A write
    with ``may_wait`` is committed with others that come within ``writer.LINGER_S``.
    """

    operation: Operation
    jobs: frozenset[JobId]  # jobs that it changes
    is_kept: bool
    is_claim: bool = False  # it writes only by the membership's ``claim``
    may_wait: bool = False
    size: int = 1  # number of facts
    key: str | None = None  # idempotency key of a post
    careful: Operation | None = None
    future: "Future[Any]" = msgspec.field(default_factory=Future)


class Spoiled(Exception):
    """One operation cannot be written, and its transaction fails with it."""

    def __init__(self, write: Write, error: Exception) -> None:
        super().__init__(str(error))
        self.write = write
        self.error = error


def answer(answers: Sequence[Answer]) -> None:
    """Complete the futures of a committed group."""
    for write, result in answers:
        if write.future.done():
            continue  # refused when the database broke during its commit
        if isinstance(result, ServiceError):
            write.future.set_exception(result)
        else:
            write.future.set_result(result)


def refuse(group: Sequence[Write], error: StoreUnavailable, *, kept: bool) -> list[Write]:
    """Refuse those writes of a group whose ``is_kept`` equals ``kept``; return the rest."""
    for write in group:
        if write.is_kept is kept:
            write.future.set_exception(error)
    return [write for write in group if write.is_kept is not kept]


def without(group: Sequence[Write], spoiled: Spoiled) -> list[Write]:
    """Return a group with the careful form of a write that cannot be stored, or without the write if it has none."""
    write, place = spoiled.write, next(place for place, each in enumerate(group) if each is spoiled.write)
    if write.careful is not None:
        return [*group[:place], replace(write, operation=write.careful, careful=None), *group[place + 1 :]]
    write.future.set_exception(StoreError(f"cannot write: {spoiled.error}"))
    return [*group[:place], *group[place + 1 :]]


class PendingWrites:
    """Writes between the event loop and the writer's thread; called in the loop, except where stated.

    ``hand_in`` gives a write to the writer, with a callback for its future.
    """

    def __init__(self, claims: Claims, hand_in: "Callable[[Write, Callable[[Future[Any]], None]], None]") -> None:
        self.tell: Tell = lambda _event: None
        self._loop = asyncio.get_running_loop()
        self._claims = claims
        self._hand_in = hand_in
        self._failed = anyio.Event()
        self._failure: StoreError | None = None

    def __repr__(self) -> str:
        return f"<PendingWrites failure={self._failure}>"

    async def wait_failed(self) -> None:
        """Wait until a write fails for good, usually forever.

        Raises:
            StoreError: a write has failed. Unacknowledged writes may be lost, and going on would hide it.
        """
        await self._failed.wait()
        assert self._failure is not None  # noqa: S101 - set before the event
        raise self._failure

    async def write(
        self,
        jobs: frozenset[JobId],
        operation: Query[T],
        on_committed: Callable[[T], None] = lambda _: None,
        *,
        is_kept: bool = False,
        is_claim: bool = False,
        key: str | None = None,
    ) -> T:
        """Submit an operation, and return its result once it is committed; ``on_committed`` as in ``submit``.

        Raises:
            StoreUnavailable: the database is in trouble.
        """
        done = anyio.Event()
        write = Write(operation=operation, jobs=jobs, is_kept=is_kept, is_claim=is_claim, key=key)
        self.submit(write, on_committed, on_success=done.set, on_failure=done.set)
        await done.wait()
        result: T = write.future.result()
        return result

    def submit(
        self,
        write: Write,
        on_committed: Callable[[T], None],
        *,
        on_success: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Submit a write; ``on_committed`` is called in the writer's thread, the others in the event loop."""

        def take_over(future: "Future[T]") -> None:
            if future.exception() is None:
                on_committed(future.result())
            else:  # the write may be stored, with claims that this node does not know
                self._claims.doubt()
            # The writer never waits for the loop: the loop may wait for the writer to close.
            self._loop.call_soon_threadsafe(tell, future.exception() is None)

        # Neither callback refers to the write, whose future refers to both: such a cycle would keep megabytes until
        # garbage collection.
        jobs, handed_in = write.jobs, time.monotonic()

        def tell(is_done: bool) -> None:
            if is_done:
                on_success()
                if jobs:
                    self.tell(JobsCommitted(job_ids=jobs, seconds=time.monotonic() - handed_in))
            else:
                on_failure()

        self._hand_in(write, take_over)

    def hear(self, event: WriterEvent) -> None:
        """Handle an event in the writer's thread, and report it in the event loop."""
        if isinstance(event, ClaimsLost):
            self._claims.forget_all()
        elif isinstance(event, WritesFailed):
            self._failure = event.error
            self._loop.call_soon_threadsafe(self._failed.set)
        self._loop.call_soon_threadsafe(lambda: self.tell(event))


class Readers:
    """The connections for reading."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._spare: list[Connection] = []
        self._limit = anyio.CapacityLimiter(database.readers)

    def __repr__(self) -> str:
        return f"<Readers spare={len(self._spare)}>"

    async def run(self, query: Query[T]) -> T:
        """Run a query in a thread; StoreUnavailable if the database is in trouble."""
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._limit)

    def close(self) -> None:
        """Close all connections."""
        while self._spare:
            self._spare.pop().close()

    def _read(self, query: Query[T]) -> T:
        try:
            for connection in iter(self._take_spare, None):
                with suppress(_Stale):  # it broke while idle; the next one is another, or new
                    return self._read_with(connection, query, is_new=False)
            return self._read_with(self._database.connect_reader(), query, is_new=True)
        except Exception as error:
            trouble = self._database.trouble_of(error)
            if trouble is None:
                raise
            raise StoreUnavailable(trouble) from error

    def _take_spare(self) -> Connection | None:
        try:
            return self._spare.pop()  # several threads may ask at once
        except IndexError:
            return None

    def _read_with(self, connection: Connection, query: Query[T], *, is_new: bool) -> T:
        """Run a query in one transaction, so that its result comes from one snapshot."""
        try:
            connection.begin()
            result = query(connection)
            connection.rollback()
        except ServiceError:  # a query has found out that something is not there
            connection.rollback()
            self._spare.append(connection)
            raise
        except Exception as error:
            # A query that fails between two rows holds its snapshot until its cursor is collected.
            with suppress(Exception):
                connection.close()
            if is_new or self._database.trouble_of(error) is None:
                raise
            raise _Stale from error
        self._spare.append(connection)
        return result


class _Stale(Exception):
    """A spare connection no longer works."""

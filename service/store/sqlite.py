"""The embedded store: one SQLite file, one writer thread, readers apart, owned by one process."""

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from service.conversations.job import JobId
from service.errors import StoreError
from service.store import writing
from service.store.records import NewJob, Record, StoredJob
from service.store.writer import Writer

FILE_NAME: Final = "roundhouse.db"
LOCK_NAME: Final = "roundhouse.lock"
READERS: Final = 4
T = TypeVar("T")


class SqliteStore:
    """Everything that must outlive the process. Open it with ``open_store``."""

    def __init__(self, path: Path, on_committed: Callable[[frozenset[JobId]], None]) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._on_committed = on_committed
        self._failed = anyio.Event()
        self._failure: StoreError | None = None
        self._writer = Writer(self._connect_writer, self._fail_from_thread)
        self._readers: list[sqlite3.Connection] = []
        self._reader_limit = anyio.CapacityLimiter(READERS)

    def __repr__(self) -> str:
        """State the file."""
        return f"<SqliteStore {self._path} {self._writer!r}>"

    async def wait_failed(self) -> None:
        """Wait for ever, unless a write fails.

        Raises:
            StoreError: a write failed; what was not acknowledged may be lost, and going on would hide it.
        """
        await self._failed.wait()
        assert self._failure is not None  # noqa: S101 - set before the event
        raise self._failure

    # Writing

    async def post(self, job: NewJob) -> tuple[StoredJob, bool]:
        """Store a new job; return it and whether it is new: the same key and body give the job that is there.

        Raises:
            IdempotencyConflict: the key is another body's.
        """
        return await self._write(frozenset({job.job.id}), lambda connection: writing.post(connection, job))

    async def request_cancel(self, job_id: JobId) -> StoredJob:
        """Note durably that a job is to be cancelled; return it.

        Raises:
            JobNotFound: there is none.
        """
        return await self._write(frozenset({job_id}), lambda connection: writing.request_cancel(connection, job_id))

    async def delete(self, job_id: JobId) -> None:
        """Release all that is stored of a job that has ended.

        Raises:
            JobNotFound: there is none.
            NotEnded: it has not ended.
        """
        await self._write(frozenset({job_id}), lambda connection: writing.delete(connection, job_id))

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Hand in facts that belong together: durable soon, in the order of the calls, or the store fails.

        ``on_durable`` is called in the event loop when they are; never, when the store fails.
        """
        jobs = frozenset(writing.job_of(record) for record in records)
        self._submit(jobs, lambda connection: writing.apply(connection, records), on_durable, lambda: None)

    async def flush(self) -> None:
        """Return when all that was handed in before is durable."""
        await self._write(frozenset(), lambda _connection: None)

    # Reading

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run one of the queries of ``service.store.reading`` beside the event loop."""
        return await anyio.to_thread.run_sync(self._read, query, limiter=self._reader_limit)

    # Inside

    def start(self) -> None:
        """Bring the file up to date and start the writer."""
        connection = self._connect_writer()
        try:
            _migrate(connection)
        finally:
            connection.close()
        self._writer.start()

    def close(self) -> None:
        """Write what was handed in and close the file."""
        self._writer.close()
        while self._readers:
            self._readers.pop().close()

    async def _write(self, jobs: frozenset[JobId], operation: Callable[[sqlite3.Connection], T]) -> T:
        done = anyio.Event()
        future = self._submit(jobs, operation, done.set, done.set)
        await done.wait()
        return future.result()

    def _submit(
        self,
        jobs: frozenset[JobId],
        operation: Callable[[sqlite3.Connection], T],
        on_success: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> "Future[T]":
        future = self._writer.submit(operation)

        def tell() -> None:
            if future.exception() is None:
                on_success()
                self._on_committed(jobs)
            else:
                on_failure()

        # The writer never waits for the loop: the loop may be waiting for the writer, to close.
        future.add_done_callback(lambda _future: self._loop.call_soon_threadsafe(tell))
        return future

    def _fail_from_thread(self, failure: StoreError) -> None:
        self._failure = failure
        self._loop.call_soon_threadsafe(self._failed.set)

    def _connect_writer(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",  # a 202 is a promise: NORMAL loses acknowledged commits when the power goes
            "foreign_keys=ON",
            "busy_timeout=5000",
            "wal_autocheckpoint=1000",
            "journal_size_limit=67108864",
            "temp_store=MEMORY",
        ):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._readers.pop() if self._readers else self._connect_reader()
        try:
            # One snapshot for all statements of a query, so that what it returns is of one moment.
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreError(f"cannot read: {error}") from error
        finally:
            self._readers.append(connection)

    def _connect_reader(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA query_only=ON")
        connection.execute("PRAGMA busy_timeout=5000")
        return connection


@contextmanager
def open_store(folder: Path, on_committed: Callable[[frozenset[JobId]], None]) -> Iterator[SqliteStore]:
    """Open the store of a state directory; ``on_committed`` is called in the event loop after each commit.

    Raises:
        StoreError: the folder cannot be used, another process has it, or the file is damaged or of a newer version.
    """
    with _owned(folder):
        store = SqliteStore(folder / FILE_NAME, on_committed)
        try:
            store.start()
        except sqlite3.Error as error:
            raise StoreError(f"{folder / FILE_NAME}: {error}") from error
        try:
            yield store
        finally:
            store.close()


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be used as state directory: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StoreError(
                f"{folder}: another Roundhouse (process {owner}) uses this state directory; "
                "stop it, or give this one another with --state-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _migrate(connection: sqlite3.Connection) -> None:
    scripts = sorted(
        (entry for entry in resources.files("service.store").joinpath("sql").iterdir() if entry.name.endswith(".sql")),
        key=lambda entry: entry.name,
    )
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(scripts):
        raise StoreError(
            f"the database is of version {version}, and this Roundhouse knows versions up to {len(scripts)}"
        )
    for number, script in enumerate(scripts[version:], start=version + 1):
        connection.executescript(f"BEGIN; {script.read_text()} PRAGMA user_version={number}; COMMIT;")

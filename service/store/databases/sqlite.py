"""The embedded database: one SQLite file, owned by one process; or one in memory."""

import fcntl
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

from typing_extensions import override

from service.errors import StateUnusable, StoreError
from service.store.databases.database import Connection, Cursor, Database
from service.store.databases.membership_exclusive import ExclusiveMembership
from service.store.databases.migrations import migrate, migrations_of, schema_fault

FILE_NAME: Final = "roundhouse.db"
LOCK_NAME: Final = "roundhouse.lock"
CHECKED_BYTES: Final = 1 << 30  # beyond that the check at the start would take minutes; it is then left to the operator
WRITER_PRAGMAS: Final = (
    "journal_mode=WAL",
    "synchronous=FULL",  # a 202 is a promise: NORMAL loses acknowledged commits when the power goes
    "foreign_keys=ON",
    "busy_timeout=5000",
    "wal_autocheckpoint=1000",
    "journal_size_limit=67108864",
    "temp_store=MEMORY",
)
READER_PRAGMAS: Final = ("query_only=ON", "busy_timeout=5000")
PASSING: Final = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk has an error",
    sqlite3.SQLITE_CANTOPEN: "its files cannot be opened",
    sqlite3.SQLITE_BUSY: "another process holds the file",
    sqlite3.SQLITE_READONLY: "its files cannot be written",
}
FULL_BYTES: Final = 64 * 1024  # less than a page of each of its files
NOWHERE = Path(":memory:")
logger = logging.getLogger(__name__)


class SqliteConnection(Connection):
    """A ``service.store.databases.database.Connection``."""

    def __init__(self, path: Path, pragmas: Sequence[str], begin: str) -> None:
        self._raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._begin = begin
        try:
            for pragma in pragmas:
                self._raw.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:  # no database at all, or a disk that is full
            self._raw.close()
            raise

    def __repr__(self) -> str:
        return f"<SqliteConnection in_transaction={self._raw.in_transaction}>"

    @override
    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        return cast("Cursor", self._raw.execute(sql, parameters))

    @override
    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        self._raw.executemany(sql, rows)

    def execute_script(self, sql: str) -> None:
        """Run several statements inside the transaction that is open; sqlite3's own would end it first."""
        statement = ""
        for line in sql.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                self._raw.execute(statement)
                statement = ""
        if statement.strip():  # the last one has no semicolon
            self._raw.execute(statement)

    def begin(self) -> None:
        """Begin a transaction."""
        self._raw.execute(self._begin)

    def commit(self) -> None:
        """Make it durable."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """Undo it, if it is still open: a full disk may have ended it already."""
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        """Close it."""
        self._raw.close()


class SqliteDatabase(Database):
    """A ``service.store.databases.database.Database``."""

    readers = 4

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<SqliteDatabase {self._path}>"

    @override
    def connect_writer(self) -> SqliteConnection:
        # IMMEDIATE: a transaction that begins with reading and goes on to write may be refused at once.
        return SqliteConnection(self._path, WRITER_PRAGMAS, "BEGIN IMMEDIATE")

    @override
    def connect_reader(self) -> SqliteConnection:
        return SqliteConnection(self._path, READER_PRAGMAS, "BEGIN")

    def membership(self) -> ExclusiveMembership:
        """Return the membership of the only one."""
        return ExclusiveMembership()

    def is_conflict(self, _error: Exception) -> bool:
        """Return False: no one else writes."""
        return False

    def trouble_of(self, error: Exception) -> str | None:
        """Say what ails the disk."""
        code = getattr(error, "sqlite_errorcode", None)
        trouble = PASSING.get(code & 0xFF) if isinstance(code, int) else None
        if trouble is not None and self._is_full():  # whatever could not grow tells of an error of its own
            trouble = PASSING[sqlite3.SQLITE_FULL]
        return None if trouble is None else f"{self._path.parent}: {trouble} ({error})"

    def prepare(self) -> None:
        """Check the file and bring it up to date; a copy of it is kept before its form is changed.

        Raises:
            StoreError: it is damaged, no database, of a newer version, or cannot be read or written.
        """
        try:
            connection = self.connect_writer()
            try:
                self._check(connection)
                migrations = migrations_of("sqlite")
                version = int(_first(connection, "PRAGMA user_version"))
                migrate(connection, migrations, connection.execute_script, legacy=version, before=self._back_up)
                if version < len(migrations):  # for a Roundhouse of the time before the table of migrations
                    connection.execute(f"PRAGMA user_version={len(migrations)}")
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreError(self.trouble_of(error) or f"{self._path}: {error}") from error

    def _is_full(self) -> bool:
        try:
            return shutil.disk_usage(self._path.parent).free < FULL_BYTES
        except OSError:
            return False

    def schema_fault(self) -> str | None:
        """Return the file's need of an upgrade, or None; a read alone finds it.

        Raises:
            StoreError: it cannot be.
        """
        if not self._path.exists():
            return None
        try:
            connection = self.connect_reader()
            try:
                return schema_fault(connection, migrations_of("sqlite"))
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    def _check(self, connection: SqliteConnection) -> None:
        if self._path.stat().st_size > CHECKED_BYTES:
            logger.info("%s: too large to be checked at the start; PRAGMA quick_check does it", self._path)
            return
        verdict = _first(connection, "PRAGMA quick_check(1)")
        if verdict != "ok":
            raise StoreError(f"{self._path} is damaged: {verdict}; restore a copy, or move it away and start afresh")

    def _back_up(self, step: str) -> None:
        copy = self._path.with_name(f"{self._path.name}.before-{step}")
        copy.unlink(missing_ok=True)  # of a migration that did not come to its end
        connection = self.connect_writer()
        try:
            connection.execute("VACUUM INTO ?", (str(copy),))
        finally:
            connection.close()
        logger.info("%s: kept a copy as %s before its form is changed", self._path, copy.name)


def _make_private(folder: Path) -> None:
    """Make a folder for us alone: every prompt is in it. One of another user, as a volume, stays as it is."""
    try:
        folder.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        found = folder.stat()
        if found.st_uid == os.geteuid() and found.st_gid in {os.getegid(), *os.getgroups()}:
            folder.chmod(0o700)
        elif found.st_mode & 0o077:
            logger.warning("%s: others may read what is kept there; its owner may change that", folder)


@contextmanager
def own_folder(folder: Path, lock_fd: int | None = None) -> Iterator[int]:
    """Own a state directory for a block: two Roundhouses in one would undo each other's work.

    Gives the descriptor that holds it; ``lock_fd`` is the one that an earlier program of this process has left.

    Raises:
        StoreError: it cannot be used, or another process has it.
    """
    try:
        _make_private(folder)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600) if lock_fd is None else lock_fd
    except OSError as error:
        raise StateUnusable(f"{folder}: cannot be used as state directory: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise StateUnusable(
                f"{folder}: another Roundhouse (process {owner}) uses this state directory; "
                "stop it, or give this one another with --state-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _first(connection: SqliteConnection, sql: str) -> str:
    row = connection.execute(sql).fetchone()
    return "" if row is None else str(row[0])


class _Shared(SqliteConnection):
    """A transaction has the connection until its end."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, ("foreign_keys=ON",), "BEGIN")
        self._turn = threading.Lock()

    def begin(self) -> None:
        """Begin a transaction, when it is our turn."""
        self._turn.acquire()
        super().begin()

    def commit(self) -> None:
        """End it; it is as durable as the process."""
        super().commit()
        self._turn.release()

    def rollback(self) -> None:
        """Undo it."""
        super().rollback()
        self._turn.release()

    def close(self) -> None:
        """Stay: the next connection is the same."""

    def let_go(self) -> None:
        """Lose everything."""
        super().close()


class MemoryDatabase:
    """A ``service.store.databases.database.Database``."""

    readers = 4

    def __init__(self) -> None:
        self._only = _Shared()

    def __repr__(self) -> str:
        return "<MemoryDatabase>"

    def connect_writer(self) -> SqliteConnection:
        """Return the connection."""
        return self._only

    def connect_reader(self) -> SqliteConnection:
        """Return the connection."""
        return self._only

    def membership(self) -> ExclusiveMembership:
        """Return the membership of the only one."""
        return ExclusiveMembership()

    def is_conflict(self, _error: Exception) -> bool:
        """Return False: no one else writes."""
        return False

    def trouble_of(self, error: Exception) -> str | None:
        """Say that memory is short; nothing else can be wrong with it."""
        code = getattr(error, "sqlite_errorcode", None)
        return "the memory is full" if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM) else None

    def prepare(self) -> None:
        """Make the tables."""
        migrate(self._only, migrations_of("sqlite"), self._only.execute_script)

    def close(self) -> None:
        """Lose everything: its time is over."""
        self._only.let_go()

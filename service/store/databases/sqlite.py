"""The embedded database: one SQLite file that one process owns, or a database in memory."""

import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, cast

from typing_extensions import override

from service.errors import StateUnusable, StoreError
from service.store.databases.database import Connection, Cursor, Database, value_of
from service.store.databases.membership_exclusive import ExclusiveMembership
from service.store.databases.migrations import WRITTEN_BEFORE_RELEASE, migrate, migrations_of, schema_fault

FILE_NAME: Final = "roundhouse.db"
CHECKED_BYTES: Final = 1 << 30  # larger files are not checked at the start: that would take minutes
WRITER_PRAGMAS: Final = (
    "journal_mode=WAL",
    "synchronous=FULL",  # a 202 is a promise: NORMAL loses acknowledged commits in a power failure
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
FULL_BYTES: Final = 64 * 1024  # free space that counts as none: less than a page for each of its files
NOWHERE = Path(":memory:")
logger = logging.getLogger(__name__)


class SqliteConnection(Connection):
    """A connection to SQLite (``service.store.databases.database.Connection``)."""

    def __init__(self, path: Path, pragmas: Sequence[str], begin: str) -> None:
        self._raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._begin = begin
        try:
            for pragma in pragmas:
                self._raw.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:  # not a database, or a full disk
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
        """Run several statements inside the open transaction; sqlite3's ``executescript`` would commit it first."""
        statement = ""
        for line in sql.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                self._raw.execute(statement)
                statement = ""
        if statement.strip():  # the last statement without a semicolon
            self._raw.execute(statement)

    def begin(self) -> None:
        """Begin a transaction."""
        self._raw.execute(self._begin)

    def commit(self) -> None:
        """Commit the transaction."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """Roll the transaction back, if it is still open: a full disk may have ended it."""
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()


class SqliteDatabase(Database):
    """A SQLite file (``service.store.databases.database.Database``)."""

    readers = 4

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<SqliteDatabase {self._path}>"

    @override
    def connect_writer(self) -> SqliteConnection:
        # IMMEDIATE: a transaction that reads first and then writes may be refused at once.
        return SqliteConnection(self._path, WRITER_PRAGMAS, "BEGIN IMMEDIATE")

    @override
    def connect_reader(self) -> SqliteConnection:
        return SqliteConnection(self._path, READER_PRAGMAS, "BEGIN")

    def membership(self) -> ExclusiveMembership:
        """Return the membership of a single node."""
        return ExclusiveMembership()

    def is_conflict(self, _error: Exception) -> bool:
        """Return False: there is no other writer."""
        return False

    def trouble_of(self, error: Exception) -> str | None:
        """Describe a fault of the disk."""
        code = getattr(error, "sqlite_errorcode", None)
        trouble = PASSING.get(code & 0xFF) if isinstance(code, int) else None
        if trouble is not None and self._is_full():  # failed writes report errors of their own
            trouble = PASSING[sqlite3.SQLITE_FULL]
        return None if trouble is None else f"{self._path.parent}: {trouble} ({error})"

    def prepare(self) -> None:
        """Check the file and migrate it; a copy is made before its schema changes.

        Raises:
            StateUnusable: the file was written before 1.0.0.
            StoreError: it is damaged, no database, of a newer version, or cannot be read or written.
        """
        try:
            if self._path.exists() and self._path.stat().st_size:
                with closing(self.connect_reader()) as connection:  # a writer would change the file's journal mode
                    if _is_before_release(connection):
                        raise StateUnusable(WRITTEN_BEFORE_RELEASE)
            with closing(self.connect_writer()) as connection:
                self._check(connection)
                migrate(connection, migrations_of("sqlite"), connection.execute_script, before=self._back_up)
        except sqlite3.Error as error:
            raise StoreError(self.trouble_of(error) or f"{self._path}: {error}") from error

    def _is_full(self) -> bool:
        try:
            return shutil.disk_usage(self._path.parent).free < FULL_BYTES
        except OSError:
            return False

    def schema_fault(self) -> str | None:
        """Return why this Roundhouse cannot take over the file as it is, or None; only reads.

        Raises:
            StoreError: it cannot be read, or has a newer version.
        """
        if not self._path.exists():
            return None
        try:
            with closing(self.connect_reader()) as connection:
                if _is_before_release(connection):
                    return WRITTEN_BEFORE_RELEASE
                return schema_fault(connection, migrations_of("sqlite"))
        except sqlite3.Error as error:
            raise StoreError(f"{self._path}: {error}") from error

    def _check(self, connection: SqliteConnection) -> None:
        if self._path.stat().st_size > CHECKED_BYTES:
            logger.info("%s: too large to be checked at the start; PRAGMA quick_check does it", self._path)
            return
        verdict = value_of(connection, "PRAGMA quick_check(1)")
        if verdict != "ok":
            raise StoreError(f"{self._path} is damaged: {verdict}; restore a copy, or move it away and start afresh")

    def _back_up(self, step: str) -> None:
        copy = self._path.with_name(f"{self._path.name}.before-{step}")
        copy.unlink(missing_ok=True)  # left by an unfinished migration
        with closing(self.connect_writer()) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        logger.info("%s: kept a copy as %s before its schema changes", self._path, copy.name)


def _is_before_release(connection: SqliteConnection) -> bool:
    """Whether the file was written before 1.0.0: only those versions numbered the schema in the file's header."""
    return bool(value_of(connection, "PRAGMA user_version") != 0)


class _Shared(SqliteConnection):
    """One connection for all users; a transaction has it until its end."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, ("foreign_keys=ON",), "BEGIN")
        self._turn = threading.Lock()

    def begin(self) -> None:
        """Begin a transaction, once the connection is free."""
        self._turn.acquire()
        super().begin()

    def commit(self) -> None:
        """End the transaction; it is as durable as the process."""
        super().commit()
        self._turn.release()

    def rollback(self) -> None:
        """Roll the transaction back."""
        super().rollback()
        self._turn.release()

    def close(self) -> None:
        """Do nothing: an in-memory database has one connection."""

    def let_go(self) -> None:
        """Close the connection; everything in it is lost."""
        super().close()


class MemoryDatabase(SqliteDatabase):
    """A database in memory, lost with the process; all users share one connection."""

    def __init__(self) -> None:
        super().__init__(NOWHERE)
        self._only = _Shared()

    def __repr__(self) -> str:
        return "<MemoryDatabase>"

    @override
    def connect_writer(self) -> SqliteConnection:
        return self._only

    @override
    def connect_reader(self) -> SqliteConnection:
        return self._only

    @override
    def trouble_of(self, error: Exception) -> str | None:
        code = getattr(error, "sqlite_errorcode", None)
        return "the memory is full" if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM) else None

    @override
    def prepare(self) -> None:
        migrate(self._only, migrations_of("sqlite"), self._only.execute_script)

    def close(self) -> None:
        """Drop the database."""
        self._only.let_go()

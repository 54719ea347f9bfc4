"""A database that is gone with its process, for trial runs: SQLite in memory, all on one connection, in turns."""

import sqlite3
import threading
from pathlib import Path

from service.store.databases.membership_exclusive import ExclusiveMembership
from service.store.databases.migrations import migrate, migrations_of
from service.store.databases.sqlite import SqliteConnection

NOWHERE = Path(":memory:")


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

"""The shared database: PostgreSQL, for any number of nodes (psycopg 3)."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from functools import lru_cache
from itertools import chain, islice
from typing import Final, Protocol, cast
from weakref import WeakSet

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from typing_extensions import override

from service.errors import StoreError
from service.store.databases.database import Connection, Cursor, Database
from service.store.databases.membership_shared import SharedMembership
from service.store.databases.migrations import migrate, migrations_of, schema_fault

LOOK_S: Final = 0.5
CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 30
SILENCE_S: Final = STATEMENT_TIMEOUT_S + 5  # the server should have given up by then
ROWS: Final = 1000  # rows per statement
MIGRATION_LOCK: Final = 7237422109  # any number that no other program uses; it serializes nodes that start together
OPTIONS: Final[dict[str, str | int]] = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # in ms: keepalives are not sent while data is in transit
    "application_name": "roundhouse",
}


class PendingReply(Protocol):
    """A connection; ``waits_since`` is when it began to wait for an answer, None if it does not wait."""

    waits_since: float | None

    def cut(self) -> None:
        """End the connection while its user waits; called in another thread."""


class ConnectionWatchdog:
    """Ends connections that wait for more than ``limit_s``; its thread ends with the last connection."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._connections: WeakSet[PendingReply] = WeakSet()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<ConnectionWatchdog {self._limit_s:g} s connections={len(self._connections)}>"

    def add(self, connection: PendingReply) -> None:
        """Watch a connection until it is closed or garbage collected."""
        with self._lock:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="silence", daemon=True)
                self._thread.start()

    def unwatch(self, connection: PendingReply) -> None:
        """Stop watching a connection."""
        with self._lock:
            self._connections.discard(connection)

    def _run(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._limit_s / 2))
            with self._lock:
                if not self._connections:
                    self._thread = None
                    return
                now = time.monotonic()
                silent = [each for each in self._connections if now - (each.waits_since or now) > self._limit_s]
                for connection in silent:  # within the lock, so no thread closes it meanwhile
                    connection.cut()
                    self._connections.discard(connection)


def conninfo_of(url: str, limits: str = "") -> str:
    """Return the connection string: the URL's own parameters first, its ``options`` beside ``limits``.

    Raises:
        psycopg.ProgrammingError: the URL is not valid.
    """
    given = {name: value for name, value in conninfo_to_dict(url).items() if value is not None}
    options = " ".join(filter(None, (str(given.pop("options", "")), limits)))
    return make_conninfo("", **{**OPTIONS, **given, "options": options})


class PostgresConnection(Connection):
    """A connection to PostgreSQL (``service.store.databases.database.Connection``)."""

    def __init__(self, url: str, begin: str, idle_s: float, silence: ConnectionWatchdog) -> None:
        limits = (
            f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout={idle_s * 1000:.0f}"
        )
        self._raw = psycopg.connect(conninfo_of(url, limits), autocommit=True)
        self._begin = begin
        self._silence = silence
        self.waits_since: float | None = None
        silence.add(self)

    def __repr__(self) -> str:
        return f"<PostgresConnection {self._raw.info.status.name}>"

    @override
    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        self.waits_since = time.monotonic()
        try:
            return cast("Cursor", self._raw.execute(_in_its_words(sql), _plain(parameters) or None))
        finally:
            self.waits_since = None

    @override
    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        # One statement: psycopg would send a pipeline, and after one the server forgets the limit of an idle
        # transaction (seen with 18.4). A node that froze there kept its own row locked, so no node took over.
        left = iter(rows)
        while some := list(islice(left, ROWS)):
            self.execute(_of_rows(sql, len(some)), list(chain.from_iterable(some)))

    def execute_script(self, sql: str) -> None:
        """Run several statements inside the open transaction."""
        self._raw.execute(sql.encode())

    def begin(self) -> None:
        """Begin a transaction."""
        self.execute(self._begin)

    def commit(self) -> None:
        """Commit the transaction."""
        self.execute("COMMIT")

    def rollback(self) -> None:
        """Roll the transaction back."""
        self.execute("ROLLBACK")

    def close(self) -> None:
        """Close the connection."""
        self._silence.unwatch(self)
        self._raw.close()

    def cut(self) -> None:
        """End the connection while its user waits; called in another thread."""
        with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(self._raw.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)


class PostgresDatabase(Database):
    """A PostgreSQL server (``service.store.databases.database.Database``).

    ``lease_s`` is how long a silent node counts as living, ``silence_s`` the longest wait for an answer.
    """

    readers = 4

    def __init__(self, url: str, lease_s: float, models: Sequence[str], silence_s: float = SILENCE_S) -> None:
        self._silence = ConnectionWatchdog(silence_s)
        self.url = url
        self._lease_s = lease_s
        self._models = models

    def __repr__(self) -> str:
        return f"<PostgresDatabase {self.place}>"

    @property
    def place(self) -> str:
        """The host and the name of the database."""
        try:
            known = conninfo_to_dict(self.url)
        except psycopg.ProgrammingError:
            return "a URL that is not valid"
        return f"{known.get('host', 'localhost')}/{known.get('dbname', '')}"

    @override
    def connect_writer(self) -> PostgresConnection:
        # A node that is stopped inside a transaction must not delay a takeover for longer than its lease.
        return PostgresConnection(self.url, "BEGIN", self._lease_s / 2, self._silence)

    @override
    def connect_reader(self) -> PostgresConnection:
        begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
        return PostgresConnection(self.url, begin, STATEMENT_TIMEOUT_S, self._silence)

    def membership(self) -> SharedMembership:
        """Return this node's membership."""
        return SharedMembership(self._lease_s, self._models)

    def trouble_of(self, error: Exception) -> str | None:
        """Describe a fault of the server or of the connection."""
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"PostgreSQL at {self.place}: {lines[0]}"
        return None

    def is_conflict(self, error: Exception) -> bool:
        """Whether this transaction was undone to end a deadlock or a conflict with another."""
        return isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)

    def schema_fault(self) -> str | None:
        """Return why this Roundhouse cannot take over the database as it is, or None; only reads.

        Raises:
            StoreError: the database cannot be read, or has a newer version.
        """
        try:
            with closing(self.connect_reader()) as connection:
                return schema_fault(connection, migrations_of("postgres"))
        except psycopg.Error as error:
            raise StoreError(f"PostgreSQL at {self.place}: {str(error).strip()}") from error

    def prepare(self) -> None:
        """Migrate the schema; nodes that start together take turns.

        Raises:
            StateUnusable: the database was written before 1.0.0.
            StoreError: the server cannot be reached, or its schema has a newer version.
        """
        try:
            with closing(self.connect_writer()) as connection:
                connection.execute("SELECT pg_advisory_lock(?)", (MIGRATION_LOCK,))
                migrate(connection, migrations_of("postgres"), connection.execute_script)
        except psycopg.Error as error:
            raise StoreError(f"PostgreSQL at {self.place}: {str(error).strip()}") from error


@lru_cache(maxsize=256)
def _of_rows(sql: str, count: int) -> str:
    """Return an INSERT of ``count`` rows, from one of a single row."""
    head, marks, tail = re.split(r"(?<=VALUES )(\([?, ]+\))", sql)
    return head + ", ".join([marks] * count) + tail


def _in_its_words(sql: str) -> bytes:
    """Return a statement with psycopg's placeholders; no statement contains a literal percent sign or question mark."""
    return sql.replace("?", "%s").encode()


def _plain(parameters: Sequence[object]) -> list[object]:
    # psycopg would send the name of an enum's member.
    return [str(value) if isinstance(value, StrEnum) else value for value in parameters]

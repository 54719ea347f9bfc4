"""The shared database: PostgreSQL, in which any number of nodes write (psycopg 3)."""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, cast

import psycopg

from service.errors import StoreError
from service.store.database import Cursor
from service.store.migrations import migrate, migrations_of
from service.store.shared import SharedMembership

CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 30
MIGRATION_LOCK: Final = 7237422109  # any number that nobody else takes; nodes start together
OPTIONS: Final = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "application_name": "roundhouse",
}


class PostgresConnection:
    """A ``service.store.database.Connection``."""

    def __init__(self, url: str, begin: str, idle_s: float) -> None:
        options = (
            f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c idle_in_transaction_session_timeout={idle_s * 1000:.0f}"
        )
        # A connection through a pooler that hands out others' sessions must not expect its prepared statements.
        self._raw = psycopg.connect(url, autocommit=True, options=options, **OPTIONS)  # type: ignore[arg-type]
        self._begin = begin

    def __repr__(self) -> str:
        """State how it is."""
        return f"<PostgresConnection {self._raw.info.status.name}>"

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> Cursor:
        """Run one statement."""
        return cast("Cursor", self._raw.execute(_in_its_words(sql), _plain(parameters) or None))

    def execute_many(self, sql: str, rows: Iterable[Sequence[object]]) -> None:
        """Run one statement for each row."""
        with self._raw.cursor() as cursor:
            cursor.executemany(_in_its_words(sql), [_plain(row) for row in rows])

    def execute_script(self, sql: str) -> None:
        """Run several statements inside the transaction that is open."""
        self._raw.execute(sql.encode())

    def begin(self) -> None:
        """Begin a transaction."""
        self._raw.execute(self._begin.encode())

    def commit(self) -> None:
        """Make it durable."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """Undo it."""
        self._raw.execute("ROLLBACK")

    def close(self) -> None:
        """Close it."""
        self._raw.close()


class PostgresDatabase:
    """A ``service.store.database.Database``; ``lease_s`` is how long a node that is silent counts as living."""

    readers = 4

    def __init__(self, url: str, lease_s: float, models: Sequence[str]) -> None:
        self.url = url
        self._lease_s = lease_s
        self._models = models

    def __repr__(self) -> str:
        """State where, and no password."""
        return f"<PostgresDatabase {self.place}>"

    @property
    def place(self) -> str:
        """The host and the name of the database."""
        try:
            known = psycopg.conninfo.conninfo_to_dict(self.url)
        except psycopg.ProgrammingError:
            return "an address that is none"
        return f"{known.get('host', 'localhost')}/{known.get('dbname', '')}"

    def connect_writer(self) -> PostgresConnection:
        """Open a connection that may write."""
        # A node that is stopped inside a transaction must not keep others from taking over for longer than its lease.
        return PostgresConnection(self.url, "BEGIN", self._lease_s / 2)

    def connect_reader(self) -> PostgresConnection:
        """Open a connection that only reads."""
        return PostgresConnection(self.url, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", STATEMENT_TIMEOUT_S)

    def membership(self) -> SharedMembership:
        """Return this node's membership."""
        return SharedMembership(self._lease_s, self._models)

    def trouble_of(self, error: Exception) -> str | None:
        """Say what ails the server or the way to it."""
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | psycopg.InternalError):
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"PostgreSQL at {self.place}: {lines[0]}"
        return None

    def prepare(self) -> None:
        """Bring the schema up to date; nodes that start together take turns.

        Raises:
            StoreError: the server cannot be reached, or its schema is of a newer version.
        """
        try:
            connection = self.connect_writer()
            try:
                connection.execute("SELECT pg_advisory_lock(?)", (MIGRATION_LOCK,))
                migrate(connection, migrations_of("postgres"), connection.execute_script)
            finally:
                connection.close()
        except psycopg.Error as error:
            raise StoreError(f"PostgreSQL at {self.place}: {str(error).strip()}") from error


@lru_cache(maxsize=256)
def _in_its_words(sql: str) -> bytes:
    """Return a statement with psycopg's marks; none of ours holds a percent sign or a question mark of its own."""
    return sql.replace("?", "%s").encode()


def _plain(parameters: Sequence[object]) -> list[object]:
    # psycopg would send the name of an enum's member.
    return [str(value) if isinstance(value, StrEnum) else value for value in parameters]

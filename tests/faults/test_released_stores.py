"""Stores written by released versions are read, migrated and used (``tests/data/stores``)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from tests.harness.postgres import PostgresServer
from tests.harness.release_store import FOLDER, HOOKS, load_postgres, load_sqlite
from tests.harness.service import scripted_model, serving

VERSIONS = sorted(file.name.removesuffix(".json") for file in FOLDER.glob("*.json"))
TABLES = {
    "sqlite": "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name",
    "postgres": "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    " AND table_type = 'BASE TABLE' ORDER BY table_name",
}
SCHEMA = {
    "sqlite": "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite%' ORDER BY type, name",
    "postgres": "SELECT 'column', table_name, column_name, data_type || is_nullable || coalesce(column_default, '')"
    " FROM information_schema.columns WHERE table_schema = 'public' UNION ALL SELECT 'index', tablename, indexname,"
    " indexdef FROM pg_indexes WHERE schemaname = 'public' UNION ALL SELECT 'constraint', conrelid::regclass::text,"
    " conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'public'::regnamespace"
    " ORDER BY 1, 2, 3",
}
# Turns of deleted jobs; spans and rollouts, which are younger than 1.0.0
RARE = {"kept_turns", "seats", "offers", "spans", "turn_tokens", "rollouts", "rewards", "sessions", "exchanges"}


def known(shown: object, kept: object) -> object:
    """Return what is shown without the fields that a later version has added."""
    if isinstance(shown, dict) and isinstance(kept, dict):
        return {name: known(value, kept[name]) for name, value in shown.items() if name in kept}
    if isinstance(shown, list) and isinstance(kept, list):
        return [known(*pair) for pair in zip(shown, kept, strict=True)]
    return shown


class Released:
    """The store of a version in one of the two databases."""

    def __init__(self, kind: str, version: str, folder: Path, server: PostgresServer) -> None:
        self.kind = kind
        self.url = "sqlite" if kind == "sqlite" else server.new_database()
        self.kept = json.loads((FOLDER / f"{version}.json").read_text())[kind]
        self.folder = folder
        if kind == "sqlite":
            load_sqlite(version, folder / "state")
        else:
            load_postgres(version, self.url)

    def rows(self, database: SqliteDatabase | PostgresDatabase, sql: str) -> list[tuple[object, ...]]:
        """Prepare a database, and return the rows of a query."""
        database.prepare()
        connection = database.connect_reader()
        try:
            return [tuple(row) for row in connection.execute(sql)]
        finally:
            connection.close()

    @property
    def database(self) -> SqliteDatabase | PostgresDatabase:
        """The database, closed."""
        if self.kind == "sqlite":
            return SqliteDatabase(self.folder / "state" / FILE_NAME)
        return PostgresDatabase(self.url, 5.0, ["m"])


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_released_store_gets_the_schema_of_a_new_one(
    tmp_path: Path, postgres: PostgresServer, kind: str, version: str
) -> None:
    """Tables, columns, indexes and constraints; and the kept store has rows in every table."""
    released = Released(kind, version, tmp_path, postgres)
    new = (
        SqliteDatabase(tmp_path / "new.db")
        if kind == "sqlite"
        else PostgresDatabase(postgres.new_database(), 5.0, ["m"])
    )
    assert released.rows(released.database, SCHEMA[kind]) == released.rows(new, SCHEMA[kind])
    tables = [str(row[0]) for row in released.rows(released.database, TABLES[kind])]
    counts = {name: released.rows(released.database, f"SELECT count(*) FROM {name}")[0][0] for name in tables}  # noqa: S608
    assert {name for name, count in counts.items() if not count} <= RARE


@pytest.mark.system
@pytest.mark.parametrize("version", VERSIONS)
def test_the_jobs_of_a_released_store_are_read_and_go_on(
    tmp_path: Path, postgres: PostgresServer, free_ports: Callable[[int], int], kind: str, version: str
) -> None:
    """Results are unchanged; turns that were at work, awaited or posted end."""
    released = Released(kind, version, tmp_path, postgres)
    models = {"m": scripted_model(free_ports(1))}
    with serving(tmp_path, free_ports(1), models, store={"url": released.url}, webhooks=HOOKS) as service:
        for result in released.kept["results"].values():
            assert known(service.get(f"/v1/jobs/{result['id']}/result"), result) == result
        said = service.http.post(
            f"/v1/jobs/{released.kept['waits']}/conversations/q0/turns/guest/0", json={"text": "Here I am."}
        )
        assert said.status_code == 201, said.text
        for job in (released.kept["waits"], released.kept["left"], "job-posted"):
            assert service.wait_ended(job)["state"] == "completed"
        (first, _) = service.get(f"/v1/jobs/{released.kept['left']}/result")["conversations"]
        assert [each["reason"] for each in first["turns"][0]["attempts"]] == ["engine_died", None]
        (posted,) = service.get("/v1/jobs/job-posted/result")["conversations"]
        assert json.loads(posted["turns"][0]["answer"]["body"])["choices"]

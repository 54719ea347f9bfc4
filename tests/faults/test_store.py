"""Databases that fail: power losses, full disks, damaged files, commits without an answer."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import anyio
import pytest

from service.conversations.job.states import ConversationState, JobState
from service.errors import StateUnusable, StoreError, StoreUnavailable
from service.store import event_rows, job_rows, turn_rows
from service.store.databases import postgres, sqlite
from service.store.databases.database import Connection
from service.store.databases.migrations import WRITTEN_BEFORE_RELEASE, Migration, migrations_of
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, WRITER_PRAGMAS, SqliteConnection, SqliteDatabase
from service.store.news import StoreEvent, StoreRecovered, StoreTroubled
from service.store.state_folder import own_folder
from service.store.store import open_store
from tests.harness.jobs import DEBATE, job
from tests.harness.power import Disk, ForgetfulDatabase
from tests.harness.stored import J, all_usage, append, ended, moved, new, post, used, write_before_release
from tests.harness.waiting import LIMIT_S, wait_until

TRIALS, SOAK_TRIALS = 10, 100


async def lose_power(folder: Path, seed: int, synchronous: str) -> tuple[int, int]:
    """Post jobs until the power fails; return how many were acknowledged by then, and how many of those are lost."""
    chance = Random(seed)  # noqa: S311
    disk = Disk(fails_at=chance.randrange(200, 3000), chance=chance)
    source, restored = folder / f"{seed}", folder / f"{seed}-restored"
    source.mkdir()
    database = ForgetfulDatabase(source / FILE_NAME, synchronous)
    database.prepare()
    acknowledged: list[str] = []
    with open_store(database) as store:
        number = 0
        while disk.left is None:
            number += 1
            posts = [new(job(*DEBATE, name=f"j{number}-{each}")) for each in range(chance.randrange(1, 5))]

            async def post(each: int, posts: Sequence[object] = posts) -> None:
                stored, _, _ = await store.post(posts[each], claims=True)  # type: ignore[arg-type]
                if disk.left is None:
                    acknowledged.append(stored.id)

            async with anyio.create_task_group() as tasks:
                for each in range(len(posts)):
                    tasks.start_soon(post, each)
    restored.mkdir()
    for name, image in disk.left.items():
        (restored / name).write_bytes(image)
    repaired = SqliteDatabase(restored / FILE_NAME)
    repaired.prepare()
    with open_store(repaired) as store:
        there = {stored.id for stored in await store.read(job_rows.listed, None, 100_000, None)}
    return len(acknowledged), len(set(acknowledged) - there)


@pytest.mark.anyio
async def test_no_power_loss_takes_an_acknowledged_job(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Any part of the unsynced writes may survive, the last of it torn.

    Acknowledged jobs are there, the file is intact.
    """
    trials = SOAK_TRIALS if request.config.getoption("--soak") else TRIALS
    acknowledged = 0
    for seed in range(trials):
        count, lost = await lose_power(tmp_path, seed, "FULL")
        acknowledged += count
        assert lost == 0, f"seed {seed}: {lost} of {count}"
    assert acknowledged > 10 * trials


@pytest.mark.anyio
async def test_the_power_loss_is_real(tmp_path: Path) -> None:
    """Without syncs the same trials lose much, or damage the file: the disk forgets."""
    losses = 0
    for seed in range(3):
        try:
            losses += (await lose_power(tmp_path, seed, "OFF"))[1]
        except (StoreError, sqlite3.DatabaseError):  # wherever the file is damaged
            losses += 1
    assert losses > 0


class BreakingDatabase(SqliteDatabase):
    """Breaks commits before or after they are durable, as a lost connection does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.breaks: list[str] = []

    def connect_writer(self) -> SqliteConnection:
        return _Breaking(self._path, self.breaks)

    def trouble_of(self, error: Exception) -> str | None:
        return str(error) if isinstance(error, ConnectionError) else super().trouble_of(error)


class _Breaking(SqliteConnection):
    def __init__(self, path: Path, breaks: list[str]) -> None:
        super().__init__(path, WRITER_PRAGMAS, "BEGIN IMMEDIATE")
        self._breaks = breaks

    def commit(self) -> None:
        if self._breaks[:1] == ["before"]:
            self._breaks.pop(0)
            self.rollback()
            raise ConnectionError("the disk is full, it seems")
        super().commit()
        if self._breaks[:1] == ["after"]:
            self._breaks.pop(0)
            raise ConnectionError("nobody answered the commit")


def is_well(told: list[StoreEvent]) -> bool:
    return [event for event in told if isinstance(event, StoreTroubled | StoreRecovered)][-1:] == [StoreRecovered()]


@pytest.mark.anyio
@pytest.mark.parametrize("breaks", [["before"], ["after"], ["before", "before", "after"], ["after", "after"]])
async def test_a_broken_commit_is_neither_lost_nor_doubled(tmp_path: Path, breaks: list[str]) -> None:
    """Events are kept and written once; requests are refused meanwhile."""
    database = BreakingDatabase(tmp_path / FILE_NAME)
    database.prepare()
    told: list[StoreEvent] = []
    with open_store(database) as store:
        store.subscribe(told.append)
        await store.post(new(job(*DEBATE)), claims=True)
        database.breaks += breaks
        await append(store, moved(ConversationState.RUNNING), ended("a", used=used()), ended("b", used=used("b")))
        await append(store, ended("m", used=used()), moved(ConversationState.COMPLETED))
        await wait_until(lambda: is_well(told), "it is well again")
        assert store.trouble is None
        turns = await store.read(turn_rows.ended, J, ["c0"])
        assert [turn.key.agent_id for turn in turns] == ["a", "b", "m"]
        assert (await store.read(job_rows.job, J)).state is JobState.COMPLETED
        events, _ = await store.read(event_rows.listed, J, 0, 99)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert [counts.attempts for _, counts in await store.read(all_usage)] == [3]
    assert any(isinstance(event, StoreTroubled) for event in told)


@pytest.mark.anyio
async def test_a_read_that_fails_between_two_rows_holds_no_snapshot(tmp_path: Path) -> None:
    """Its traceback may live on with the cursor; later reads see what was written since."""
    database = SqliteDatabase(tmp_path / FILE_NAME)
    database.prepare()

    def fail(connection: Connection) -> None:
        rows = iter(connection.execute("SELECT number FROM migrations UNION ALL SELECT 2"))
        next(rows)
        raise ValueError("a row that cannot be read")

    with open_store(database) as store:
        with pytest.raises(ValueError, match="cannot be read") as kept:
            await store.read(fail)
        await post(store, job(*DEBATE))
        assert (await store.read(job_rows.job, J)).id == J
        assert kept.tb is not None


@pytest.mark.anyio
async def test_no_job_is_accepted_while_the_database_fails(tmp_path: Path) -> None:
    """It is refused at once with the reason; results wait, and are written when the database works again."""
    database = BreakingDatabase(tmp_path / FILE_NAME)
    database.prepare()
    with open_store(database) as store:
        await store.post(new(job(*DEBATE)), claims=True)
        database.breaks += ["before"] * 4
        durable = anyio.Event()
        store.append_nowait([ended("a")], durable.set)
        await wait_until(lambda: store.trouble is not None, "it is in trouble")
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await store.post(new(job(*DEBATE, name="other")), claims=True)
        with anyio.fail_after(LIMIT_S):
            await durable.wait()
        await store.post(new(job(*DEBATE, name="other")), claims=True)


Databases = SqliteDatabase | PostgresDatabase


def database_of(folder: Path, request: pytest.FixtureRequest, kind: str) -> Databases:
    if kind == "sqlite":
        return SqliteDatabase(folder / FILE_NAME)
    return PostgresDatabase(request.getfixturevalue("postgres").new_database(), 15.0, ("m",))


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_store_of_an_older_version_is_migrated_and_a_file_is_copied_first(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The jobs are still there, a second start applies nothing, and the copy has the older version."""
    database, steps = database_of(tmp_path, request, kind), migrations_of(kind)
    database.prepare()
    with open_store(database) as store:
        await store.post(new(job(*DEBATE)), claims=True)
    later = Migration(number=len(steps) + 1, name="0002_later", sql="ALTER TABLE jobs ADD COLUMN later TEXT")
    for module in (sqlite, postgres):
        monkeypatch.setattr(module, "migrations_of", lambda _kind: [*steps, later])
    assert "0002_later" in str(database.schema_fault())
    database.prepare()
    database.prepare()
    assert database.schema_fault() is None
    with open_store(database) as store:
        assert await store.read(lambda connection: connection.execute("SELECT later FROM jobs").fetchall()) == [(None,)]
        assert (await store.read(job_rows.job, J)).state is JobState.QUEUED
    if kind == "sqlite":
        with closing(sqlite3.connect(tmp_path / f"{FILE_NAME}.before-0002_later")) as copy:
            assert copy.execute("SELECT max(number) FROM migrations").fetchone() == (len(steps),)


@pytest.mark.parametrize(
    "kind", ["sqlite", "postgres", "sqlite without a table of migrations", "sqlite with a rollback journal"]
)
def test_a_store_from_before_the_first_release_is_refused_and_does_not_change(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """A start and the look before an upgrade give the same reason."""
    database = database_of(tmp_path, request, kind.partition(" ")[0])
    write_before_release(database.connect_writer())
    if kind.endswith("migrations"):
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
            connection.execute("DROP TABLE migrations")
    if kind.endswith("journal"):
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")
    file = tmp_path / FILE_NAME
    before, content = rows_of_before(database), file.read_bytes() if file.exists() else b""
    with pytest.raises(StateUnusable) as refused:
        database.prepare()
    assert str(refused.value) == database.schema_fault() == WRITTEN_BEFORE_RELEASE
    assert WRITTEN_BEFORE_RELEASE == (
        "This store was written before 1.0.0: read its results with the version that wrote it (`roundhouse result`), "
        "or give an empty state_dir."
    )
    assert not content or file.read_bytes() == content
    assert rows_of_before(database) == before
    assert list(tmp_path.glob(f"{FILE_NAME}.before-*")) == []


def rows_of_before(database: Databases) -> list[Sequence[object]]:
    """Return the names of all tables, and all their rows."""
    with closing(database.connect_reader()) as connection:
        if isinstance(database, SqliteDatabase):
            names = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        else:
            names = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public' ORDER BY table_name"
        tables = [str(row[0]) for row in connection.execute(names).fetchall()]
        return [tables, *(row for each in tables for row in connection.execute(f"SELECT * FROM {each}").fetchall())]  # noqa: S608


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:20480] = bytes(range(256)) * 64
    path.write_bytes(content)


def change_checksum(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE migrations SET checksum = 'other' WHERE number = 1")


def add_migration(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO migrations VALUES (99, 'later', 'x', 'now')")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damage_pages, "damaged|malformed"),
        (change_checksum, "0001_schema is not that of this Roundhouse"),
        (add_migration, "of version 99"),
        (lambda path: path.write_bytes(b"this is no database, whatever its name says" * 100), "not a database"),
    ],
)
async def test_an_unusable_file_is_refused(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    """A damaged, changed, newer or missing file is reported, and not written to."""
    database = SqliteDatabase(tmp_path / FILE_NAME)
    database.prepare()
    with open_store(database) as store:
        await store.post(new(job(*DEBATE)), claims=True)
    spoil(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreError, match=told):
        database.prepare()
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    """Two services in one folder would undo each other's work; the second reports the owner."""
    with own_folder(tmp_path), pytest.raises(StoreError, match="another Roundhouse"), own_folder(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"), own_folder(tmp_path / "file" / "state"):
        pass

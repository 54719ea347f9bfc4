"""Databases that fail: power that goes, disks that are full, files that are damaged, commits that nobody answers."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from random import Random

import anyio
import pytest
from msgspec.structs import replace

from service.conversations.heritage import Share
from service.conversations.job import Heritage, JobId, SpokenBy
from service.conversations.states import ConversationState, JobState
from service.conversations.transcript import Charges, transcript_document
from service.errors import StoreError, StoreUnavailable
from service.store import awaited_turns, heirs, memory_cuts, queries
from service.store.databases.database import Connection
from service.store.databases.migrations import migrate, migrations_of
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, WRITER_PRAGMAS, SqliteConnection, SqliteDatabase, own_folder
from service.store.news import StoreEvent, StoreRecovered, StoreTroubled
from service.store.store import open_store
from tests.harness.jobs import DEBATE, job
from tests.harness.power import Disk, ForgetfulDatabase
from tests.harness.stored import ALL_USAGE, J, append, ended, moved, new, used
from tests.harness.waiting import LIMIT_S, wait_until

TRIALS, SOAK_TRIALS = 10, 100


async def lose_power(folder: Path, seed: int, synchronous: str) -> tuple[int, int]:
    """Post jobs until the power goes; return how many were acknowledged by then, and how many of those are lost."""
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
        there = {stored.id for stored in await store.read(queries.jobs(None, 100_000, None))}
    return len(acknowledged), len(set(acknowledged) - there)


@pytest.mark.anyio
async def test_no_power_loss_takes_an_acknowledged_job(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever is left of unsynced writes, the last of it torn: what was acknowledged is there, and nothing damaged."""
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
    """Breaks commits: before or after they are durable, as a connection that is lost does."""

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
async def test_a_commit_that_breaks_is_neither_lost_nor_doubled(tmp_path: Path, breaks: list[str]) -> None:
    """What has happened is kept and written once; whoever asks meanwhile is refused."""
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
        turns = await store.read(queries.turns(J, ["c0"]))
        assert [turn.key.agent_id for turn in turns] == ["a", "b", "m"]
        assert (await store.read(queries.job(J))).state is JobState.COMPLETED
        events, _ = await store.read(queries.events(J, 0, 99))
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert [counts.attempts for _, counts in await store.read(ALL_USAGE)] == [3]
    assert any(isinstance(event, StoreTroubled) for event in told)


@pytest.mark.anyio
async def test_nothing_is_taken_while_the_database_is_in_trouble(tmp_path: Path) -> None:
    """Refused with the reason, at once; what has happened waits, and is there when it is well."""
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


def legacy(path: Path, version: int) -> None:
    """Make a database as the first Roundhouse did: by numbered files, with no note of their checksums."""
    connection = sqlite3.connect(path)
    for migration in migrations_of("sqlite")[:version]:
        connection.executescript(migration.sql)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.execute(
        "INSERT INTO jobs (id, number, name, state, document, body_hash, metadata, total_conversations, total_turns,"
        " created_at) VALUES ('old', 1, 'old', 'running', '{}', 'h', '{}', 2, 2, '2026-11-20T00:00:00.000000Z')"
    )
    connection.executemany(
        "INSERT INTO conversations (job_id, id, position, metadata, state) VALUES ('old', ?, ?, '{}', ?)",
        [("c0", 0, "completed"), ("c1", 1, "running")],
    )
    connection.execute("INSERT INTO events (job_id, number, kind, data) VALUES ('old', 1, 'job', '{}')")
    connection.commit()
    connection.close()


@pytest.mark.anyio
@pytest.mark.parametrize("version", [1, 2])
async def test_an_older_file_is_brought_up_to_date_and_a_copy_is_kept(tmp_path: Path, version: int) -> None:
    """What was unfinished goes on, events go on counting, and the file as it was stands beside."""
    legacy(tmp_path / FILE_NAME, version)
    database = SqliteDatabase(tmp_path / FILE_NAME)
    database.prepare()
    database.prepare()  # there is nothing to do any more
    with open_store(database) as store:
        (claim,) = await store.claim([], None)
        assert (claim.job_id, claim.conversation_id) == ("old", "c1")
        await append(store, moved(ConversationState.COMPLETED, "c1", "old"))
        assert (await store.read(queries.job(JobId("old")))).state is JobState.COMPLETED
        events, is_over = await store.read(queries.events(JobId("old"), 0, 99))
        assert ([event.kind for event in events], is_over) == (["job", "conversation", "end"], True)
    (copy,) = list(tmp_path.glob(f"{FILE_NAME}.before-*"))  # noqa: ASYNC240
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)


def older_database(
    folder: Path, request: pytest.FixtureRequest, kind: str, steps: dict[str, int]
) -> tuple[SqliteDatabase | PostgresDatabase, Connection]:
    """Make a database of so many steps with one job, in a transaction that is open."""
    database: SqliteDatabase | PostgresDatabase = SqliteDatabase(folder / FILE_NAME)
    if kind == "postgres":
        database = PostgresDatabase(request.getfixturevalue("postgres").new_database(), 15.0, ("m",))
    writer = database.connect_writer()
    migrate(writer, migrations_of(kind)[: steps[kind]], writer.execute_script)
    writer.begin()
    names = "id, number, name, state, document, body_hash, metadata, total_conversations, total_turns, created_at"
    values: tuple[object, ...] = ("old", 1, "old", "running", '{"a": 1}', "h", '{"of": "mine"}', 1, 3, "2026-11-20")
    if kind == "postgres":
        names, values = f"{names}, priority, models, unfinished", (*values, 0, ["m"], 1)
    marks = ", ".join("?" * len(values))
    writer.execute(f"INSERT INTO jobs ({names}) VALUES ({marks})", values)  # noqa: S608 - names of our own
    return database, writer


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_deaths_that_were_charged_in_company_become_suspicion(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """From the version before: a count of deaths says that a turn was on those engines, and convicts it of nothing."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 3, "postgres": 1})
    for agent_id, deaths in (("a", 0), ("b", 1)):
        record = (
            f'{{"key": ["old", "c0", "{agent_id}", 0], "attempts": [], "rejected": [["No.", "why"]],'
            f' "deaths": {deaths}, "failures": 3, "queued_at": "2026-11-20T00:00:00Z", "started_at": null}}'
        )
        writer.execute("INSERT INTO unfinished_turns VALUES ('old', 'c0', ?, 0, ?)", (agent_id, record))
    writer.commit()
    writer.close()
    database.prepare()
    with open_store(database) as store:
        turns = await store.read(queries.unfinished_turns(JobId("old"), ["c0"]))
    charges = {turn.key.agent_id: turn.charges for turn in turns}
    assert charges == {"a": Charges(), "b": Charges(is_suspect=True)}
    assert {turn.rejected for turn in turns} == {(("No.", "why"),)}


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_conversations_of_the_version_before_ended_by_their_rounds(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """It knew no conditions: what is completed is whole, and what goes on has none."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 4, "postgres": 2})
    wants = ("wants, ", "'{m}', ") if kind == "postgres" else ("", "")
    for place, state in enumerate(("completed", "running")):
        writer.execute(
            f"INSERT INTO conversations ({wants[0]}job_id, id, position, metadata, state)"  # noqa: S608 - our own words
            f" VALUES ({wants[1]}'old', ?, ?, '{{}}', ?)",
            (f"c{place}", place, state),
        )
    writer.commit()
    writer.close()
    database.prepare()
    with open_store(database) as store:
        records = [await store.read(queries.conversation(JobId("old"), name)) for name in ("c0", "c1")]
        assert [transcript_document(record)["ended_by"] for record in records] == ["rounds", None]
        (stored,) = await store.read(queries.jobs(None, 10, None))
        assert stored.total_turns == 3


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_conversations_of_the_version_before_wait_for_no_caller(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """It knew none: what goes on is claimed, its turns were all spoken by models, and nothing is awaited."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 4, "postgres": 2})
    wants = ("wants, ", "'{m}', ") if kind == "postgres" else ("", "")
    writer.execute(
        f"INSERT INTO conversations ({wants[0]}job_id, id, position, metadata, state)"  # noqa: S608 - our own words
        f" VALUES ({wants[1]}'old', 'c0', 0, '{{}}', 'running')"
    )
    record = '{"key": ["old", "c0", "a", 0], "state": "completed", "text": "Yes."}'
    writer.execute(
        "INSERT INTO turns (job_id, conversation_id, agent, round, state, record)"
        " VALUES ('old', 'c0', 'a', 0, 'completed', ?)",
        (record,),
    )
    writer.commit()
    writer.close()
    database.prepare()
    with open_store(database) as store:
        assert [claim.conversation_id for claim in await store.claim(["m"], 10)] == ["c0"]
        (turn,) = await store.read(queries.turns(JobId("old"), ["c0"]))
        assert (turn.text, turn.by) == ("Yes.", SpokenBy.MODEL)
        assert await store.read(awaited_turns.listed(awaited_turns.Which(), 0, 10)) == []
        assert (await store.take_due()).turns == []


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_conversations_of_the_version_before_are_inherited(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """It knew neither forks nor cuts: what it has recorded is whole, and may be begun with."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 4, "postgres": 2})
    wants = ("wants, ", "'{m}', ") if kind == "postgres" else ("", "")
    writer.execute(
        f"INSERT INTO conversations ({wants[0]}job_id, id, position, metadata, state)"  # noqa: S608 - our own words
        f" VALUES ({wants[1]}'old', 'c0', 0, '{{}}', 'completed')"
    )
    writer.execute(
        "INSERT INTO turns (job_id, conversation_id, agent, round, state, record)"
        " VALUES ('old', 'c0', 'a', 0, 'completed', ?)",
        ('{"key": ["old", "c0", "a", 0], "state": "completed", "text": "Yes."}',),
    )
    if kind == "postgres":
        writer.execute("SELECT nextval('job_numbers')")
    writer.commit()
    writer.close()
    database.prepare()
    heritage = Heritage(source=(JobId("old"), "c0"), ends={"a": 1}, first={}, turns=1)
    made = job(*DEBATE)
    heir = replace(made, conversations=(replace(made.conversations[0], heritage=heritage),))
    share = Share(job=JobId("old"), conversation="c0", agent="a", rounds=1)
    with open_store(database) as store:
        record = await store.read(queries.conversation(JobId("old"), "c0"))
        told = transcript_document(record)["turns"]
        assert [(turn["inherited"], turn["memory"]) for turn in told] == [(None, None)]  # type: ignore[attr-defined]
        assert await store.read(memory_cuts.of_conversations(JobId("old"), ["c0"])) == []
        await store.post(replace(new(heir), shares={"c0": [share]}), claims=True)
        assert [turn.text for turn in await store.read(heirs.inherited(made.id, ["c0"]))] == ["Yes."]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_documents_of_the_version_before_are_kept(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """They stood in the rows of their jobs."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 4, "postgres": 2})
    writer.commit()
    writer.close()
    database.prepare()
    with open_store(database) as store:
        assert await store.read(queries.document(JobId("old"))) == '{"a": 1}'
        assert (await store.read(queries.job(JobId("old")))).metadata == {"of": "mine"}
        assert [job.id for job in await store.read(queries.jobs(None, 10, None))] == ["old"]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_jobs_of_the_version_before_keys_are_nobodys(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """They are listed with all jobs and with those of no key; jobs that come later are their key's."""
    database, writer = older_database(tmp_path, request, kind, {"sqlite": 4, "postgres": 2})
    writer.execute("UPDATE jobs SET number = 0")  # no later job has that one
    writer.commit()
    writer.close()
    database.prepare()
    with open_store(database) as store:
        await store.post(new(replace(job(*DEBATE), owner="alice")), claims=True)
        owners = {stored.id: stored.owner for stored in await store.read(queries.jobs(None, 10, None))}
        assert owners == {"old": None, "j": "alice"}
        assert await store.read(queries.owner(JobId("old"))) is None
        assert [stored.id for stored in await store.read(queries.jobs(None, 10, None, "alice"))] == ["j"]
        assert await store.read(queries.jobs(None, 10, None, "bob")) == []


def damage_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:20480] = bytes(range(256)) * 64
    path.write_bytes(content)


def change_checksum(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE migrations SET checksum = 'other' WHERE number = 2")


def add_migration(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO migrations VALUES (99, 'later', 'x', 'now')")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damage_pages, "damaged|malformed"),
        (change_checksum, "0002_unfinished_turns is not that of this Roundhouse"),
        (add_migration, "of version 99"),
        (lambda path: path.write_bytes(b"this is no database, whatever its name says" * 100), "not a database"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], told: str
) -> None:
    """Damaged, changed, of a newer version, or none at all: each is told, and nothing is written to it."""
    database = SqliteDatabase(tmp_path / FILE_NAME)
    database.prepare()
    with open_store(database) as store:
        await store.post(new(job(*DEBATE)), claims=True)
    spoil(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StoreError, match=told):
        database.prepare()
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_folder_is_one_process_s(tmp_path: Path) -> None:
    """Two Roundhouses in one would undo each other's work; the second is told whose it is."""
    with own_folder(tmp_path), pytest.raises(StoreError, match="another Roundhouse"), own_folder(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"), own_folder(tmp_path / "file" / "state"):
        pass

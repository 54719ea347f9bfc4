"""Frequent queries, and those that any caller can make, use an index, however many turns are awaited.

Query plans prove it.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId
from service.conversations.job.states import TurnState
from service.conversations.record.awaited_turn import AwaitedTurn
from service.store import awaited_turns, usage, waits
from service.store.awaited_turns import Which
from service.store.databases.database import Connection
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.records import TurnMoved
from service.store.store import Store, open_store
from tests.harness.jobs import DEBATE, job, key
from tests.harness.statements import ReportedDatabase
from tests.harness.stored import NOW, append, post

JOBS, EACH = 30, 100  # the key with many awaited turns; the other has one
SMALL = JobId("small")
DEMAND = AwaitedTurn(role="guest", wait_s=3600.0)
TABLES = ("awaited_turns", "conversations", "c")  # the others are empty here, where a walk is the best plan
SHIFT = "UPDATE awaited_turns SET until"  # moves all waits, after a time without a running node
Plan = tuple[str, str]  # a statement, and how the database goes about it


class Plans:
    """The plan of each statement that a database has run."""

    def __init__(self, explain: str) -> None:
        self.found: list[Plan] = []
        self._explain = explain

    def note(self, connection: Connection, sql: str, parameters: Sequence[object]) -> None:
        if sql.split(maxsplit=1)[0] in {"SELECT", "UPDATE", "DELETE"}:
            rows = connection.execute(f"{self._explain} {sql}", parameters).fetchall()
            self.found.append((sql, "\n".join(str(row[-1]) for row in rows)))


Planning = tuple[ReportedDatabase, Plans, Callable[[], object]]


@pytest.fixture(params=["sqlite", "postgres"])
def planning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Planning]:
    """Return a database, the plans of its statements, and a function that makes it count the rows of its tables."""
    if request.param == "sqlite":
        lite, plans = SqliteDatabase(tmp_path / FILE_NAME), Plans("EXPLAIN QUERY PLAN")
        lite.prepare()
        yield ReportedDatabase(lite, plans.note), plans, lambda: None
        return
    server = request.getfixturevalue("postgres")
    url = server.new_database()
    database = PostgresDatabase(url, 5.0, ["m"])
    database.prepare()
    plans = Plans("EXPLAIN")
    yield ReportedDatabase(database, plans.note), plans, lambda: server.execute("ANALYZE", database=url)


def walks(plan: str) -> list[str]:
    """Return the lines of a plan that scan a whole table or a whole index."""
    lines = [line.strip() for line in plan.splitlines()]
    return [
        line for line in lines for table in TABLES if line.startswith(f"SCAN {table}") or f"Seq Scan on {table}" in line
    ]


async def fill(store: Store) -> None:
    """Make many jobs of one key with awaited turns of unclaimed conversations, and one job of another key."""
    for name, owner, count in (*((f"large{n}", "bob", EACH) for n in range(JOBS)), (SMALL, "alice", 1)):
        await post(store, replace(job(*DEBATE, name=name, conversations=count), owner=owner))
        keys = [key("a", 0, number, name) for number in range(count)]
        moved = (TurnMoved(key=each, state=TurnState.AWAITED, worker=None, at=NOW, demand=DEMAND) for each in keys)
        await append(store, *moved)
        store.release_nowait({each[:2]: () for each in keys}, {each[:2]: [each] for each in keys})
    await store.flush()


Ask = Callable[[Store], Awaitable[Any]]
ASKED: dict[str, Ask] = {
    "the awaited turns of a job": lambda store: store.read(awaited_turns.listed, Which(job_id=SMALL), 0, 10),
    "the awaited turns of a conversation": lambda store: store.read(
        awaited_turns.listed, Which(job_id=SMALL, conversation_id="c0"), 0, 10
    ),
    "how many turns of a job are awaited": lambda store: store.read(awaited_turns.count, SMALL),
    "one awaited turn": lambda store: store.read(awaited_turns.find, key("a", 0, 0, SMALL)),
    "whether a wait ends": lambda store: store.read(waits.ends_next),
    "what is due": lambda store: store.take_due(),
    "what callers said to this node": lambda store: store.read(awaited_turns.said_to, store.node_id),
    "what of a key waits": lambda store: store.read(usage.unfinished_of, "alice"),
    "words of a caller": lambda store: store.say(DEMAND.said(key("a", 0, 0, SMALL), "Hello.", (), NOW, NOW)),
}


@pytest.mark.system
async def test_no_query_about_one_row_scans_a_whole_table(planning: Planning) -> None:
    """Of a job, a conversation, a turn, or the next wait that is over; all of them in one test, since it fills tables.

    ``coalesce(?, column)`` causes such a scan: no index helps with it.
    """
    database, plans, analyze = planning
    with open_store(database) as store:
        await fill(store)
        analyze()
        walked = {}
        for what, ask in ASKED.items():
            plans.found.clear()
            await ask(store)
            found = [(sql, line) for sql, plan in plans.found if not sql.startswith(SHIFT) for line in walks(plan)]
            if found:
                walked[what] = found
    assert walked == {}


@pytest.mark.system
async def test_time_without_a_running_node_is_added_through_the_index_of_waits(planning: Planning) -> None:
    """Turns awaited for ever are not in that index, however many there are."""
    database, plans, analyze = planning
    with open_store(database) as store:
        await fill(store)
        await store.write(lambda connection: connection.execute("UPDATE waits SET seen = seen - 500"))
        await store.write(
            lambda connection: connection.execute("UPDATE awaited_turns SET until = NULL WHERE job_id <> 'small'")
        )
        analyze()
        plans.found.clear()
        await store.take_due()
    shifting = [plan for sql, plan in plans.found if sql.startswith(SHIFT)]
    assert len(shifting) == 1
    assert "awaited_turns_until" in shifting[0], shifting

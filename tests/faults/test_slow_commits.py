"""Commits that outlast their connection, as on a server with a slow disk or replicas that have to agree."""

import random
import threading
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime

import anyio
import anyio.to_thread
import pytest

from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.measures import UsageCounts
from service.errors import StoreUnavailable
from service.store import event_rows, usage
from service.store.databases.postgres import PostgresConnection, PostgresDatabase
from service.store.records import ConversationMoved, RequestUsed, TurnMoved, UsageKey
from service.store.store import open_store
from tests.faults.test_postgres import member
from tests.harness.jobs import agent, job, key
from tests.harness.postgres import PostgresServer
from tests.harness.stored import new
from tests.harness.waiting import wait_until

NOW = datetime(2026, 11, 24, 9, 0, tzinfo=UTC)
COMMITS, SOAK_COMMITS = 16, 1000
COMMIT_S, SOAK_COMMIT_S = 0.4, 3.0
# A constraint that is checked at the commit: the transaction is still open while its connection is long gone.
SLOW = """
CREATE FUNCTION slow() RETURNS trigger AS $$ BEGIN PERFORM pg_sleep(random() * {most_s}); RETURN NULL; END $$
LANGUAGE plpgsql;
CREATE CONSTRAINT TRIGGER slow AFTER UPDATE OF last_write ON nodes DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION slow();
"""


class CutDatabase(PostgresDatabase):
    """A database whose writer's connection can be cut as by a network: the server goes on for a while."""

    writer: PostgresConnection | None = None

    def connect_writer(self) -> PostgresConnection:
        self.writer = super().connect_writer()
        return self.writer

    def cut_after(self, seconds: float) -> None:
        """Cut the connection at a random moment, without waiting for a condition."""
        threading.Event().wait(seconds)
        self.cut()

    def cut(self) -> None:
        if self.writer is not None:
            self.writer.cut()


@pytest.mark.system
async def test_a_commit_that_outlasts_its_connection_is_made_once(
    postgres: PostgresServer, request: pytest.FixtureRequest
) -> None:
    """Cut at any moment: nothing is doubled, nothing is lost, usage is exact (promises.md, "Never")."""
    is_soak = request.config.getoption("--soak")
    commits, most_s = (SOAK_COMMITS, SOAK_COMMIT_S) if is_soak else (COMMITS, COMMIT_S)
    url, chance = postgres.new_database(), random.Random(20261124)  # noqa: S311
    database = CutDatabase(url, 15.0, ("m",))
    database.prepare()
    postgres.execute(SLOW.format(most_s=most_s), database=url)
    durable: Counter[int] = Counter()
    with open_store(database) as store:
        async with member(store, url, 15.0):
            stored, claims, _ = await store.post(new(job(agent("a"), rounds=commits)), claims=True)
            assert [claim.conversation_id for claim in claims] == ["c0"]
            for number in range(commits):
                moved = TurnMoved(key=key("a", number), state=TurnState.READY, worker=None, at=NOW)
                whose = UsageKey(day="2026-11-24", key_name="k", job_id=stored.id, agent="a", model="m")
                used = RequestUsed(used=(whose, UsageCounts(attempts=1, prompt_tokens=100)))
                store.append_nowait([moved, used], lambda number=number: durable.update([number]))  # type: ignore[misc]
                await anyio.to_thread.run_sync(database.cut_after, chance.uniform(0, most_s))
                await wait_until(lambda number=number: durable[number] == 1, "it is durable", limit_s=120)  # type: ignore[misc]
            events, _ = await store.read(event_rows.listed, stored.id, 0, 10 * commits)
            rows = await store.read(usage.report, (), None, None, None, 10)
            ended = ConversationMoved(
                job_id=stored.id, conversation_id="c0", state=ConversationState.CANCELLED, reason=None, at=NOW
            )
            assert await store.append([ended])
    assert sorted(durable.elements()) == list(range(commits))
    assert [event.kind for event in events].count("turn") == commits
    assert [(counts.attempts, counts.prompt_tokens) for _, counts in rows] == [(commits, 100 * commits)]


async def test_a_node_that_always_writes_keeps_its_lease(postgres: PostgresServer) -> None:
    """Its row is locked whenever another call would renew it, so each of its writes renews it."""
    url, lease_s = postgres.new_database(), 0.6
    PostgresDatabase(url, lease_s, ("m",)).prepare()
    whose = UsageKey(day="2026-11-24", key_name="k", job_id="", agent="request", model="m")
    left: list[float] = []
    with open_store(PostgresDatabase(url, lease_s, ("m",))) as store:
        await store.flush()
        until = anyio.current_time() + 3 * lease_s
        while anyio.current_time() < until:
            assert await store.append([RequestUsed(used=(whose, UsageCounts(attempts=1)))])
            row = postgres.execute("SELECT extract(epoch FROM lease_until - now()) FROM nodes", database=url)[0][0]
            left.append(float(str(row)))
    assert min(left) > lease_s / 2


async def test_a_member_whose_first_write_is_cut_is_still_a_member(postgres: PostgresServer) -> None:
    """It registers before it writes: the first group's outcome is looked up by a row that exists."""
    url = postgres.new_database()
    database = CutDatabase(url, 15.0, ("m",))
    database.prepare()
    postgres.execute(SLOW.format(most_s=0.5), database=url)
    with open_store(database) as store:

        async def post() -> None:
            with suppress(StoreUnavailable):  # it may be stored all the same
                await store.post(new(job(agent("a"))), claims=False)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await wait_until(lambda: database.writer is not None, "it writes")
            await anyio.to_thread.run_sync(database.cut)
        await store.flush()
        assert postgres.execute("SELECT count(*) FROM jobs", database=url)[0][0] in {0, 1}

"""Faults of a database on another machine: silent connections, deadlocks, long writes."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

import anyio
import anyio.from_thread
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from service.errors import StoreUnavailable
from service.store import job_rows
from service.store.cluster import Cluster
from service.store.databases import membership_shared
from service.store.databases.membership_shared import CHANNEL, NOTICE_S
from service.store.databases.postgres import PostgresDatabase
from service.store.news import LeaseEnding, LeaseLost, LeaseRenewed, NodeReport, StoreEvent, StoreTroubled, WorkWaiting
from service.store.store import Store, open_store
from tests.harness.jobs import agent, job
from tests.harness.postgres import PostgresServer
from tests.harness.stored import new
from tests.harness.waiting import LIMIT_S, wait_until

SILENCE_S = 1.0


class Proxy:
    """Forwards bytes; a silenced connection forwards nothing more, and is never closed."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._gates: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def silence(self) -> None:
        """Silence the present connections; new ones work."""
        for gate in self._gates:
            gate.clear()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate = asyncio.Event()
        gate.set()
        self._gates.append(gate)
        its_reader, its_writer = await asyncio.open_unix_connection(self._socket)
        for source, target in ((reader, its_writer), (its_reader, writer)):
            task = asyncio.create_task(_pump(source, target, gate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    try:
        while data := await source.read(1 << 16):
            await gate.wait()
            target.write(data)
            await target.drain()
    except OSError:
        pass
    finally:
        target.close()


@contextmanager
def proxied(url: str) -> Iterator[tuple[Proxy, anyio.from_thread.BlockingPortal, str]]:
    """Reach a database over a proxy for a block, whose loop runs in its own thread."""
    known = conninfo_to_dict(url)
    proxy = Proxy(f"{known['host']}/.s.PGSQL.{known.get('port', 5432)}")
    with anyio.from_thread.start_blocking_portal() as portal:
        port = portal.call(proxy.listen)
        try:
            yield proxy, portal, make_conninfo(url, host="127.0.0.1", port=port)
        finally:
            portal.call(proxy.close)


@asynccontextmanager
async def member(store: Store, url: str, lease_s: float) -> AsyncIterator[Counter[type[StoreEvent]]]:
    """Keep a node's lease for a block."""
    told: Counter[type[StoreEvent]] = Counter()
    await store.flush()
    cluster = Cluster(url, lease_s, lambda: NodeReport(node_id=store.node_id, models=["m"], counts={}))
    async with anyio.create_task_group() as tasks:
        await tasks.start(cluster.run, lambda event: told.update([type(event)]))
        await wait_until(lambda: told[LeaseRenewed] and told[WorkWaiting], "it renews and listens")
        yield told
        tasks.cancel_scope.cancel()


async def test_a_renewed_lease_returns_the_other_members(postgres: PostgresServer) -> None:
    """From the first renewal on: conversations without a node are ended by this knowledge."""
    url, seen = postgres.new_database(), list[frozenset[str]]()
    PostgresDatabase(url, 15.0, ("m",)).prepare()
    with open_store(PostgresDatabase(url, 15.0, ("far",))) as other, open_store(PostgresDatabase(url, 15.0, ())) as own:
        await other.flush()
        await own.flush()
        cluster = Cluster(url, 15.0, lambda: NodeReport(node_id=own.node_id, models=[], counts={}))
        async with anyio.create_task_group() as tasks:
            await tasks.start(
                cluster.run, lambda event: seen.append(cluster.models()) if isinstance(event, LeaseRenewed) else None
            )
            await wait_until(lambda: seen, "the lease is renewed")
            tasks.cancel_scope.cancel()
    assert seen[0] == {"far"}


@pytest.mark.system
async def test_a_silent_connection_is_given_up(postgres: PostgresServer) -> None:
    """Neither side closes it, and the server cannot.

    Waiting calls are refused after a while; then the store works again.
    """
    with proxied(postgres.new_database()) as (proxy, portal, url), anyio.fail_after(LIMIT_S):
        database = PostgresDatabase(url, 15.0, ("m",), silence_s=SILENCE_S)
        database.prepare()
        with open_store(database) as store:
            await store.post(new(job(agent("a"), name="before")), claims=False)
            await store.read(job_rows.listed, None, 10, None)
            portal.call(proxy.silence)
            with pytest.raises(StoreUnavailable):
                await store.post(new(job(agent("a"), name="refused")), claims=False)
            assert len(await store.read(job_rows.listed, None, 10, None)) == 1
            await wait_until(lambda: store.trouble is None, "it is well again")
            await store.post(new(job(agent("a"), name="after")), claims=False)
            names = {stored.name for stored in await store.read(job_rows.listed, None, 10, None)}
            assert names == {"before", "after"}


async def test_keys_in_another_order_deadlock_no_caller(postgres: PostgresServer) -> None:
    """One of two nodes gives way to the other, and writes again: no caller notices."""
    url = postgres.new_database()
    PostgresDatabase(url, 15.0, ("m",)).prepare()
    keys = [f"k:{number}" for number in range(64)]
    told: list[StoreEvent] = []
    ids: dict[str, set[str]] = {key: set() for key in keys}
    with open_store(PostgresDatabase(url, 15.0, ("m",))) as one, open_store(PostgresDatabase(url, 15.0, ("m",))) as two:

        async def post(store: Store, key: str) -> None:
            stored, _, _ = await store.post(new(job(agent("a"), name=f"{store.node_id}-{key}"), key), claims=False)
            ids[key].add(stored.id)

        for store in (one, two):
            store.subscribe(told.append)
            await store.flush()
        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(post, one, key)
            for key in reversed(keys):
                tasks.start_soon(post, two, key)
    assert not [event for event in told if isinstance(event, StoreTroubled)]
    assert all(len(of_key) == 1 for of_key in ids.values())


@pytest.mark.system
async def test_a_long_write_holds_the_lease(postgres: PostgresServer) -> None:
    """It locks the node's own row: the lease cannot be renewed meanwhile, and no node can take over either."""
    url, lease_s = postgres.new_database(), 1.0
    PostgresDatabase(url, lease_s, ("m",)).prepare()
    with (
        open_store(PostgresDatabase(url, lease_s, ("m",))) as one,
        open_store(PostgresDatabase(url, 9.0, ("m",))) as two,
    ):
        async with member(one, url, lease_s) as told, member(two, url, 9.0):
            began_at = time.monotonic()
            await one.write(lambda connection: connection.execute("SELECT pg_sleep(?)", (3 * lease_s,)).fetchone())
            assert time.monotonic() - began_at >= 3 * lease_s
            renewed = told[LeaseRenewed]
            await wait_until(lambda: told[LeaseRenewed] > renewed, "it is renewed again")
            await one.flush()
            assert (told[LeaseEnding], told[LeaseLost]) == (0, 0)


async def test_the_write_of_a_frozen_node_is_rolled_back_in_time(postgres: PostgresServer) -> None:
    """Its own row is locked as long as its transaction is open, and no node takes over from it meanwhile."""
    database = PostgresDatabase(postgres.new_database(), 0.2, ("m",))
    postgres.execute("CREATE TABLE words (number INT, word TEXT)", database=database.url)
    with closing(database.connect_writer()) as connection:
        connection.begin()
        connection.execute("SELECT pg_advisory_xact_lock(1)")
        connection.execute_many("INSERT INTO words (number, word) VALUES (?, ?)", [(1, "a"), (2, None), (3, "c")])
        locks = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory'"
        assert postgres.execute(locks, database=database.url)
        await wait_until(lambda: not postgres.execute(locks, database=database.url), "its transaction is over")


async def test_options_of_an_address_hold_for_every_connection(postgres: PostgresServer) -> None:
    """Ours are added to ``options`` of the address, for example a schema, and do not replace it."""
    url = postgres.new_database()
    postgres.execute("CREATE SCHEMA rh", database=url)
    address = make_conninfo(url, options="-c search_path=rh")
    PostgresDatabase(address, 15.0, ("m",)).prepare()
    tables = postgres.execute("SELECT DISTINCT schemaname FROM pg_tables WHERE tablename = 'nodes'", database=url)
    assert tables == [("rh",)]
    with open_store(PostgresDatabase(address, 15.0, ("m",))) as store:
        async with member(store, address, 15.0) as told:
            await wait_until(lambda: told[LeaseRenewed] > 1, "the lease is renewed")
            timeout = await store.read(lambda connection: connection.execute("SHOW statement_timeout").fetchone())
            assert timeout == ("30s",)


async def test_other_nodes_are_notified_of_every_job_ten_times_a_second_at_most(postgres: PostgresServer) -> None:
    """PostgreSQL commits notices one after the other: one in each write would queue the writes of all nodes.

    Source: specification, "Notices".
    """
    url, count = postgres.new_database(), 60
    database = PostgresDatabase(url, 5.0, ["m"])
    database.prepare()
    notices, jobs = 0, set[str]()
    with psycopg.connect(url, autocommit=True) as listener, open_store(database) as store:
        listener.execute(f"LISTEN {CHANNEL}")
        began_at = time.monotonic()
        for number in range(count):
            await store.post(new(job(agent("a"), name=f"j{number}")), claims=False)
        for notice in listener.notifies(timeout=LIMIT_S):
            notices += 1
            document = json.loads(notice.payload)
            assert document["work"]
            jobs |= set(document["jobs"])
            if len(jobs) == count:
                break
    assert jobs == {f"j{number}" for number in range(count)}
    assert notices <= (time.monotonic() - began_at) / NOTICE_S + 1


async def test_a_node_that_leaves_notifies_the_others_in_its_last_write(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may end or become another program before a later notice, and the others look once a second."""
    monkeypatch.setattr(membership_shared, "NOTICE_S", 1e6)  # no later one comes
    url = postgres.new_database()
    database = PostgresDatabase(url, 5.0, ["m"])
    database.prepare()
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute(f"LISTEN {CHANNEL}")
        with open_store(database) as store:
            await store.post(new(job(agent("a"))), claims=True)
            await store.leave_claims()
            notices = listener.notifies(timeout=LIMIT_S, stop_after=1)
            assert [json.loads(notice.payload)["work"] for notice in notices] == [True]

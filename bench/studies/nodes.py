"""Many nodes on one PostgreSQL: how long a claim takes, and what the database's processes use.

The nodes are stores with leases and notices, without HTTP and engines. A turn of each conversation is recorded every
second; new jobs keep all nodes busy at the given rate. The server waits for its disk.

    python -m bench.studies.nodes [--nodes 32] [--processes 4] [--turns 200] [--seconds 60]
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import count
from statistics import median, quantiles
from typing import Any, Final

import anyio
import psutil
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Job, JobId, TurnKey
from service.conversations.job.states import ConversationState
from service.store.cluster import Cluster
from service.store.databases.database import Claim
from service.store.databases.postgres import PostgresDatabase
from service.store.news import NodeReport, StoreEvent, WorkWaiting
from service.store.records import ConversationMoved, TurnEnded
from service.store.store import Store, open_store
from tests.harness.postgres import PostgresServer, running_postgres
from tests.harness.stored import new, turn

MODEL: Final = "m"
TURN_S: Final = 1.0
ROUNDS: Final = 5
CONVERSATIONS: Final = 8
LEASE_S: Final = 10.0
LOOK_S: Final = 1.0  # a node looks for work without a notice too
WARM_S: Final = 5.0
CONNECTIONS: Final = 400
Document = dict[str, Any]


class LoadedNode:
    """A node that runs conversations without engines."""

    def __init__(self, store: Store, room: int) -> None:
        self._store = store
        self._room = room  # conversations at once
        self._running = 0
        self._hint = anyio.Event()
        self.claims_s: list[float] = []
        self.turns = 0

    def hear(self, event: StoreEvent) -> None:
        """Look for work after a notice."""
        if isinstance(event, WorkWaiting):
            self._hint.set()

    def report(self) -> NodeReport:
        """Return what its lease is renewed with."""
        return NodeReport(node_id=self._store.node_id, models=[MODEL], counts={})

    async def run(self) -> None:
        """Claim and run conversations for ever."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._hint, claims = anyio.Event(), list[Claim]()
                if self._running < self._room:
                    began_at = time.monotonic()
                    claims = await self._store.claim([MODEL], self._room - self._running)
                    self.claims_s.append(time.monotonic() - began_at)
                self._running += len(claims)
                for claim in claims:
                    tasks.start_soon(self._talk, claim)
                with anyio.move_on_after(LOOK_S):
                    await self._hint.wait()

    async def _talk(self, claim: Claim) -> None:
        now = datetime.now(UTC)
        for number in range(ROUNDS):
            await anyio.sleep(TURN_S)
            key = TurnKey(claim.job_id, claim.conversation_id, "a", number)
            ended = TurnEnded(turn=replace(turn("a", text="Some words. " * 40), key=key), at=now)
            await self._store.append([ended])
            self.turns += 1
        done = ConversationState.COMPLETED
        name, job = claim.conversation_id, claim.job_id
        await self._store.append([ConversationMoved(job_id=job, conversation_id=name, state=done, reason=None, at=now)])
        self._running -= 1
        self._hint.set()


async def _post(store: Store, jobs_per_s: float, process: int) -> None:
    agent = Agent(id="a", role="a", model=MODEL, system="")
    talks = tuple(Conversation(id=f"c{number}", prompt="Talk.", rounds=ROUNDS) for number in range(CONVERSATIONS))
    for number in count():
        name = JobId(f"job-{process}-{number}")
        await store.post(new(Job(id=name, name=name, agents=(agent,), conversations=talks)), claims=False)
        await anyio.sleep(1 / jobs_per_s)


async def _run_nodes(url: str, options: argparse.Namespace) -> list[LoadedNode]:
    here = options.nodes // options.processes
    room = round(2 * options.turns * TURN_S / options.nodes) + 1
    with ExitStack() as stack:
        nodes = list[LoadedNode]()
        async with anyio.create_task_group() as tasks:
            stores = [stack.enter_context(open_store(PostgresDatabase(url, LEASE_S, [MODEL]))) for _ in range(here)]
            for store in stores:
                await store.flush()
                nodes.append(node := LoadedNode(store, room))
                store.subscribe(node.hear)
                cluster = Cluster(url, LEASE_S, node.report)
                await tasks.start(cluster.run, node.hear)
                tasks.start_soon(node.run)
            jobs_per_s = options.turns / ROUNDS / CONVERSATIONS / options.processes
            tasks.start_soon(partial(_post, stores[0], jobs_per_s, options.process))
            await anyio.sleep(WARM_S)
            for node in nodes:
                node.claims_s.clear()
                node.turns = 0
            await anyio.sleep(options.seconds)
            tasks.cancel_scope.cancel()
    return nodes


@contextmanager
def _server() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        server.execute("ALTER SYSTEM SET fsync = on")
        server.execute(f"ALTER SYSTEM SET max_connections = {CONNECTIONS}")
        server.stop()
        server.start()
        yield server


# A process of the server that stays: that of the question itself may have ended by then.
CHECKPOINTER = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'checkpointer'"


def _processes_of(server: PostgresServer) -> Sequence[psutil.Process]:
    leader = psutil.Process(int(str(server.execute(CHECKPOINTER)[0][0]))).parent()
    assert leader is not None
    return [leader, *leader.children(recursive=True)]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes if each.is_running())


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--turns", type=float, default=200.0, help="a second, by all nodes")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        nodes = anyio.run(_run_nodes, options.url, options)
        claims_s = [each for node in nodes for each in node.claims_s]
        print(json.dumps({"claims_s": claims_s, "turns": sum(node.turns for node in nodes)}))
        return
    with _server() as server:
        url = server.new_database()
        PostgresDatabase(url, LEASE_S, [MODEL]).prepare()
        command = [sys.executable, "-m", "bench.studies.nodes", *sys.argv[1:], "--url", url, "--process"]
        children = [
            subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE) for number in range(options.processes)
        ]
        time.sleep(WARM_S + options.seconds / 4)
        backends = _processes_of(server)
        began_at, before_s = time.monotonic(), _cpu_s(backends)
        time.sleep(options.seconds / 2)
        share = (_cpu_s(backends) - before_s) / (time.monotonic() - began_at)
        found: list[Document] = [json.loads(child.communicate()[0]) for child in children]
    claims_s = [each for one in found for each in one["claims_s"]]
    turns = sum(one["turns"] for one in found) / options.seconds
    print(f"{options.nodes} nodes in {options.processes} processes: {turns:.0f} turns a second; {len(claims_s)} claims,"
          f" p50 {1000 * median(claims_s):.1f} ms, p99 {1000 * quantiles(claims_s, n=100)[98]:.1f} ms; the database"
          f" uses {share:.2f} of a core")  # fmt: skip


if __name__ == "__main__":
    main()

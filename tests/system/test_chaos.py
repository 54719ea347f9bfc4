"""PostgreSQL and nodes fail under load: throughput recovers, no work is lost, and no turn runs twice."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tests.harness.audit import audit, under_load
from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

LEASE_S = 3.0
WINDOW_S = 2.0
BACK_S = 15.0
Ports = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two nodes on one store, and the requests to their engines."""

    nodes: list[Service]
    server: PostgresServer
    url: str
    records: list[Path]

    def rate(self) -> float:
        """Return the requests to engines per second over the last moments."""
        since = time.time() - WINDOW_S
        texts = [record.read_text().rpartition("\n")[0] for record in self.records if record.exists()]  # whole lines
        lines = [line for text in texts for line in text.splitlines()[-500:]]
        asked: list[float] = [json.loads(line)["at"] for line in lines]
        return sum(at > since for at in asked) / WINDOW_S


@contextmanager
def cluster(folder: Path, ports: Ports, server: PostgresServer) -> Iterator[Cluster]:
    url = server.new_database()
    store = {"url": url, "lease_s": LEASE_S}
    records = [folder / "record-0", folder / "record-1"]
    with ExitStack() as stack:
        nodes = []
        for number, record in enumerate(records):
            flags: Document = {"tokens": 3, "interval": 0.1, "record": str(record)}
            model = {"m": scripted_model(ports(1), slots=4, **flags)}
            folder_of = folder / f"node-{number}"
            nodes.append(stack.enter_context(serving(folder_of, ports(1), model, {"drain_s": 1}, store=store)))
        yield Cluster(nodes=nodes, server=server, url=url, records=records)


def last(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until, "it lasts for a while")


def restart_server(chaos: Cluster) -> None:
    """Stop the server for longer than a lease lasts."""
    chaos.server.stop("immediate")
    last(LEASE_S + 2)
    chaos.server.start()


def kill_backends(chaos: Cluster) -> None:
    assert chaos.server.kill_backends(chaos.url) > 0


def exhaust_connections(chaos: Cluster) -> None:
    """Take every free connection, make the nodes lose theirs, take those too, and release all after a while."""
    with ExitStack() as stack:

        def take_all() -> None:
            with pytest.raises(psycopg.OperationalError, match=r"too many|remaining connection slots"):
                while True:
                    stack.enter_context(psycopg.connect(chaos.url, application_name="greedy"))

        first = stack.enter_context(psycopg.connect(chaos.url, application_name="greedy"))
        take_all()
        first.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'roundhouse'")
        take_all()
        last(LEASE_S)


def kill_a_node(chaos: Cluster) -> None:
    """Kill a node again and again, each time as soon as it is back."""
    for _ in range(4):
        chaos.nodes[0].kill()
        chaos.nodes[0].start(ready=False)


@pytest.mark.parametrize("fault", [restart_server, kill_backends, exhaust_connections, kill_a_node])
def test_throughput_recovers_and_nothing_is_lost(
    tmp_path: Path, free_ports: Ports, postgres: PostgresServer, fault: Callable[[Cluster], None]
) -> None:
    """Within 15 s of the fault's end it is at the old level; each turn is recorded once."""
    with cluster(tmp_path, free_ports, postgres) as chaos:
        with under_load([node.url for node in chaos.nodes]) as load:
            wait_for(lambda: len(load.acknowledged) > 10, "there is load")
            before = chaos.rate()
            fault(chaos)
            back_s = wait_for(lambda: chaos.rate() >= 0.8 * before, f"{before:g} turns/s are back", BACK_S)
            print(f"{fault.__name__}: {before:g} turns/s before, back after {back_s:.1f} s")
        counts = audit(load, chaos.nodes[1].url)
        assert counts["turns"] > 0

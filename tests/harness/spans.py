"""Nodes on one database whose model spans several of them, each with parts of a scripted engine."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psutil

from tests.harness.postgres import PostgresServer
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import is_alive, wait_for

LEASE_S: Final = 2.0
ENGINE: Final = [sys.executable, "-I", "-S", str(PROGRAMS / "gang_engine.py"), "serve"]
SERVE_S: Final = 60.0  # time that a generation gets to serve


class SpanCluster:
    """Nodes on one database, whose model spans two of them."""

    def __init__(self, nodes: list[Service], doubles: Path, postgres: PostgresServer, database: str) -> None:
        self.nodes, self._doubles, self.postgres, self.database = nodes, doubles, postgres, database

    def span(self, through: int = 0) -> Document:
        spans: list[Document] = self.nodes[through].get("/v1/spans")["spans"]
        return spans[0] if spans else {"generation": 0, "is_running": False, "members": []}

    def wait_serving(self, after: int = 0, among: list[int] | None = None, limit_s: float = SERVE_S) -> Document:
        """Return the span once a generation later than ``after`` serves."""
        asked = among if among is not None else list(range(len(self.nodes)))

        def serves() -> bool:
            span = self.span(asked[0])
            is_next = span["is_running"] and span["generation"] > after
            return is_next and any(self.worker(each)["state"] == "ready" for each in asked)

        wait_for(serves, f"a generation after {after} serves", limit_s)
        return self.span(asked[0])

    def worker(self, node: int) -> Document:
        found: Document = self.nodes[node].get("/v1/workers")["workers"][0]
        return found

    def leader(self) -> int:
        return next(each for each in range(len(self.nodes)) if self.worker(each)["state"] == "ready")

    def follower(self) -> int:
        """Return a node that runs a part of the engine and does not lead it."""
        parts = (each for each in range(len(self.nodes)) if self.worker(each)["state"] == "starting")
        return next(each for each in parts if self.worker(each)["pid"] is not None)

    def tree(self, node: int) -> list[psutil.Process]:
        """Return a node's guardian, its engine and all processes below."""
        pid = self.worker(node)["pid"]
        guardian = psutil.Process(pid).parent()
        assert guardian is not None
        return [guardian, *guardian.children(recursive=True)]

    @property
    def doubles(self) -> str:
        """What the parts of engines noted that found their device taken."""
        return self._doubles.read_text() if self._doubles.exists() else ""


@contextmanager
def running_spans(
    folder: Path,
    free_ports: Callable[[int], int],
    postgres: PostgresServer,
    count: int,
    more: Callable[[int], Document] = lambda _number: {},
) -> Iterator[SpanCluster]:
    """Run nodes for a block; ``more`` gives further models of a node, by its number."""
    database, doubles = postgres.new_database(), folder / "doubles"
    with ExitStack() as stack:
        nodes = []
        for number in range(count):
            home = folder / f"node-{number}"
            home.mkdir()
            model = {
                "engine": "vllm",
                "model": "org/made",
                "command": ENGINE,
                "span": {"nodes": 2},
                "slots": 2,
                "args": {"tensor-parallel-size": 2, "device-folder": str(home), "record-doubles": str(doubles)},
                "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
            }
            node = serving(
                home,
                free_ports(1),
                {"m": model, **more(number)},
                {"drain_s": 1, "address": "127.0.0.1"},
                store={"url": database, "lease_s": LEASE_S},
                ready=False,
            )
            nodes.append(stack.enter_context(node))
        yield SpanCluster(nodes, doubles, postgres, database)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, (each.pid for each in processes)))

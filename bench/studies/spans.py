"""Spans under random cuts: kills, freezes and cuts of nodes, engines, guardians and the database, one after another.

Three or four nodes share a model that spans two of them, with parts of a scripted engine that lock a device each. Jobs
run all the time. After each cut a generation must serve again; at the end every turn must be recorded once, no part may
have found its device taken, and no process of a dead generation may be left.

    python -m bench.studies.spans [--cuts 200] [--nodes 4] [--seed 1]
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import psutil

from tests.harness.ports import find_ports
from tests.harness.postgres import running_postgres
from tests.harness.service import Service, debate
from tests.harness.spans import LEASE_S, SpanCluster, gone, running_spans

GONE_S: Final = 2.0
BACK_S: Final = 60.0
PARTS: Final = 2  # a guardian and its engine; the worker comes a moment later
CONVERSATIONS: Final = 4
ROUNDS: Final = 3
KINDS: Final = (
    *("worker", "engine", "guardian", "service", "restart"),
    *("freeze part", "freeze service", "freeze node", "cut database", "stop database"),
)


class Cuts:
    """Makes one cut after another, and measures what follows."""

    def __init__(self, cluster: SpanCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.back_s: list[float] = []
        self.jobs: list[str] = []

    def make(self) -> None:
        """Make one cut of a random kind, and wait until a generation serves."""
        kind = self._chance.choice(KINDS)
        self._post()
        before, hit, tree = self._choose()
        started_at = time.monotonic()
        getattr(self, f"_{kind.split()[0]}")(kind, hit, tree)
        self.done[kind] += 1
        span = self._wait_serving()
        self.back_s.append(time.monotonic() - started_at)
        if kind == "cut database" and span != before:
            self.faults.append(f"{kind}: ended a generation")
        if span["generation"] != before["generation"]:
            self._expect_gone(tree, kind)

    def _wait_serving(self) -> dict[str, Any]:
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            with suppress(Exception):
                return self._cluster.wait_serving()
            time.sleep(0.1)
        raise TimeoutError("no generation serves")

    def _choose(self) -> tuple[dict[str, Any], int, list[psutil.Process]]:
        """Return the span that serves, one of its nodes, and the processes of that node's part."""
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            with suppress(StopIteration, psutil.Error, httpx.HTTPError):
                span = self._wait_serving()
                hit = self._chance.choice([self._cluster.leader(), self._cluster.follower()])
                if len(tree := self._cluster.tree(hit)) > PARTS:
                    return span, hit, tree
        raise TimeoutError("no generation is whole")

    def _post(self) -> None:
        with suppress(Exception):  # the database may be away
            node = self._chance.choice(self._cluster.nodes)
            self.jobs.append(node.post_job(debate(conversations=CONVERSATIONS, rounds=ROUNDS)))

    # The kinds

    def _kill(self, pid: int, tree: list[psutil.Process], kind: str) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._expect_gone(tree, kind)

    def _expect_gone(self, tree: list[psutil.Process], kind: str) -> None:
        until = time.monotonic() + GONE_S
        while not gone(tree) and time.monotonic() < until:
            time.sleep(0.02)
        if not gone(tree):
            self.faults.append(f"{kind}: not gone within {GONE_S:g} s")

    def _worker(self, kind: str, _hit: int, tree: list[psutil.Process]) -> None:
        self._kill(tree[-1].pid, tree, kind)

    def _engine(self, kind: str, _hit: int, tree: list[psutil.Process]) -> None:
        self._kill(tree[1].pid, tree, kind)

    def _guardian(self, kind: str, _hit: int, tree: list[psutil.Process]) -> None:
        self._kill(tree[0].pid, tree, kind)

    def _service(self, kind: str, hit: int, tree: list[psutil.Process]) -> None:
        node = self._cluster.nodes[hit]
        self._kill(_pid(node), tree, kind)
        assert node.process is not None
        node.process.wait()
        node.start(ready=False)

    def _restart(self, kind: str, hit: int, tree: list[psutil.Process]) -> None:
        node = self._cluster.nodes[hit]
        node.stop()
        self._expect_gone(tree, kind)
        node.start(ready=False)

    def _freeze(self, kind: str, hit: int, tree: list[psutil.Process]) -> None:
        service = psutil.Process(_pid(self._cluster.nodes[hit]))
        frozen = {"part": tree, "service": [service], "node": [service, *tree]}[kind.split()[1]]
        for each in frozen:
            each.suspend()
        time.sleep(self._chance.uniform(0.5, 3) * LEASE_S)
        for each in frozen:
            with suppress(psutil.NoSuchProcess):
                each.resume()

    def _cut(self, _kind: str, _hit: int, _tree: list[psutil.Process]) -> None:
        self._cluster.postgres.kill_backends(self._cluster.database)

    def _stop(self, _kind: str, _hit: int, _tree: list[psutil.Process]) -> None:
        self._cluster.postgres.stop("immediate")
        time.sleep(self._chance.uniform(0.2, 3) * LEASE_S)
        self._cluster.postgres.start()


def _pid(node: Service) -> int:
    assert node.process is not None
    return node.process.pid


def _count_jobs(cuts: Cuts, cluster: SpanCluster) -> tuple[int, int]:
    """Return the jobs that completed, and the turns that are recorded not exactly once."""
    completed = wrong = 0
    for job in cuts.jobs:
        ended = cluster.nodes[0].wait_ended(job, 120)
        completed += ended["state"] == "completed"
        rows = cluster.postgres.execute(
            "SELECT conversation_id, agent, round, count(*) FROM turns WHERE job_id = %s GROUP BY 1, 2, 3",
            job,
            database=cluster.database,
        )
        wrong += sum(row[3] != 1 for row in rows) + (ended["progress"]["turns"]["total"] - len(rows))
    return completed, wrong


def main() -> None:
    """Print what the cuts did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    first = find_ports(options.nodes)
    ports = iter(range(first, first + options.nodes))
    with (
        tempfile.TemporaryDirectory() as name,
        running_postgres() as postgres,
        running_spans(Path(name), lambda _count: next(ports), postgres, options.nodes) as cluster,
    ):
        cuts = Cuts(cluster, random.Random(options.seed))
        for number in range(options.cuts):
            cuts.make()
            if sys.stderr.isatty() or number % 20 == 0:
                print(number, dict(cuts.done), cuts.faults, file=sys.stderr, flush=True)
        completed, wrong = _count_jobs(cuts, cluster)
        print(f"{options.cuts} cuts on {options.nodes} nodes (seed {options.seed}): {dict(sorted(cuts.done.items()))}")
        print(f"a generation served again after p50 {median(cuts.back_s):.1f} s, at most {max(cuts.back_s):.1f} s")
        print(f"{completed} of {len(cuts.jobs)} jobs completed, {wrong} turns not recorded once")
        print(f"{cluster.doubles.count(chr(10))} parts found their device taken; faults: {cuts.faults or 'none'}")


if __name__ == "__main__":
    main()

"""A cluster in one command: on this machine with a database of its own, on a real Slurm, sshd and Ray.

Source: specification, "Clusters".
"""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from service.cluster.own_database import OwnDatabase
from tests.harness.postgres import PostgresServer
from tests.harness.schedulers import Schedulers
from tests.harness.service import ROUNDHOUSE, scripted_model
from tests.harness.waiting import is_alive, wait_for

KEY = "a-key-of-mine-for-clusters"
START_S, GONE_S, COMMAND_S = 120.0, 2.0, 300
IS_ROOT = os.getuid() == 0


class CommandedCluster:
    """The command, in a folder with a configuration, and the processes that it has started."""

    def __init__(self, folder: Path, ports: Callable[[int], int], program: tuple[str, ...] = (ROUNDHOUSE,)) -> None:
        self.folder, self.program = folder, program
        self.port = ports(301)  # four nodes' ports: each is 100 higher
        model = scripted_model(self.port + 50, slots=2)
        server = {"port": self.port, "state_dir": str(folder / "states"), "drain_s": 5}
        document = {"server": server, "store": {"lease_s": 3}, "models": {"m": model}}
        (folder / "roundhouse.yaml").write_text(yaml.safe_dump(document))
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ROUNDHOUSE_")},
            "ROUNDHOUSE_API_KEYS": KEY,
        }

    def run(self, *words: str, status: int | None = 0) -> str:
        command = [*self.program, "cluster", *words]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr + self.logs()
        return done.stdout + done.stderr

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in (self.folder / "roundhouse-cluster").glob("*.log"))

    def nodes(self) -> list[psutil.Process]:
        """Return the services of this cluster."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cmdline()[-2:] == ["service.cli.main", "serve"] and str(self.folder) in str(
                    process.environ()
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def run_job(self, url: str, conversations: int = 12) -> dict[str, object]:
        """Run a job through a node, and return it once it has ended."""
        talks = [{"id": f"c{number}", "prompt": "hello"} for number in range(conversations)]
        job = {"name": "over-all", "agents": [{"id": "a", "model": "m"}], "conversations": talks}
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as client:
            job_id = client.post("/v1/jobs", json=job).json()["id"]
            ended = ("completed", "completed_with_failures", "failed")
            wait_for(lambda: client.get(f"/v1/jobs/{job_id}").json()["state"] in ended, "the job has ended", START_S)
            view: dict[str, object] = client.get(f"/v1/jobs/{job_id}").json()
            return view


def trees_of(nodes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for node in nodes for each in (node, *node.children(recursive=True))]


@pytest.fixture
def cluster(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[CommandedCluster]:
    made = CommandedCluster(tmp_path, free_ports)
    yield made
    if (tmp_path / "roundhouse-cluster" / "cluster.json").exists():
        made.run("down")
    shutil.rmtree(OwnDatabase(tmp_path / "roundhouse-cluster")._home, ignore_errors=True)
    assert made.nodes() == []


def test_a_cluster_here_has_a_database_of_its_own(cluster: CommandedCluster) -> None:
    """Its nodes share jobs; a killed one is started again by ``up``, and ``down`` leaves neither process nor order."""
    if shutil.which("initdb") is None and not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")):
        pytest.skip("no programs of PostgreSQL are installed")
    urls = cluster.run("up", "--on", "here", "--nodes", "2").split()
    assert urls == [f"http://127.0.0.1:{cluster.port + offset}" for offset in (0, 100)]
    assert cluster.run_job(urls[1])["state"] == "completed"
    victim, other = sorted(cluster.nodes(), key=lambda node: node.pid)
    tree = trees_of([victim])
    victim.kill()
    wait_for(lambda: not any(is_alive(each.pid) for each in tree), "nothing of the killed node is left", GONE_S)
    wait_for(lambda: "has not been seen" in cluster.run("status", status=None), "it is missed", START_S)
    assert "1 of 2 nodes run" in cluster.run("status", status=1)
    assert cluster.run("up", "--on", "here", "--nodes", "3").split()[:2] == urls
    assert is_alive(other.pid)
    shown = json.loads(cluster.run("status", "--json"))
    assert (len(shown["nodes"]), shown["placed"]) == (3, {"this machine": "3 of 3 nodes run"})
    assert "a cluster is up with --on here" in cluster.run("up", "--on", "slurm", "--nodes", "2", status=2)
    tree = trees_of(cluster.nodes())
    lock = next((cluster.folder / "roundhouse-cluster").glob("*-1.lock"))
    lock.rename(lock.with_suffix(".away"))
    assert f"run on: http://127.0.0.1:{cluster.port + 100}" in cluster.run("down", status=1), "no node is forgotten"
    lock.with_suffix(".away").rename(lock)
    cluster.run("down")
    assert not any(is_alive(each.pid) for each in tree)
    assert not (cluster.folder / "roundhouse-cluster" / "cluster.json").exists()
    urls = cluster.run("up", "--on", "here", "--nodes", "1").split()
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        assert len(client.get(f"{urls[0]}/v1/jobs").json()["jobs"]) == 1, "the database keeps its jobs"


def test_a_node_that_cannot_start_is_named(cluster: CommandedCluster, postgres: PostgresServer) -> None:
    """With the last lines of its log; what was started is ended by ``down``."""
    cluster.environment["ROUNDHOUSE_STORE_URL"] = "postgresql://127.0.0.1:1/nothing"
    assert "the cluster's database" in cluster.run("up", "--on", "here", "--nodes", "1", status=1)
    with_database(cluster, postgres)
    with socket.create_server(("127.0.0.1", cluster.port)):
        told = cluster.run("up", "--on", "here", "--nodes", "1", status=1)
        assert "a node on" in told
        assert f"cannot listen on 127.0.0.1:{cluster.port}" in told


@pytest.fixture
def schedulers(tmp_path_factory: pytest.TempPathFactory) -> Schedulers:
    return Schedulers(tmp_path_factory.mktemp("schedulers"))


def with_database(cluster: CommandedCluster, postgres: PostgresServer) -> None:
    cluster.environment["ROUNDHOUSE_STORE_URL"] = postgres.new_database()


@pytest.mark.skipif(not IS_ROOT or shutil.which("slurmctld") is None, reason="no Slurm, or not root to start one")
def test_a_cluster_on_slurm(cluster: CommandedCluster, schedulers: Schedulers, postgres: PostgresServer) -> None:
    """Its job runs a node on each machine and has no secret in Slurm's state; ``down`` drains them."""
    with_database(cluster, postgres)
    with schedulers.slurm(cluster.port + 20) as (state, settings):
        cluster.environment["SLURM_CONF"] = settings
        urls = cluster.run("up", "--on", "slurm", "--nodes", "3", "--", "--time=10").split()
        assert len(set(urls)) == 3
        assert "running, job" in (shown := cluster.run("status"))
        assert "node[1-3]" in shown
        assert cluster.run_job(urls[2])["state"] == "completed"
        record = b"".join(path.read_bytes() for path in Path(state).rglob("*") if path.is_file())
        assert b"roundhouse" in record
        assert KEY.encode() not in record
        assert b"postgresql:" not in record
        tree = trees_of(cluster.nodes())
        assert "ended" in cluster.run("down")
        assert not any(is_alive(each.pid) for each in tree)
        assert cluster.logs().count("service.serve: stopped") == 3, "each was drained"
        assert "engine_unreachable" not in cluster.logs(), "no signal has reached an engine"
        assert "a cluster needs" not in cluster.run("up", "--on", "slurm", "--nodes", "1", "--", "--bogus", status=1)
        assert not (cluster.folder / "roundhouse-cluster" / "cluster.json").exists(), "nothing was started"


@pytest.mark.skipif(not IS_ROOT or shutil.which("sshd") is None, reason="no sshd, or not root to start one")
def test_a_cluster_over_ssh(cluster: CommandedCluster, schedulers: Schedulers, postgres: PostgresServer) -> None:
    """Machines are reached by the user's own ssh configuration; one that is not there is named."""
    with_database(cluster, postgres)
    with schedulers.sshd(cluster.port + 20) as settings:
        options = ("--", "-F", settings)
        told = cluster.run("up", "--on", "ssh", "--nodes", "2", "--address", "m1,nowhere", *options, status=1)
        assert "nowhere" in told
        assert not (cluster.folder / "roundhouse-cluster" / "cluster.json").exists()
        assert cluster.nodes() == [], "what was started has ended again"
        urls = cluster.run("up", "--on", "ssh", "--nodes", "2", "--address", "m1,m1", *options).split()
        assert len(set(urls)) == 2
        assert "2 run" in cluster.run("status")
        assert cluster.run_job(urls[0])["state"] == "completed"
        tree = trees_of(cluster.nodes())
        assert cluster.run("down").count("drained") == 2
        assert not any(is_alive(each.pid) for each in tree)


def test_a_cluster_on_ray(
    tmp_path: Path, free_ports: Callable[[int], int], schedulers: Schedulers, postgres: PostgresServer
) -> None:
    """Nodes outlive the command; an actor's death ends its node and its engines, and Ray starts another."""
    with schedulers.ray(free_ports(60)) as (address, program):
        cluster = CommandedCluster(tmp_path, free_ports, program)
        cluster.environment["ROUNDHOUSE_PROGRAM"] = ROUNDHOUSE
        with_database(cluster, postgres)
        try:
            urls = cluster.run("up", "--on", "ray", "--nodes", "2", "--address", address).split()
            assert len(set(urls)) == 2
            assert cluster.run_job(urls[0])["state"] == "completed"
            victim = cluster.nodes()[0]
            tree, actor = trees_of([victim]), victim.parent()
            assert actor is not None
            actor.kill()
            wait_for(lambda: not any(is_alive(each.pid) for each in tree), "nothing of the dead node is left", GONE_S)
            wait_for(lambda: cluster.logs().count("serving at") == 3, "Ray has started another", START_S)
            assert cluster.run("status").count("runs as process") == 2
        finally:
            tree = trees_of(cluster.nodes())
            ended = cluster.run("down")
        assert ended.count("drained") == 2
        assert not any(is_alive(each.pid) for each in tree)
        assert cluster.run("up", "--on", "ray", "--nodes", "5", "--address", "127.0.0.1:1", status=1).count("Ray at")

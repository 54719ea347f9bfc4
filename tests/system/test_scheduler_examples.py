"""Nodes under Ray and Slurm, by the unchanged examples: a Ray of one machine, stand-ins for Slurm's programs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.harness.programs import PROGRAMS
from tests.harness.service import ROUNDHOUSE
from tests.harness.waiting import is_alive, wait_for
from tests.system import deploy_tools

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
START_S, STOP_S = 60.0, 60.0
KEY = "a-key-of-mine"


def configuration(folder: Path, engine_port: object) -> Path:
    file = folder / "roundhouse.yaml"
    models = {"tiny": {"engine": "embedded", "port": engine_port, "slots": 1}}
    file.write_text(yaml.safe_dump({"server": {"drain_s": 5}, "models": models}))
    return file


def workers_at(url: str) -> list[str]:
    """Return the states of a node's workers; none while it does not answer."""
    try:
        answer = httpx.get(f"{url}/v1/workers", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
    except httpx.TransportError:
        return []
    return [worker["state"] for worker in answer.json()["workers"]]


def node_below(process: psutil.Process) -> psutil.Process:
    """Return the node that a process has started; it must have been waited for."""
    (node,) = nodes_below(process)
    return node


def nodes_below(process: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in process.children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if ROUNDHOUSE in words and "serve" in words and "setpriv" not in words[0] and "bash" not in words[0]:
            found.append(child)
    return found


@contextmanager
def running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run an example for a block in a session of its own; nothing of it is left."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            tree = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            process.terminate()
            try:
                process.wait(STOP_S)
            finally:
                for pid in filter(is_alive, tree):
                    os.kill(pid, signal.SIGKILL)
                process.wait(10)


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with stand-ins for the two programs of Slurm that the example calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAMS / "srun.py"} "$@"\n')
    (folder / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    return folder


def test_a_job_of_slurm_runs_a_node_on_each_machine(
    tmp_path: Path, slurm: Path, free_ports: Callable[[int], int]
) -> None:
    """Each has a state of its own, all are listed, and SIGTERM to the batch script drains every one."""
    port, engine_port = free_ports(2), free_ports(2)
    environment = {
        "PATH": f"{slurm}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "USER": "somebody",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SRUN_TASKS": "2",
        "ENGINE_PORT": str(engine_port),
        "ROUNDHOUSE_CONFIG": str(configuration(tmp_path, "${ENGINE_PORT}")),
        "ROUNDHOUSE_API_KEYS": KEY,
        "ROUNDHOUSE_PORT": str(port),
        "ROUNDHOUSE_PROGRAM": ROUNDHOUSE,
        "ROUNDHOUSE_STATES": str(tmp_path / "states"),
    }
    urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
    with running(["bash", str(EXAMPLES / "slurm_nodes.sbatch")], tmp_path, environment) as batch:
        wait_for(lambda: all(workers_at(url) == ["ready"] for url in urls), "both nodes are ready", START_S)
        assert (tmp_path / "roundhouse-42.nodes").read_text() == f"http://node1:{port}\nhttp://node2:{port}\n"
        assert sorted(state.name for state in (tmp_path / "states").iterdir()) == ["0", "1"]
        nodes = [node.pid for node in nodes_below(psutil.Process(batch.pid))]
        assert len(nodes) == 2
        batch.terminate()
        assert batch.wait(STOP_S) == 0, (tmp_path / "log").read_text()
        assert not any(map(is_alive, nodes))
    assert (tmp_path / "log").read_text().count("service.serve: stopped") == 2


def test_a_job_of_slurm_names_missing_programs(tmp_path: Path, slurm: Path) -> None:
    """Before it occupies any machine."""
    script = ["bash", str(EXAMPLES / "slurm_nodes.sbatch")]
    environment = {"PATH": f"{slurm}:/usr/bin:/bin", "USER": "somebody", "ROUNDHOUSE_CONFIG": "x"}
    done = subprocess.run(
        script, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode != 0
    assert "ROUNDHOUSE_API_KEYS: a key" in done.stderr


def test_nodes_under_ray_restart_and_end_with_their_actors(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """A killed node restarts; a node whose actor is killed ends, and restarts with it; SIGTERM ends all."""
    port = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    options = ["--config", str(configuration(tmp_path, free_ports(1))), "--port", str(port), "--address", "local"]
    options += ["--state-dir", str(tmp_path / "state"), "--program", ROUNDHOUSE]
    command = [deploy_tools.ray_python(), str(EXAMPLES / "ray_nodes.py"), *options]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ROUNDHOUSE_API_KEYS": KEY}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}  # its sockets' names must be short
    with running(command, tmp_path, environment) as driver:
        top = psutil.Process(driver.pid)
        wait_for(lambda: workers_at(url) == ["ready"], "the node is ready", START_S)
        first = node_below(top)
        first.kill()
        wait_for(lambda: [node for node in nodes_below(top) if node.pid != first.pid], "another node", START_S)
        wait_for(lambda: workers_at(url) == ["ready"], "it is ready", START_S)
        second = node_below(top)
        actor = second.parent()
        assert actor is not None
        actor.kill()
        wait_for(lambda: not is_alive(second.pid), "the node has ended with its actor", STOP_S)
        wait_for(lambda: workers_at(url) == ["ready"], "another actor's node is ready", START_S)
        driver.terminate()
        assert driver.wait(STOP_S) == 0, (tmp_path / "log").read_text()[-3000:]
        assert "stopped with [0]" in (tmp_path / "log").read_text()
        assert workers_at(url) == []

"""A cluster's order, its sizes and what each scheduler is given; its nodes run in ``tests/system/test_cluster.py``.

Source: specification, "Clusters".
"""

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from service.cli.commands.cluster_commands import _check_gone
from service.cluster.failure import ClusterFailed
from service.cluster.kubernetes import secret_of, values_of
from service.cluster.machine import become_node, nodes_here, start_nodes, stop_nodes
from service.cluster.new_order import new_order
from service.cluster.order import ClusterHost, ClusterOrder, folder_of, read_order, write_order
from service.cluster.own_database import OwnDatabase
from service.cluster.scaling import IDLE_S, WAIT_S, ClusterLoad, Scale
from service.cluster.slurm import BATCH
from service.config.load import load_config
from service.errors import ConfigError
from tests.harness.service import run_command

URL = "postgresql://user:a-secret-of-mine@db.example/jobs"
BUSY = ClusterLoad(oldest_s=0.0, wanted=3.0, is_queued=False, is_pending=False)
IDLE = msgspec.structs.replace(BUSY, wanted=0.0)
QUEUED = msgspec.structs.replace(BUSY, is_queued=True)
MODELS = {"tiny": {"engine": "embedded", "port": 9400, "replicas": 2}}


def order_of(folder: Path, on: ClusterHost = ClusterHost.SLURM, **changes: object) -> ClusterOrder:
    order = ClusterOrder(
        on=on,
        mark="a1b2c3d4",
        config=str(folder / "roundhouse.yaml"),
        digest="",
        nodes=2,
        most=2,
        command=("roundhouse",),
        host="0.0.0.0",
        port=8080,
        state_dir=str(folder / "state"),
        drain_s=30.0,
        environment={"ROUNDHOUSE_STORE_URL": URL, "ROUNDHOUSE_API_KEYS": "key", "TOKEN": "t"},
    )
    return msgspec.structs.replace(order, **changes)


def write_config(folder: Path, **sections: object) -> Path:
    file = folder / "roundhouse.yaml"
    file.write_text(yaml.safe_dump({"models": MODELS, **sections}))
    return file


def test_an_order_is_only_its_users(tmp_path: Path) -> None:
    """No other can read it, no repository takes it in, and one that others could use is refused."""
    folder = tmp_path / "roundhouse-cluster"
    write_order(folder, order_of(tmp_path))
    file = folder / "cluster.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / ".gitignore").read_text() == "*\n"
    assert read_order(folder) == order_of(tmp_path)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="others can use it"):
        read_order(folder)
    file.chmod(0o600)
    file.write_text("{")
    with pytest.raises(ConfigError, match="not a cluster's order"):
        read_order(folder)
    file.unlink()
    assert read_order(folder) is None


def test_a_machine_with_another_configuration_starts_no_node(tmp_path: Path) -> None:
    """Its jobs would mean something else there."""
    folder = tmp_path / "roundhouse-cluster"
    write_order(folder, order_of(tmp_path, digest="another"))
    with pytest.raises(ConfigError, match="must be at the same path"):
        become_node(folder, None)
    write_config(tmp_path)
    with pytest.raises(ConfigError, match="not the file that the cluster was started with"):
        become_node(folder, None)
    assert nodes_here(folder, order_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--on", "here", "--nodes", "3", "--max", "2"], "--max 2 is less than --nodes 3"),
        (["--on", "here", "--nodes", "1", "--max", "2"], "--on here cannot add nodes"),
        (["--on", "slurm", "--nodes", "1", "--max", "2"], "--on slurm cannot add nodes"),
        (["--on", "slurm", "--nodes", "1", "--address", "x"], "--on slurm needs none"),
        (["--on", "here", "--nodes", "1", "--", "-p", "gpu"], "-p: --on here takes no further options"),
        (["--on", "ssh", "--nodes", "2", "--address", "a,"], "--address names 1 machines, but --nodes 2"),
        (["--on", "slurm", "--nodes", "2"], "a cluster needs PostgreSQL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_are_refused(options: list[str], words: str, tmp_path: Path) -> None:
    """Before anything is written or started."""
    write_config(tmp_path)
    done = run_command("cluster", "up", *options, folder=tmp_path)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert not folder_of(tmp_path / "roundhouse.yaml").exists()


def test_a_cluster_on_other_machines_needs_a_key_and_a_shared_store(tmp_path: Path) -> None:
    """Its nodes listen for others, and a database of one node is no cluster's."""
    write_config(tmp_path, store={"url": "postgresql://db.example/jobs"})
    done = run_command("cluster", "up", "--on", "slurm", "--nodes", "2", folder=tmp_path)
    assert (done.returncode, "needs api_keys" in done.stderr) == (2, True), done.stderr
    write_config(tmp_path, store={"url": "memory"}, server={"api_keys": ["a-key-of-mine"]})
    done = run_command("cluster", "up", "--on", "slurm", "--nodes", "2", folder=tmp_path)
    assert (done.returncode, "store.url memory is of one node" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("command", ["status", "down"])
def test_a_cluster_that_is_not_up_is_named(command: str, tmp_path: Path) -> None:
    """Neither command starts or ends anything then."""
    write_config(tmp_path)
    done = run_command("cluster", command, folder=tmp_path)
    assert (done.returncode, "no cluster is up" in done.stderr) == (2, True), done.stderr


def test_all_ports_move_by_the_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's, the engines' and those of lanes; the highest must still be one."""
    path = write_config(tmp_path, server={"port": 8000}, gpus={"ports": [9300, 9310]})
    moved = load_config(path, {"port_offset": 200})
    assert (moved.server.port, moved.models["tiny"].port, moved.gpus.ports) == (8200, 9600, (9500, 9510))
    assert load_config(path, {"port_offset": 0}) == load_config(path)
    with pytest.raises(ConfigError, match="exceed 65535"):
        load_config(path, {"port_offset": 60_000})
    monkeypatch.setenv("ROUNDHOUSE_STORE_URL", "postgresql://db.example/jobs")
    assert load_config(path).store.url == "sqlite", "a command of its own joins no queue unasked"
    assert load_config(path, {"store_url": "postgresql://db.example/jobs"}).store.url.startswith("postgresql")


def test_nodes_are_added_while_turns_wait() -> None:
    """After the limit, one at a time, up to the most; a node that does not answer yet holds the next back."""
    scale = Scale(2)
    assert scale.step(0.0, 0, QUEUED) == 0
    assert scale.step(WAIT_S, 0, QUEUED) == 0
    assert scale.step(WAIT_S + 1, 0, QUEUED) == 1
    pending = msgspec.structs.replace(QUEUED, is_pending=True)
    assert scale.step(3 * WAIT_S, 1, pending) == 0
    assert scale.step(3 * WAIT_S + 1, 1, QUEUED) == 1
    assert scale.step(9 * WAIT_S, 2, QUEUED) == 0
    slow = msgspec.structs.replace(BUSY, oldest_s=WAIT_S + 1)
    assert Scale(1).step(0.0, 0, slow) == 1, "a turn of a node has waited for as long"


def test_a_queue_that_empties_in_between_adds_none() -> None:
    """Each wait begins anew."""
    scale = Scale(1)
    for second in range(0, 100, 5):
        assert scale.step(float(second), 0, QUEUED if second % 2 else BUSY) == 0


def test_an_added_node_is_drained_when_there_is_nothing_to_do() -> None:
    """One each time, never a first one, and none while anything runs or waits."""
    scale = Scale(2)
    assert scale.step(0.0, 2, IDLE) == 0
    assert scale.step(IDLE_S, 2, BUSY) == 0
    assert scale.step(IDLE_S + 1, 2, IDLE) == 0
    assert scale.step(2 * IDLE_S + 1, 2, IDLE) == -1
    assert scale.step(2 * IDLE_S + 2, 1, IDLE) == 0
    assert scale.step(3 * IDLE_S + 1, 1, IDLE) == -1
    assert scale.step(9 * IDLE_S, 0, IDLE) == 0


def test_no_secret_is_in_what_schedulers_record(tmp_path: Path) -> None:
    """Not in Slurm's script, nor in Helm's values; Kubernetes keeps them in a Secret."""
    order = order_of(tmp_path, ClusterHost.KUBERNETES)
    config = write_config(
        tmp_path,
        store={"url": "${ROUNDHOUSE_STORE_URL}", "lease_s": 5},
        server={"port": 8080, "drain_s": 7, "api_keys": ["${TOKEN}"]},
    )
    values = values_of(order, config)
    assert "a-secret-of-mine" not in json.dumps(values)
    assert values["config"]["server"] == {"drain_s": 7}
    assert values["config"]["store"] == {"lease_s": 5}
    assert [each["name"] for each in values["env"]] == ["TOKEN"]
    assert set(secret_of(order)["data"]) == set(order.environment)
    assert "a-secret-of-mine" not in json.dumps(secret_of(order))
    assert "a-secret-of-mine" not in BATCH


def test_helm_is_given_the_scale_or_the_groups(tmp_path: Path) -> None:
    """A span's nodes are placed as groups where they fill them; nodes that come and go are not."""
    span = {"engine": "vllm", "model": "m", "span": {"nodes": 2}}
    config = tmp_path / "roundhouse.yaml"
    config.write_text(yaml.safe_dump({"models": {"big": span}}))
    even = order_of(tmp_path, nodes=4, most=4)
    assert values_of(even, config)["groups"] == {"size": 2}
    assert "groups" not in values_of(order_of(tmp_path, nodes=3, most=3), config)
    scaled = values_of(order_of(tmp_path, nodes=2, most=5), config)
    assert scaled["autoscaling"] == {"enabled": True, "kind": "keda", "minReplicas": 2, "maxReplicas": 5}
    assert "groups" not in scaled


def test_a_folder_that_others_could_have_made_is_not_used(tmp_path: Path) -> None:
    """A link in its place, a file, or a folder in which others write: a stranger's words would be the cluster's."""
    (tmp_path / "elsewhere").mkdir()
    link, file, open_to_all = (tmp_path / name for name in ("link", "file", "open"))
    link.symlink_to(tmp_path / "elsewhere")
    file.touch()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder in (link, file, open_to_all):
        with pytest.raises(ConfigError, match="a folder of yours is needed there"):
            write_order(folder, order_of(tmp_path))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    folder = tmp_path / "roundhouse-cluster"
    write_order(folder, order_of(tmp_path))
    (tmp_path / "precious").write_text("mine")
    for name in (".gitignore", f"{socket.gethostname()}.log"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(tmp_path / "precious")
    write_order(folder, order_of(tmp_path))
    with pytest.raises(OSError, match="symbolic links"):
        start_nodes(folder, order_of(tmp_path), 1)
    assert (tmp_path / "precious").read_text() == "mine"


def test_an_order_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe would be waited for without an end."""
    folder = tmp_path / "roundhouse-cluster"
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "cluster.json", 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        read_order(folder)


@pytest.mark.parametrize("owner", [-1, 0, 1])
def test_a_lock_of_another_machine_is_never_signalled(
    owner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such numbers mean whole groups of processes to kill(2): a stranger's lock would end them all."""
    order = order_of(tmp_path, ClusterHost.HERE)
    (tmp_path / f"{socket.gethostname()}-0.lock").touch()
    tmp_path.chmod(0o700)
    answer = struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, owner)
    monkeypatch.setattr("service.cluster.machine.fcntl.fcntl", lambda *_: answer)
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("service.cluster.machine.os.kill", lambda *call: killed.append(call))
    with pytest.raises(ClusterFailed, match="another machine or container"):
        stop_nodes(tmp_path, order)
    assert killed == []


def test_a_number_that_was_used_again_is_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL's own program would signal whatever process has it now."""
    monkeypatch.setattr("service.cluster.own_database.OF_ROOT", tmp_path / "lib")
    database = OwnDatabase(tmp_path)
    data = database._data
    data.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        (data / "postmaster.pid").write_text(f"{innocent.pid}\n{data}\n")
        assert not database.is_running()
        database.stop()
        assert innocent.poll() is None
        innocent.kill()


def test_ports_of_a_machines_nodes_must_not_meet(tmp_path: Path) -> None:
    """The second node's engine would take the port of the first one's."""
    models = {"m": {"engine": "embedded", "port": 8199, "replicas": 2}}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"models": models, "server": {"port": 8100}}))
    done = run_command(
        "cluster", "up", "--on", "here", "--nodes", "2", folder=tmp_path, ROUNDHOUSE_STORE_URL="postgresql://h/d"
    )
    assert (done.returncode, "node 1 would need port 8200" in done.stderr) == (2, True), done.stderr


def test_keys_of_the_configuration_go_into_kubernetes_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Literal ones too: a ConfigMap is no place for them."""
    config = write_config(tmp_path, server={"api_keys": ["a-literal-key-of-mine"]})
    monkeypatch.setenv("ROUNDHOUSE_STORE_URL", URL)
    made = new_order(config, ClusterHost.KUBERNETES, 1, 1, None, ())
    assert made.environment["ROUNDHOUSE_API_KEYS"] == "a-literal-key-of-mine"
    assert "a-literal-key-of-mine" not in json.dumps(values_of(made, config))


def test_nodes_are_not_gone_while_their_database_does_not_answer(tmp_path: Path) -> None:
    """What cannot be known is no success: ``down`` would forget nodes that run."""
    away = order_of(tmp_path, environment={"ROUNDHOUSE_STORE_URL": "postgresql://127.0.0.1:1/nothing"})
    with pytest.raises(ClusterFailed, match="whether nodes run on is not known"):
        _check_gone(away)

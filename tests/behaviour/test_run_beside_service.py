"""``run`` in the folder of a running service, as the README suggests."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import yaml

from tests.harness.ports import find_ports
from tests.harness.processes import running_program
from tests.harness.service import ROUNDHOUSE, Document, Service, debate, run_command, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """A service whose configuration is ``roundhouse.yaml`` of its folder."""
    folder = tmp_path_factory.mktemp("beside")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        (folder / "job.yaml").write_text(yaml.safe_dump(debate()))
        yield running


@pytest.mark.system
def test_a_job_runs_beside_a_service_of_the_same_folder_or_is_redirected(service: Service, tmp_path: Path) -> None:
    """Its own service has the port: the job runs on a free one, or the message has the command that posts it there."""
    done = run_command("run", "job.yaml", "--output", str(tmp_path), folder=service.folder)
    if done.returncode == 0:
        assert json.loads((tmp_path / "debate" / "manifest.json").read_text())["state"] == "completed"
        return
    assert done.returncode == 2, done
    assert f"the service at {service.url} has this model: roundhouse submit job.yaml" in done.stderr
    assert "\\n" not in done.stderr
    assert done.stderr.count("Address already in use") <= 1


@pytest.mark.system
def test_the_examples_next_line_works_beside_a_service(service: Service, tmp_path: Path) -> None:
    """The next command that a command prints can be typed as it is."""
    written = run_command("examples", "jury", folder=service.folder)
    line = written.stdout.splitlines()[-1].removeprefix("next: ")
    assert line.startswith("roundhouse "), written
    environment = {"ROUNDHOUSE_URL": service.url, "ROUNDHOUSE_OUTPUT": str(tmp_path)}
    done = run_command(*line.split()[1:], folder=service.folder, **environment)
    assert (done.returncode in {0, 1}, "cannot listen" in done.stderr) == (True, False), done.stderr


def test_a_named_model_gets_a_free_port(tmp_path: Path) -> None:
    """``init``, ``chat`` and ``launch`` do the same: the first port often belongs to a service."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # then another program holds it
            holder.bind(("127.0.0.1", 9100))
            holder.listen()
        done = run_command("check", "--model", "roundhouse:tiny", folder=tmp_path, XDG_STATE_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
        port = yaml.safe_load(done.stdout)["models"]["tiny"]["port"]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"somebody listens at {port}"


@pytest.mark.system
def test_a_named_model_runs_beside_the_program_on_the_first_port(tmp_path: Path) -> None:
    """The real engine runs, while a service or any other program has port 9100."""
    job = debate(agents=[{"id": "a", "model": "tiny", "params": {"max_tokens": 4}}])
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            holder.bind(("127.0.0.1", 9100))
            holder.listen()
        arguments = ["run", "job.yaml", "--model", "roundhouse:tiny"]
        done = run_command(*arguments, folder=tmp_path, XDG_STATE_HOME=str(tmp_path / "users"))
    assert done.returncode == 0, done.stderr


def trouble(running: Service, worker: str) -> str:
    return str(running.get(f"/v1/workers/{worker}")["because"])


@pytest.mark.system
def test_a_port_of_another_services_worker_is_reported_with_its_owner(
    service: Service, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The message has the process, the worker, and the key to set; a service does not move its operator's port."""
    port = service.get("/v1/workers/m-0")["port"]
    with serving(tmp_path / "s", free_ports(1), {"theirs": scripted_model(port)}, ready=False) as running:
        wait_for(lambda: "in use" in trouble(running, "theirs-0"), "it has tried to listen", 2 * LIMIT_S)
        told = trouble(running, "theirs-0")
    pids = {service.get("/v1/workers/m-0")["pid"], *service.tree()}
    assert any(f"pid {pid} " in told for pid in pids), told
    assert ("worker m-0 of the Roundhouse in" in told, "models.theirs.port" in told) == (True, True), told


@pytest.mark.system
def test_a_port_of_any_other_program_is_reported_with_its_pid(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The user can look at it. Another user's process is not visible, and the port is only called taken."""
    port = find_ports(1)
    models = {"m": scripted_model(port)}
    with (
        socket.create_server(("127.0.0.1", port)),
        serving(tmp_path / "s", free_ports(1), models, ready=False) as running,
    ):
        wait_for(lambda: "in use" in trouble(running, "m-0"), "it has tried to listen", 2 * LIMIT_S)
        told = trouble(running, "m-0")
    assert (f"pid {os.getpid()} " in told, "models.m.port" in told) == (True, True), told


@pytest.mark.system
def test_run_uses_another_port_if_its_own_is_taken(tmp_path: Path) -> None:
    """Only this command uses its engines; it reports the change."""
    port = find_ports(1)
    models: Document = {"m": scripted_model(port)}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": {"state_dir": "state"}, "models": models}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate()))
    with socket.create_server(("127.0.0.1", port)):
        done = run_command("run", "job.yaml", folder=tmp_path)
    assert (done.returncode, f"port {port} is taken" in done.stderr) == (0, True), done


@pytest.mark.parametrize("arguments", [["status"], ["awaited"], ["workers"], ["top", "--once"]])
def test_commands_use_the_service_of_this_folder(service: Service, tmp_path: Path, arguments: list[str]) -> None:
    """``init`` takes another port if 8080 is taken, and later commands use the port that it wrote."""
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": {"port": httpx.URL(service.url).port}}))
    away = {"ROUNDHOUSE_URL": "", "ROUNDHOUSE_CONFIG": ""}
    done = run_command(*arguments, folder=tmp_path, **away)
    assert done.returncode == 0, done
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    named = {**away, "ROUNDHOUSE_CONFIG": str(tmp_path / "roundhouse.yaml")}
    assert run_command(*arguments, folder=elsewhere, **named).returncode == 0


@pytest.mark.parametrize("text", ["server: [", "server: 7", "[]", "server: {port: 70000}"])
def test_a_file_without_a_port_means_the_usual_one(tmp_path: Path, text: str) -> None:
    """A running service read its file when it was complete."""
    (tmp_path / "roundhouse.yaml").write_text(text)
    done = run_command("status", folder=tmp_path, ROUNDHOUSE_URL="", ROUNDHOUSE_CONFIG="")
    assert "Traceback" not in done.stderr
    assert (done.returncode == 0) or "127.0.0.1:8080" in done.stderr, done


def test_a_port_in_a_variable_is_not_guessed(tmp_path: Path) -> None:
    """The service's environment may differ, and port 8080 may be another user's."""
    (tmp_path / "roundhouse.yaml").write_text("server: {port: '${PORT:-8099}'}")
    done = run_command("status", folder=tmp_path, ROUNDHOUSE_URL="", ROUNDHOUSE_CONFIG="")
    assert (done.returncode, "server.port is '${PORT:-8099}'; name the service with --url" in done.stderr) == (3, True)


def test_a_model_that_no_job_uses_need_not_exist(tmp_path: Path) -> None:
    """It is not started either."""
    gone: Document = {"engine": "attached", "url": f"http://127.0.0.1:{find_ports(1)}/v1", "slots": 1}
    models: Document = {"m": scripted_model(find_ports(1)), "gone": gone}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"models": models}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate()))
    done = run_command("run", "job.yaml", folder=tmp_path)
    assert (done.returncode, "gone" in done.stderr) == (0, False), done.stderr


def test_an_unreachable_server_holds_nothing_else_back(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Other jobs and turns on other models go on; the address that refuses is reported."""
    gone: Document = {"engine": "attached", "url": f"http://127.0.0.1:{free_ports(1)}/v1", "slots": 1}
    models: Document = {"m": scripted_model(free_ports(1)), "gone": gone}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"models": models}))
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(debate()))
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**debate(model="gone"), "name": "other"}))
    command = [ROUNDHOUSE, "run", "one.yaml", "other.yaml", "--output", "out"]
    with (
        (tmp_path / "told").open("w") as told,
        running_program(command, cwd=tmp_path, stdout=told, stderr=told) as run,
    ):
        manifest = tmp_path / "out" / "debate" / "manifest.json"
        wait_for(lambda: manifest.exists() and json.loads(manifest.read_text())["state"] == "completed", "one is done")
        run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130
    told_of = (tmp_path / "told").read_text()
    assert (gone["url"].removesuffix("/v1") in told_of, "other: 0/3 turns" in told_of) == (True, True), told_of


def test_a_configuration_is_no_job(tmp_path: Path) -> None:
    """Both ``submit`` and ``run`` say so."""
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"models": {"m": scripted_model(9100)}}))
    for command in ("run", "submit"):
        done = run_command(command, "roundhouse.yaml", folder=tmp_path)
        assert (done.returncode, "this looks like a configuration" in done.stderr) == (2, True), done


@pytest.mark.system
def test_output_that_is_read_no_further_ends_the_command_quietly(tmp_path: Path) -> None:
    """As ``run … | head`` does: no traceback, which would mean a defect of Roundhouse."""
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"models": {"m": scripted_model(find_ports(1))}}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(debate(rounds=3)))
    command = [ROUNDHOUSE, "run", "job.yaml", "--show-prompts", "--output", "out"]
    with (tmp_path / "told").open("w") as told:
        reads, writes = os.pipe()
        os.close(reads)
        with running_program(command, cwd=tmp_path, stdout=writes, stderr=told) as run:
            os.close(writes)
            assert run.wait(LIMIT_S) == 1
    assert "Traceback" not in (tmp_path / "told").read_text()

"""Upgrades in place of a service with MCP servers: their memory stays, and none outlives the service."""

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.upgrades import UPGRADE_LIMIT_S, engines_of, upgrade
from tests.harness.waiting import is_alive, wait_for
from workers.process.identity import ProcessId

COUNTER = PROGRAMS / "mcp_counter.py"
AGAIN = {"type": "function", "unverified": "retry", "function": {"name": "late"}}
KILL_WITHIN_S = 2.0
Ports = Callable[[int], int]


def counter(folder: Path, **env: str) -> Document:
    """Return the configuration of a counting server that records in the folder what it reads."""
    folder.mkdir()
    return {"command": [sys.executable, "-I", "-S", str(COUNTER), str(folder)], "env": env}


def calling(folder: Path, port: int, servers: Document, *tools: str) -> Document:
    """Return a model that calls one tool after another, one in each turn."""
    script = folder / "script"
    replies: list[Document] = []
    for number, tool in enumerate(tools):
        call = {"id": f"c{number}", "name": tool, "arguments": '{"n": 7}'}
        replies += [{"tool_calls": [call]}, {"content": "Done."}]
    script.write_text(json.dumps(replies))
    return {**scripted_model(port, slots=1, script=str(script)), "tools": {"mcp": servers}}


def job_with(server: str) -> Document:
    return {"agents": [{"id": "a", "model": "m", "tools": [{"mcp": server}]}], "conversations": [{"prompt": "Go."}]}


def results_of(service: Service, job: str) -> list[Any]:
    """Return the results of the calls in the one turn of a job."""
    assert service.wait_ended(job)["state"] == "completed"
    (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    return [record["result"] for record in talk["turns"][0]["tool_calls"]]


def programs_of(service: Service, folder: Path) -> set[ProcessId]:
    """Return the counting server of a folder and its tether, with the kernel's start time of each."""
    found = [psutil.Process(pid) for pid in service.tree()]
    ids = [ProcessId.of(each.pid) for each in found if str(folder) in each.cmdline()]
    return {each for each in ids if each is not None}


def read_by(folder: Path) -> list[Document]:
    return [json.loads(line) for line in (folder / "record").read_text().splitlines()]


def is_connected(service: Service) -> bool:
    servers = service.get("/v1/status")["tool_servers"]
    return bool(servers) and all(each["trouble"] is None for each in servers)


@pytest.mark.system
def test_a_tool_server_keeps_its_process_session_and_count(tmp_path: Path, free_ports: Ports) -> None:
    """Over two upgrades; a server with other settings is started again, a removed one is ended, none is left."""
    port = free_ports(2)
    folders = {name: tmp_path / name for name in ("kept", "other", "gone")}
    servers = {name: counter(folder) for name, folder in folders.items()}
    model = calling(tmp_path, port + 1, servers, *["count"] * 4)
    with serving(tmp_path / "a", port, {"m": model}) as service:
        wait_for(lambda: is_connected(service), "the servers have listed their tools")
        before = {name: programs_of(service, folder) for name, folder in folders.items()}
        assert [len(each) for each in before.values()] == [2, 2, 2]
        engines, (first,) = engines_of(service), results_of(service, service.post_job(job_with("kept")))
        settings = yaml.safe_load(service.config.read_text())
        del servers["gone"]
        servers["other"]["env"] = {"IT": "changed"}
        settings["models"]["m"]["tools"]["mcp"] = servers
        service.config.write_text(yaml.safe_dump(settings))
        counts = [first]
        fates = []
        for _ in range(2):
            upgrade(service)
            last = service.get("/v1/upgrade")["last"]
            fates += [(sorted(last["kept_servers"]), last["ended_servers"])]
            wait_for(lambda: is_connected(service), "the servers are connected")
            counts += results_of(service, service.post_job(job_with("kept")))
        assert [each["count"] for each in counts] == [1, 2, 3]
        whys = {"m/other": "it would be started differently", "m/gone": "it is no longer in the configuration"}
        assert fates == [(["m/kept"], whys), (["m/kept", "m/other"], {})]
        assert len({each["pid"] for each in counts}) == 1
        assert results_of(service, service.post_job(job_with("other")))[0]["count"] == 1
        assert engines_of(service) == engines
        after = {name: programs_of(service, folder) for name, folder in folders.items()}
        assert after["kept"] == before["kept"]
        assert len(after["other"]) == 2
        assert not after["other"] & before["other"]
        assert after["gone"] == set()
        assert not any(each.is_alive for each in before["other"] | before["gone"])
        methods = [each["method"] for each in read_by(folders["kept"])]
        assert [methods.count(each) for each in ("server/discover", "initialize")] == [1, 1]
        numbers = [each["id"] for each in read_by(folders["kept"]) if "id" in each]
        assert numbers == sorted(set(numbers))
        tree = service.tree()
    assert not any(map(is_alive, tree))


@pytest.mark.system
def test_a_call_that_is_cut_off_is_repeated_with_its_key(tmp_path: Path, free_ports: Ports) -> None:
    """The turn runs again in the next program; the late answer to the first call is dropped."""
    port, folder = free_ports(2), tmp_path / "kept"
    model = calling(tmp_path, port + 1, {"kept": counter(folder)}, "late", "count")
    script = tmp_path / "script"
    late, done, *rest = json.loads(script.read_text())
    script.write_text(json.dumps([late, late, done, *rest]))

    def calls() -> list[Document]:
        return [each for each in read_by(folder) if each.get("params", {}).get("name") == "late"]

    with serving(tmp_path / "a", port, {"m": model}, {"drain_s": 0.2}) as service:
        wait_for(lambda: is_connected(service), "the server has listed its tools")
        before = programs_of(service, folder)
        agent = {"id": "a", "model": "m", "tools": [AGAIN]}
        job = service.post_job({"agents": [agent], "conversations": [{"prompt": "Go."}]})
        wait_for(lambda: len(calls()) == 1, "the call is under way")
        upgrade(service)
        wait_for(lambda: len(calls()) == 2, "the call is made again")
        (folder / "go").touch()
        assert results_of(service, job)[-1] == {"n": 7}
        first, second = calls()
        assert first["id"] != second["id"]
        keys = [each["params"]["_meta"]["roundhouse/idempotency-key"] for each in (first, second)]
        assert keys[0] == keys[1]
        assert "an answer came too late" in service.log()
        assert results_of(service, service.post_job(job_with("kept")))[0]["count"] == 1
        assert programs_of(service, folder) == before


@pytest.mark.system
def test_a_sigkill_right_after_the_exec_leaves_no_tool_server(tmp_path: Path, free_ports: Ports) -> None:
    """No program has adopted it yet, but its tether watches its parent."""
    port, folder = free_ports(2), tmp_path / "kept"
    servers = {"kept": counter(folder, STUBBORN="1")}
    service = Service(tmp_path / "a", port, {"m": calling(tmp_path, port + 1, servers)})
    try:
        service.start()
        wait_for(lambda: is_connected(service), "the server has listed its tools")
        before = programs_of(service, folder)
        process = psutil.Process(service.process.pid if service.process else 0)
        process.send_signal(signal.SIGUSR2)
        wait_for(lambda: "ROUNDHOUSE_HANDOVER" in process.environ(), "the next program has begun", UPGRADE_LIMIT_S)
        assert all(each.is_alive for each in before)
        service.kill()
        assert len(before) == 2
        wait_for(lambda: not any(each.is_alive for each in before), "no tool server is left", KILL_WITHIN_S)
    finally:
        service.http.close()
        if service.process is not None:
            service.kill()

"""The configuration is reloaded while the service runs: what changes at once, which workers, and what is refused.

Source: specification, "Reload".
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from service.config.source import ConfigSource
from service.errors import ConfigError
from tests.harness.programs import PROGRAMS
from tests.harness.reloads import engines, hang_up, models_of, post_reload, reload, rewrite, wait_settled
from tests.harness.service import Document, Service, run_command, scripted_model, serving
from tests.harness.waiting import is_alive, wait_for

KEYS = {name: f"{name}-{'k' * 24}" for name in ("alice", "bob", "root")}
ROOT = {"name": "root", "key": KEYS["root"], "scopes": ["admin"]}


def alone(model: str = "m", **agent: object) -> Document:
    """Return a job of one conversation with two turns."""
    return {
        "rounds": 2,
        "agents": [{"id": "a", "model": model, "system": "You talk.", **agent}],
        "conversations": [{"id": "q", "prompt": "Go."}],
    }


@pytest.fixture
def ports(free_ports: Callable[[int], int]) -> int:
    """Return the first of eight successive ports: one for the service, and the others for engines."""
    return free_ports(8)


@pytest.fixture
def service(tmp_path: Path, ports: int) -> Iterator[Service]:
    """Serve one model with one engine, which holds prompts that name a file until it exists."""
    with serving(tmp_path, ports, {"m": scripted_model(ports + 1, hold="file=([^ ]+) ")}) as running:
        yield running


def holding(file: Path, model: str = "m") -> Document:
    return {**alone(model), "conversations": [{"id": "q", "prompt": f"Go. file={file} "}]}


def in_use(service: Service, worker: str) -> int:
    return int(service.get(f"/v1/workers/{worker}")["slots"]["in_use"])


def worker_ids(service: Service) -> list[str]:
    return [worker["id"] for worker in service.get("/v1/workers")["workers"]]


def test_a_reload_that_changes_nothing_restarts_nothing(service: Service) -> None:
    """Over HTTP and by a signal: the processes and their start times stay the same."""
    before = engines(service)
    assert reload(service) == {"unchanged": ["m"]}
    hang_up(service)
    wait_for(lambda: service.log().count("nothing changes") == 2, "both are done")
    assert engines(service) == before
    assert service.get("/v1/status")["configuration"]["under_way"] == []


def test_a_model_is_added_and_takes_jobs(service: Service, ports: int) -> None:
    """Jobs may name it at once, and the other model is not touched."""
    before = engines(service)
    assert service.http.post("/v1/jobs", json=alone("n")).status_code == 422
    assert reload(service, lambda all_: models_of(all_).update(n=scripted_model(ports + 2))) == {
        "added": ["n"],
        "unchanged": ["m"],
    }
    assert service.wait_ended(service.post_job(alone("n")))["state"] == "completed"
    assert engines(service)["m-0"] == before["m-0"]


def test_turns_of_a_removed_model_wait_with_the_reason_and_go_on_when_it_is_back(
    service: Service, ports: int, tmp_path: Path
) -> None:
    """The turn in flight ends, the next one waits; the engine ends; every turn is answered once."""
    file = tmp_path / "go"
    model = scripted_model(ports + 2, hold="file=([^ ]+) ")
    reload(service, lambda all_: models_of(all_).update(n=model))
    wait_settled(service)
    job = service.post_job(holding(file, "n"))
    wait_for(lambda: in_use(service, "n-0") == 1, "the turn runs")
    (pid, _) = engines(service)["n-0"]
    assert reload(service, lambda all_: models_of(all_).pop("n"))["removed"] == ["n"]
    assert service.http.post("/v1/jobs", json=alone("n")).status_code == 422
    assert in_use(service, "n-0") == 1
    file.touch()
    wait_for(lambda: worker_ids(service) == ["m-0"], "the worker has left")
    wait_for(lambda: not is_alive(pid), "its engine is gone")
    waiting = service.get(f"/v1/jobs/{job}")
    assert waiting["waits_for"] == ["model n was removed from the configuration"]
    assert (waiting["progress"]["turns"]["completed"], waiting["progress"]["turns"]["ready"]) == (1, 1)
    (head,) = service.get("/v1/status")["heads"]["ready"]
    assert head["waits_for"] == "model n was removed from the configuration"
    reload(service, lambda all_: models_of(all_).update(n=model))
    ended = service.wait_ended(job)
    assert (ended["state"], ended["progress"]["turns"]["completed"]) == ("completed", 2)
    assert ended["waits_for"] == []
    transcript = service.get(f"/v1/jobs/{job}/conversations/q")
    assert [len(turn["attempts"]) for turn in transcript["turns"]] == [1, 1]


def test_requests_of_clients_do_not_wait_for_a_removed_model(service: Service, ports: int, tmp_path: Path) -> None:
    """Waiting requests are refused, and one on a slot gets its answer."""
    file = tmp_path / "go"
    reload(service, lambda all_: models_of(all_).update(n=scripted_model(ports + 2, slots=1, hold="file=([^ ]+) ")))
    wait_settled(service)
    body = {"model": "n", "messages": [{"role": "user", "content": f"file={file} "}]}
    with ThreadPoolExecutor() as clients:
        first = clients.submit(httpx.post, f"{service.url}/v1/chat/completions", json=body, timeout=30)
        wait_for(lambda: in_use(service, "n-0") == 1, "it runs")
        second = clients.submit(httpx.post, f"{service.url}/v1/chat/completions", json=body, timeout=30)
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] == 1, "the other waits")
        reload(service, lambda all_: models_of(all_).pop("n"))
        refused = second.result()
        assert (refused.status_code, "was removed from the configuration" in refused.text) == (503, True)
        file.touch()
        assert first.result().status_code == 200


def test_replicas_are_added_and_the_emptiest_leaves(service: Service, tmp_path: Path) -> None:
    """Running requests keep their engine, whatever its number."""
    before = engines(service)
    assert reload(service, lambda all_: models_of(all_)["m"].update(replicas=2)) == {"resized": ["m"]}
    wait_settled(service)
    assert worker_ids(service) == ["m-0", "m-1"]
    assert engines(service)["m-0"] == before["m-0"]
    file = tmp_path / "go"
    jobs = [service.post_job(holding(file)) for _ in range(3)]
    wait_for(lambda: in_use(service, "m-0") + in_use(service, "m-1") == 3, "they run")
    fuller, emptier = sorted(("m-0", "m-1"), key=lambda each: -in_use(service, each))
    kept = engines(service)[fuller]
    reload(service, lambda all_: models_of(all_)["m"].update(replicas=1))
    assert in_use(service, emptier) == 1
    file.touch()
    wait_for(lambda: worker_ids(service) == [fuller], "the emptier one has left")
    assert [service.wait_ended(job)["state"] for job in jobs] == ["completed"] * 3
    assert reload(service) == {"unchanged": ["m"]}
    assert engines(service) == {fuller: kept}


def test_other_flags_roll_through_the_workers(service: Service) -> None:
    """One after the other: at every moment one worker takes requests."""
    reload(service, lambda all_: models_of(all_)["m"].update(replicas=2))
    wait_settled(service)
    before = engines(service)
    assert reload(service, lambda all_: models_of(all_)["m"]["args"].update(tokens=5)) == {"restarted": ["m"]}

    def is_done() -> bool:
        assert service.http.get("/readyz").status_code == 200
        return not service.get("/v1/status")["configuration"]["under_way"]

    wait_for(is_done, "both have other flags")
    after = engines(service)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert not any(is_alive(pid) for pid, _ in before.values())
    assert [worker["incarnation"] for worker in service.get("/v1/workers")["workers"]] == [2, 2]
    transcript = service.get(f"/v1/jobs/{ended_job(service)}/conversations/q")
    assert transcript["turns"][0]["usage"]["completion_tokens"] == 5


def ended_job(service: Service) -> str:
    job = service.post_job(alone())
    assert service.wait_ended(job)["state"] == "completed"
    return job


def test_flags_that_no_engine_starts_with_cost_one_worker(service: Service) -> None:
    """The others go on with the old flags, and the next reload repairs it."""
    reload(service, lambda all_: models_of(all_)["m"].update(replicas=2))
    wait_settled(service)
    before = engines(service)
    reload(service, lambda all_: models_of(all_)["m"]["args"].update({"exit-at-once": 7}))
    wait_for(lambda: "backoff" in {each["state"] for each in service.get("/v1/workers")["workers"]}, "one has failed")
    ended_job(service)
    assert len(set(engines(service).values()) & set(before.values())) == 1
    reload(service, lambda all_: models_of(all_)["m"]["args"].pop("exit-at-once"))
    wait_settled(service)
    assert len(set(engines(service).values()) & set(before.values())) == 1


def test_a_drained_worker_stays_drained(service: Service) -> None:
    """The operator's drain survives a change of the file."""
    service.http.post("/v1/workers/m-0/drain")
    reload(service, lambda all_: models_of(all_)["m"].update(context=8192))
    wait_settled(service)
    worker = service.get("/v1/workers/m-0")
    assert (worker["state"], worker["incarnation"]) == ("draining", 2)


@pytest.mark.parametrize("text", ["models: [", "models: {m: {engine: vllm9}}\nserver: {port: no}", "models: {}"])
def test_a_bad_file_changes_nothing_and_is_reported(service: Service, text: str) -> None:
    """With the messages of a start, over HTTP and in the log."""
    before, kept = engines(service), service.config.read_text()
    service.config.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ConfigSource(path=service.config).load()
    told = str(refused.value).splitlines()
    answer = post_reload(service)
    assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json")
    assert (answer.json()["code"], [each["message"] for each in answer.json()["errors"]]) == ("config_invalid", told)
    assert service.get("/v1/status")["configuration"]["failure"]["detail"].splitlines() == told
    hang_up(service)
    wait_for(lambda: f"nothing has changed: {told[0]}" in service.log(), "it is logged")
    ended_job(service)
    assert engines(service) == before
    service.config.write_text(kept)
    reload(service)
    assert service.get("/v1/status")["configuration"]["failure"] is None


def test_a_change_that_needs_a_restart_is_refused_as_a_whole(service: Service, ports: int) -> None:
    """All refused changes are named, and a model that the same file adds is not added."""
    before = engines(service)

    def change(document: Document) -> None:
        document["server"] |= {"port": ports + 7, "state_dir": "elsewhere"}
        document["store"] = {"url": "memory"}
        document["models"]["n"] = scripted_model(ports + 2)

    answer = post_reload(service, change)
    assert (answer.status_code, answer.json()["code"]) == (409, "restart_needed")
    assert [each["path"] for each in answer.json()["errors"]] == ["server.port", "server.state_dir", "store.url"]
    assert worker_ids(service) == ["m-0"]
    assert engines(service) == before
    assert "server.port: cannot change" in service.get("/v1/status")["configuration"]["failure"]["detail"]


@pytest.mark.system
def test_the_command_reloads(service: Service, ports: int) -> None:
    """Exit 0 with the changes, or exit 3 with the reason."""
    rewrite(service, lambda all_: models_of(all_).update(n=scripted_model(ports + 2)))
    done = run_command("reload", "--url", service.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert ["added", "n"] in [line.split() for line in done.stdout.splitlines()]
    again = json.loads(run_command("reload", "--url", service.url, "--json").stdout)
    assert again["unchanged"] == ["m", "n"]
    rewrite(service, lambda all_: all_["server"].update(port=ports + 7))
    refused = run_command("reload", "--url", service.url)
    assert "server.port: cannot change while Roundhouse runs" in refused.stderr
    assert refused.returncode == 3


@pytest.mark.system
def test_keys_change_at_once_and_streams_go_on(tmp_path: Path, ports: int) -> None:
    """The next request needs the new keys; a running answer goes on to its end."""
    file = tmp_path / "go"
    models = {"m": scripted_model(ports + 1, hold="file=([^ ]+) ")}
    alice = {"name": "alice", "key": KEYS["alice"]}
    with serving(tmp_path, ports, models, {"keys": [ROOT, alice]}, ready=False) as service:
        service.http.headers["Authorization"] = f"Bearer {KEYS['root']}"
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready")
        before = engines(service)
        body = {"model": "m", "messages": [{"role": "user", "content": f"file={file} "}], "stream": True}
        with (
            httpx.Client(base_url=service.url, trust_env=False, timeout=30) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=bearer("alice")) as stream,
        ):
            wait_for(lambda: in_use(service, "m-0") == 1, "it runs")
            bob = {"name": "bob", "key": KEYS["bob"]}
            assert reload(service, lambda all_: all_["server"].update(keys=[ROOT, bob]))["changed"] == ["server.keys"]
            file.touch()
            assert "[DONE]" in "".join(stream.iter_text())
        assert httpx.get(f"{service.url}/v1/models", headers=bearer("alice")).status_code == 401
        assert httpx.get(f"{service.url}/v1/models", headers=bearer("bob")).status_code == 200
        assert httpx.post(f"{service.url}/v1/config/reload", headers=bearer("bob")).status_code == 403
        assert engines(service) == before


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def test_limits_change_at_once(service: Service) -> None:
    """No engine is touched."""
    before = engines(service)
    changed = reload(service, lambda all_: all_.update(limits={"body_bytes": 100}, webhooks={"timeout_s": 3}))
    assert changed["changed"] == ["webhooks.timeout_s", "limits.body_bytes"]
    assert service.http.post("/v1/jobs", json=alone()).status_code == 413
    assert engines(service) == before


def test_tool_servers_are_added_and_removed_beside_the_engines(service: Service) -> None:
    """The server is listed, and later gone with its process; the engine stays the same."""
    before = engines(service)
    server = {"command": [sys.executable, str(PROGRAMS / "mcp_server.py"), "stdio"]}
    changed = reload(service, lambda all_: models_of(all_)["m"].update(tools={"mcp": {"sums": server}}))
    assert changed == {"changed": ["models.m.tools.mcp"]}

    def states() -> list[Document]:
        return list(service.get("/v1/status")["tool_servers"])

    wait_for(lambda: [each["trouble"] for each in states()] == [None], "the server is there")
    tools = service.get("/v1/models/m/tools")["tools"]
    assert {tool["server"] for tool in tools} == {"sums"}
    reload(service, lambda all_: models_of(all_)["m"].pop("tools"))
    assert states() == []
    wait_for(lambda: len(service.tree()) == len(before) * 2, "its process is gone, engines and guardians are left")
    assert engines(service) == before


TOOL = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def look():
    with (HERE / "made").open("a") as file: file.write("look\\n")
    until = time.monotonic() + 60
    while not (HERE / "gate").exists() and time.monotonic() < until: time.sleep(0.01)
    return "seen"
"""
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"tool_calls": [{"id": "x", "name": "look", "arguments": "{}"}]}


@pytest.mark.system
def test_an_engine_stays_while_a_tool_of_its_turn_runs(tmp_path: Path, ports: int) -> None:
    """The turn has lent its slot; the call is made once, and the next engine reads its result."""
    (tmp_path / "mytools.py").write_text(TOOL)
    (tmp_path / "script").write_text(json.dumps([CALL, {"content": "Done."}]))
    model = {
        **scripted_model(ports + 1, script=str(tmp_path / "script"), goes_on="kept"),
        "tools": {"python": {"look": "mytools:look"}},
    }
    with serving(tmp_path, ports, {"m": model}) as service:
        before = engines(service)
        job = service.post_job({**alone(tools=[LOOK]), "rounds": 1})
        wait_for(lambda: (tmp_path / "made").exists() and not in_use(service, "m-0"), "the tool runs without a slot")
        assert reload(service, lambda all_: models_of(all_)["m"].update(context=8192)) == {"restarted": ["m"]}
        wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "draining", "the worker is to leave")
        assert engines(service) == before
        (tmp_path / "gate").touch()
        assert service.wait_ended(job)["state"] == "completed"
        assert (tmp_path / "made").read_text() == "look\n"
        wait_settled(service)
        assert engines(service) != before

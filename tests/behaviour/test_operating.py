"""Operator actions over HTTP, incidents, and tools in a job.

Source: specification, "Operator actions" and "Incidents" and "Tool runners".
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, run_command, scripted_model, serving
from tests.harness.waiting import wait_for

MCP_SERVER = PROGRAMS / "mcp_server.py"
TOOL = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": TOOL}}
SAID: Document = {"content": "So it is."}
DONE = {"type": "function", "function": {"name": "done"}}


def alone(**agent: object) -> Document:
    """Return a job of one conversation with one turn."""
    one = {"id": "a", "model": "m", "system": "You add.", **agent}
    return {"rounds": 1, "agents": [one], "conversations": [{"prompt": "What is 2 + 3?"}]}


@pytest.fixture
def service(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    model = scripted_model(free_ports(1), tokens=100_000, interval=0.01)
    with serving(tmp_path, free_ports(1), {"m": model}, {"drain_s": 0.2}) as running:
        yield running


def worker_of(service: Service) -> Document:
    worker: Document = service.get("/v1/workers/m-0")
    return worker


def post(service: Service, action: str) -> None:
    answer = service.http.post(f"/v1/workers/m-0/{action}")
    assert answer.status_code == 202, answer.text
    assert answer.json()["id"] == "m-0"


def test_a_worker_is_drained_and_resumed(service: Service) -> None:
    """Its running turn goes on, no new turn is put on it, and a restart does not end the drain."""
    first = service.post_job(alone())
    wait_for(lambda: worker_of(service)["slots"]["in_use"] == 1, "the turn runs")
    post(service, "drain")
    second = service.post_job(alone())
    assert (worker_of(service)["state"], worker_of(service)["slots"]["in_use"]) == ("draining", 1)
    assert service.http.get("/readyz").status_code == 503
    service.http.post(f"/v1/jobs/{first}/cancel")
    service.wait_ended(first)
    post(service, "restart")
    wait_for(
        lambda: (worker_of(service)["incarnation"], worker_of(service)["state"]) == (2, "draining"),
        "another engine is there, and drained",
    )
    assert service.get(f"/v1/jobs/{second}")["state"] in ("queued", "running")
    assert worker_of(service)["slots"]["in_use"] == 0
    post(service, "resume")
    wait_for(lambda: worker_of(service)["slots"]["in_use"] == 1, "the waiting turn runs")
    assert service.get("/v1/workers/m-0/incidents")["incidents"] == []


def test_a_restart_costs_no_turn_an_attempt(service: Service) -> None:
    """The running turn begins again with the same attempts left, however often it happens."""
    job = service.post_job(alone())
    for incarnation in range(1, 5):
        wait_for(lambda n=incarnation: worker_of(service)["incarnation"] == n, "the engine is there")  # type: ignore[misc]
        wait_for(lambda: worker_of(service)["slots"]["in_use"] == 1, "the turn runs")
        post(service, "restart")
    wait_for(lambda: worker_of(service)["slots"]["in_use"] == 1, "the turn runs")
    assert service.get(f"/v1/jobs/{job}")["state"] == "running"
    assert service.get("/v1/workers/m-0/incidents")["incidents"] == []


def test_an_incident_records_what_happened(service: Service) -> None:
    """The verdict, the exit, the ends of both streams, the kernel's view, and the requests in flight.

    It survives a restart.
    """
    service.post_job(alone())
    wait_for(lambda: worker_of(service)["requests"], "the turn runs")
    (request,) = worker_of(service)["requests"]
    assert request["verdict"] in ("prefilling", "decoding")
    assert request["evidence"]["silent_s"] < 5
    os.kill(worker_of(service)["pid"], signal.SIGKILL)
    wait_for(lambda: service.get("/v1/workers/m-0/incidents")["incidents"], "an incident is kept")
    (incident,) = service.get("/v1/workers/m-0/incidents")["incidents"]
    assert (incident["worker"], incident["incarnation"], incident["reason"]) == ("m-0", 1, "engine_died")
    assert (incident["verdict"], incident["exit"]["signal"]) == ("dead", signal.SIGKILL)
    assert incident["in_flight"][0]["id"] == request["id"]
    assert incident["pools"] == {"pending": 0, "ready": 0, "in_flight": 1, "capacity": incident["pools"]["capacity"]}
    assert any("listening" in line for line in incident["stdout_tail"] + incident["stderr_tail"])
    service.kill()
    service.start()
    assert service.get("/v1/workers/m-0/incidents")["incidents"][0] == incident


def test_an_unknown_worker_is_404(service: Service) -> None:
    """With every method."""
    assert service.http.get("/v1/workers/nobody/incidents").status_code == 404
    for path in ("restart", "drain", "resume"):
        assert service.http.post(f"/v1/workers/nobody/{path}").status_code == 404, path


@pytest.mark.system
@pytest.mark.parametrize("runner", ["python", "mcp"])
def test_an_agent_uses_its_tools(tmp_path: Path, free_ports: Callable[[int], int], runner: str) -> None:
    """The model makes a call and the operator's tool runs. The transcript keeps the call, its result and the signal."""
    script = [
        {"tool_calls": [{"id": "x", "name": "add", "arguments": '{"a": 2, "b": 3}'}]},
        {"content": "It is five.", "tool_calls": [{"id": "y", "name": "done", "arguments": '{"sure": true}'}]},
    ]
    (tmp_path / "script").write_text(json.dumps(script))
    (tmp_path / "mytools.py").write_text("def add(a, b):\n    return a + b\n")
    tools: Document = {"python": {"add": "mytools:add"}}
    if runner == "mcp":
        tools = {"mcp": {"tests": {"command": [sys.executable, str(MCP_SERVER), "stdio"]}}}
    record = tmp_path / "record"
    model = {**scripted_model(free_ports(1), script=str(tmp_path / "script"), record=str(record)), "tools": tools}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job = service.post_job(alone(tools=[ADD], exit_tools=[DONE]))
        assert service.wait_ended(job)["state"] == "completed", service.log()
        (turn,) = service.get(f"/v1/jobs/{job}/result")["conversations"][0]["turns"]
    assert turn["text"] == "It is five."
    (call,) = turn["tool_calls"]
    assert (call["name"], call["arguments"]) == ("add", {"a": 2, "b": 3})
    assert call["result"] == (5 if runner == "python" else {"result": 5.0})
    assert [(signal["name"], signal["arguments"]) for signal in turn["signals"]] == [("done", {"sure": True})]
    asked = [json.loads(line)["request"] for line in record.read_text().splitlines()]
    assert [tool["function"]["name"] for tool in asked[0]["tools"]] == ["add", "done"]
    assert asked[1]["messages"][-1]["role"] == "tool"


@pytest.mark.system
def test_a_tool_that_a_server_adds_is_available_to_the_next_job(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Nothing restarts; the model's list of tools shows it too."""
    script: list[Document] = []
    for tool in ("later", "last"):
        script += [{"tool_calls": [{"id": "x", "name": "learn", "arguments": json.dumps({"tool": tool})}]}, SAID]
    (tmp_path / "script").write_text(json.dumps(script))
    tools = {"mcp": {"tests": {"command": [sys.executable, str(MCP_SERVER), "stdio"]}}}
    model = {**scripted_model(free_ports(1), script=str(tmp_path / "script")), "tools": tools}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        all_tools = {"mcp": "tests"}
        wait_for(lambda: service.get("/v1/models/m/tools")["tools"], "the server has told its tools")
        assert service.wait_ended(service.post_job(alone(tools=[all_tools])))["state"] == "completed"
        later = alone(tools=[{**all_tools, "only": ["learn", "later"]}])
        wait_for(lambda: service.http.post("/v1/jobs", json=later).status_code == 202, "a job may name what it learnt")
        wait_for(
            lambda: "last" in [tool["name"] for tool in service.get("/v1/models/m/tools")["tools"]], "it shows as well"
        )


def test_a_tool_without_a_runner_fails_its_turn_with_its_reason(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The conversation names the call."""
    (tmp_path / "script").write_text(json.dumps([{"tool_calls": [{"id": "x", "name": "add", "arguments": "{"}]}]))
    model = scripted_model(free_ports(1), script=str(tmp_path / "script"))
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job = service.post_job(alone(tools=[ADD]))
        assert service.wait_ended(job)["state"] == "failed"
        (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    assert talk["reason"] == "tool_arguments"


@pytest.mark.system
def test_an_mcp_server_that_is_down_is_reported(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Nothing waits for it; readyz, the status and the live table name it, with the cause."""
    servers = {"well": [sys.executable, str(MCP_SERVER), "stdio"], "ill": ["/bin/sh", "-c", "echo I need a key >&2"]}
    mcp = {name: {"command": command} for name, command in servers.items()}
    model = {**scripted_model(free_ports(1)), "tools": {"mcp": mcp}}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        wait_for(
            lambda: [each["tools"] for each in service.get("/v1/status")["tool_servers"]] == [None, 7], "one is up"
        )
        (ill, well) = service.get("/v1/status")["tool_servers"]
        assert (well["model"], well["name"], well["trouble"]) == ("m", "well", None)
        wait_for(lambda: "a key" in str(service.get("/readyz")["without"][0]["trouble"]), "its end is known")
        (missing,) = service.get("/readyz")["without"]
        assert (missing["name"], missing["tools"]) == (ill["name"], None)
        told = run_command("top", "--once", "--url", service.url).stdout
        assert "the MCP server ill of m: Connection closed; its last output: I need a key" in told
        assert "MCP server ill says: I need a key" in service.log()

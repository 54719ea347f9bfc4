"""Calls of tools over a crash of the service: never a silent second run."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

TOOL = """
import pathlib
MADE, GO_ON = pathlib.Path(__file__).parent / "made", pathlib.Path(__file__).parent / "go-on"
def look(what):
    with MADE.open("a") as file: file.write(f"look {what}\\n")
    return {"seen": what}
def pay(to, idempotency_key):
    with MADE.open("a") as file: file.write(f"pay {to} {idempotency_key}\\n")
    if GO_ON.exists(): GO_ON.open().read()  # a pipe: nothing writes to it before the service is killed
    return {"paid": to}
"""
CALLS = [
    {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": "price"}'}]},
    {"tool_calls": [{"id": "y", "name": "pay", "arguments": '{"to": "bob"}'}]},
    {"content": "Done."},
]


def tool(name: str, argument: str, **extra: str) -> Document:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}, **extra}


@pytest.mark.system
@pytest.mark.parametrize("policy", ["retry", "ask_model", "fail"])
def test_a_call_that_was_cut_off_is_unverified(tmp_path: Path, free_ports: Callable[[int], int], policy: str) -> None:
    """The service is killed while a tool runs; known results stay, and the tool's policy decides on the rest."""
    (tmp_path / "mytools.py").write_text(TOOL)
    (tmp_path / "script").write_text(json.dumps(CALLS))
    os.mkfifo(tmp_path / "go-on")
    made, record = tmp_path / "made", tmp_path / "record"
    model = {
        **scripted_model(free_ports(1), script=str(tmp_path / "script"), record=str(record)),
        "tools": {"python": {"look": "mytools:look", "pay": "mytools:pay"}},
    }
    agents = [
        {"id": "a", "model": "m", "tools": [tool("look", "what"), tool("pay", "to", unverified=policy)]},
    ]
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job = service.post_job({"agents": agents, "conversations": [{"prompt": "Pay Bob."}]})
        wait_for(lambda: made.exists() and "pay" in made.read_text(), "the tool runs")
        service.kill()
        (tmp_path / "go-on").unlink()
        record.unlink()
        service.start()
        ended = service.wait_ended(job)
        (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    lines = made.read_text().splitlines()
    assert lines[0] == "look price"
    assert lines.count("look price") == 1, "its result was known"
    paid = [line for line in lines if line.startswith("pay")]
    assert len(paid) == (2 if policy == "retry" else 1)
    assert len(set(paid)) == 1, "the same call has the same key"
    told = recorded(record)[0]["messages"][-1]["content"]
    assert '- look({"what":"price"}): {"seen": "price"}' in told
    assert '- pay({"to":"bob"}): whether it took effect is not known' in told
    (turn,) = talk["turns"]
    if policy == "fail":
        assert (ended["state"], turn["reason"]) == ("failed", "tool_exception")
        return
    assert ended["state"] == "completed"
    look, pay = turn["tool_calls"]
    assert look["result"] == {"seen": "price"}
    assert ("unverified" in pay["result"]) is (policy == "ask_model")

"""A model that must call a tool, on the engine that ignores ``tool_choice`` (docs/reference/jobs.md)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Document, serving

TOOL = "def add(a, b): return a + b\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [2]}, "b": {"enum": [3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


def speaker(name: str, **fields: object) -> Document:
    params = {"tool_choice": "required", "temperature": 0, "max_tokens": 200}
    return {"id": name, "model": "m", "tools": [ADD], "params": params, **fields}


@pytest.mark.system
def test_a_forced_call_is_made_once_before_the_answer(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """With a call forced at each message the model would never answer.

    A requested format applies to the answer alone.
    """
    (tmp_path / "mytools.py").write_text(TOOL)
    model = {
        "engine": "embedded", "port": free_ports(1), "slots": 2, "context": 4096,
        "args": {"threads": 1}, "tools": {"python": {"add": "mytools:add"}, "iterations": 1},
    }  # fmt: skip
    agents = [speaker("held", validation={"choices": ["yes", "no"]}), speaker("free", params={"max_tokens": 20})]
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        job = service.post_job({"agents": agents, "conversations": [{"prompt": "Go."}]})
        service.wait_ended(job)
        (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    turns = {turn["agent"]: turn for turn in talk["turns"]}
    assert turns["held"]["text"] in {"yes", "no"}, turns["held"]
    (call,) = turns["held"]["tool_calls"]
    assert (call["name"], call["arguments"], call["result"]) == ("add", {"a": 2, "b": 3}, 5)
    assert turns["free"]["tool_calls"] == []

"""A slot is lent while its turn's tools run (specification, "While tools run")."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

TOOL = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def look(what):
    with (HERE / "made").open("a") as file: file.write("look\\n")
    until = time.monotonic() + 60
    while not (HERE / "gate").exists() and time.monotonic() < until: time.sleep(0.01)
    return {"seen": what}
"""
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
OF_THE_PROMPT, OF_THE_CALL = 7, 5
CALL = {"tool_calls": [{"id": "x", "name": "look", "arguments": '{"what": "price"}'}]}


@contextmanager
def looking(folder: Path, ports: Callable[[int], int], *then: Document) -> Iterator[tuple[Service, str]]:
    """Serve one slot, and a job of two conversations; the first calls a tool that waits for a gate."""
    (folder / "mytools.py").write_text(TOOL)
    (folder / "script").write_text(json.dumps([CALL, *then]))
    flags: Document = {"script": str(folder / "script"), "record": str(folder / "record")}
    model = {**scripted_model(ports(1), slots=1, **flags), "tools": {"python": {"look": "mytools:look"}}}
    agents = [{"id": "a", "model": "m", "tools": [LOOK]}]
    with serving(folder, ports(1), {"m": model}) as service:
        job = service.post_job({"agents": agents, "conversations": [{"prompt": "One."}, {"prompt": "Two."}]})
        wait_for((folder / "made").exists, "the tool runs")
        yield service, job


def turns(service: Service, job: str) -> list[Document]:
    return [each for talk in service.get(f"/v1/jobs/{job}/result")["conversations"] for each in talk["turns"]]


@pytest.mark.system
def test_another_turn_has_the_slot_and_the_first_resumes_afterwards(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """It resumes in the same attempt, with the tool's result."""
    with looking(tmp_path, free_ports, {"content": "Other."}, {"content": "Done."}) as (service, job):
        wait_for(
            lambda: service.get(f"/v1/jobs/{job}")["progress"]["conversations"]["completed"] == 1,
            "the other has spoken",
        )
        (worker,) = service.get("/v1/workers")["workers"]
        assert worker["slots"]["in_use"] == 0
        assert [each["verdict"] for each in worker["requests"]] == ["tool_wait"]
        (tmp_path / "gate").touch()
        assert service.wait_ended(job)["state"] == "completed"
        first, second = turns(service, job)
    assert (first["text"], second["text"]) == ("Done.", "Other.")
    assert first["usage"]["completion_tokens"] == OF_THE_CALL + 1
    assert len(first["attempts"]) == 1
    last = recorded(tmp_path / "record")[-1]["messages"]
    assert [message["role"] for message in last[-2:]] == ["assistant", "tool"]
    assert last[-1]["content"].startswith('{"seen": "price"}')


@pytest.mark.system
@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_turn_whose_engine_is_replaced_meanwhile_runs_again(
    tmp_path: Path, free_ports: Callable[[int], int], *, is_resumed: bool
) -> None:
    """Its tool does not: its result is in the prompt. The same holds if an operator or a signal ended the engine."""
    ends = [{"content": "Other."}, {"content": "Done."}, {"content": "Done."}]
    with looking(tmp_path, free_ports, *ends) as (service, job):
        wait_for(
            lambda: service.get(f"/v1/jobs/{job}")["progress"]["conversations"]["completed"] == 1,
            "the other has spoken",
        )
        if is_resumed:
            service.http.post("/v1/workers/m-0/drain")
            service.http.post("/v1/workers/m-0/resume")
        else:
            (worker,) = service.get("/v1/workers")["workers"]
            os.kill(worker["pid"], signal.SIGKILL)
            wait_for(lambda: service.get("/v1/workers")["workers"][0]["incarnation"] > 1, "another engine starts")
        wait_for(lambda: service.http.get("/readyz").status_code == 200, "it is ready again")
        (tmp_path / "gate").touch()
        assert service.wait_ended(job)["state"] == "completed"
        first, _ = turns(service, job)
        usage = service.get("/v1/usage")["usage"]
    # A death ends the attempt before the tool does; its message is wasted, with the prompt, since it starts over.
    kept, wasted = (OF_THE_CALL, 0) if is_resumed else (0, OF_THE_PROMPT + OF_THE_CALL)
    assert first["usage"]["completion_tokens"] == OF_THE_CALL + 1
    assert [each["at_tokens"] for each in first["continued"]] == ([kept] if kept else [])
    assert [(each["answer_tokens"], each["wasted_tokens"]) for each in usage] == [(OF_THE_CALL + 2, wasted)]
    assert len(first["attempts"]) == 2
    assert first["attempts"][0]["outcome"] != "completed"
    if is_resumed:
        assert first["attempts"][0]["reason"] == "slot_lost"
        assert (tmp_path / "made").read_text() == "look\n"

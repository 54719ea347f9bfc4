"""Two models of engines without ports of ours: each has its engine, and neither ends the other's."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.programs import PROGRAMS
from tests.harness.reloads import engines, models_of, reload, wait_settled
from tests.harness.service import Document, serving

Make = Callable[[str], Document]
Pair = tuple[str, str]
PAIRS = [("vllm", "vllm"), ("attached", "attached"), ("vllm", "attached"), ("attached", "vllm")]


@pytest.fixture
def model_of(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Make]:
    """Return a function that makes the settings of a model of this kind, and starts a server for an attached one."""
    with ExitStack() as servers:

        def make(kind: str) -> Document:
            if kind == "vllm":
                checkpoint = tmp_path / "weights"
                checkpoint.mkdir(exist_ok=True)
                command = [sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py")]
                faults = tmp_path / "faults"
                faults.write_text("[]")
                args = {"fault-file": str(faults)}
                return {"engine": "vllm", "model": str(checkpoint), "command": command, "args": args}
            port = free_ports(1)
            server = Popen([sys.executable, "-I", "-S", str(ENGINE_PROGRAM), "--port", str(port)])
            servers.callback(server.wait)
            servers.callback(server.kill)
            return {"engine": "attached", "url": f"http://127.0.0.1:{port}"}

        yield make


def talk(model: str) -> Document:
    agent = {"id": "a", "model": model, "system": "You talk."}
    return {"rounds": 1, "agents": [agent], "conversations": [{"id": "q", "prompt": "Go."}]}


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_both_models_are_served_and_no_engine_is_replaced(
    kinds: Pair, model_of: Make, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """From one configuration, through jobs and at the front door."""
    models = {name: model_of(kind) for name, kind in zip("mn", kinds, strict=True)}
    with serving(tmp_path / "s", free_ports(1), models) as service:
        for name in models:
            assert service.wait_ended(service.post_job(talk(name)))["state"] == "completed"
            body = {"model": name, "messages": [{"role": "user", "content": "Go."}]}
            assert service.http.post("/v1/chat/completions", json=body).status_code == 200
        workers = service.get("/v1/workers")["workers"]
        assert {worker["id"]: worker["incarnation"] for worker in workers} == {"m-0": 1, "n-0": 1}
        assert service.get("/v1/status")["configuration"]["under_way"] == []
        assert "leaves" not in service.log()


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
def test_a_model_that_a_reload_adds_leaves_the_first_ones_engine_alone(
    kinds: Pair, model_of: Make, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """So does a model that it removes again."""
    first, second = map(model_of, kinds)
    with serving(tmp_path / "s", free_ports(1), {"m": first}) as service:
        before = engines(service)
        assert reload(service, lambda all_: models_of(all_).update(n=second)) == {"added": ["n"], "unchanged": ["m"]}
        wait_settled(service)
        assert service.wait_ended(service.post_job(talk("n")))["state"] == "completed"
        assert reload(service, lambda all_: models_of(all_).pop("n")) == {"removed": ["n"], "unchanged": ["m"]}
        wait_settled(service)
        assert engines(service) == before
        (worker,) = service.get("/v1/workers")["workers"]
        assert (worker["id"], worker["incarnation"], worker["state"]) == ("m-0", 1, "ready")

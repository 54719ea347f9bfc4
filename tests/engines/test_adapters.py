"""LoRA adapters that are loaded and unloaded while real engines talk: the binary, and vLLM on UNIX sockets."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.adapters import write_gguf_adapter, write_peft_adapter
from tests.engines.checkpoint import write_checkpoint
from tests.engines.test_weights import trainer, update, vllm_model
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

START_S = 150.0
ADAPTERS = "/v1/models/policy/adapters"
GREEDY: Document = {"temperature": 0, "ignore_eos": True}
# Seeds whose greedy tokens lead by 0.4 at least: a prompt that is cut by the end of a batch is rounded otherwise, by up
# to 0.02, and one that led by 0.002 answered otherwise.
CLEAR_SEEDS = (4, 9, 11)


@pytest.fixture(scope="module", params=["llama-server", "vllm"])
def service(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Path,
    checkpoint: Path,
    free_ports: Callable[[int], int],
) -> Iterator[Service]:
    if request.param == "vllm":
        python = request.getfixturevalue("vllm_python")
        folder = tmp_path_factory.mktemp("sockets")
        model = vllm_model(python, checkpoint, free_ports(2), max_adapters=2, socket_dir=str(folder))
    else:
        binary = request.config.getoption("--llama-server")
        if binary is None:
            pytest.skip("make test-engines builds the binary and names it")
        model = {
            "engine": "llama-server",
            "command": [binary],
            "model": str(tiny_model),
            "args": {"threads": 1},
            "port": free_ports(2),
            "replicas": 2,
            "bios": {"enabled": False},
            "repetition": {"lines": None},
            "restart": {"initial_s": 0.1, "max_s": 0.2},
            "max_adapters": 2,
        }
    server = {"roots": [str(tmp_path_factory.getbasetemp())]}
    folder = tmp_path_factory.mktemp("service")
    with serving(folder, free_ports(1), {"policy": model}, server, ready=False) as running:
        wait_ready(running)
        yield running


def is_vllm(request: pytest.FixtureRequest) -> bool:
    return bool(request.node.callspec.params["service"] == "vllm")


def wait_ready(service: Service) -> None:
    def are_ready() -> bool:
        return all(worker["state"] == "ready" for worker in service.get("/v1/workers")["workers"])

    wait_for(are_ready, "all workers are ready", START_S)


def post(service: Service, model: str, talks: int, tokens: int) -> str:
    agent = {"id": "a", "model": model, "params": {**GREEDY, "max_tokens": tokens}}
    return service.post_job({"agents": [agent], "conversations": [{"prompt": "Go."}] * talks})


def texts(service: Service, job: str) -> list[str]:
    assert service.wait_ended(job, 120)["state"] == "completed"
    return [talk["turns"][0]["text"] for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]]


def say(service: Service, model: str) -> str:
    (text,) = texts(service, post(service, model, 1, 6))
    return text


def load(service: Service, name: str, path: Path) -> httpx.Response:
    return service.http.post(ADAPTERS, json={"name": name, "path": str(path)}, timeout=120)


def test_adapters_are_loaded_and_unloaded_while_engines_talk(
    service: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No running request is lost; a restarted engine has them; removed ones get no request."""

    def write(path: Path, number: int) -> Path:
        if is_vllm(request):
            return write_peft_adapter(path, number)
        return write_gguf_adapter(path, CLEAR_SEEDS[number - 1])

    base = say(service, "policy")
    busy = post(service, "policy", 12, 200)
    first = load(service, "poet-1", write(tmp_path / "poet-1", 1))
    assert (first.status_code, first.json()["workers"]) == (201, ["policy-0", "policy-1"]), first.text
    poet = say(service, "poet-1")
    assert poet != base
    assert len({text[:6] for text in texts(service, busy)} | {base}) == 1

    pid = service.get("/v1/workers/policy-0")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: service.get("/v1/workers/policy-0")["pid"] != pid, "it is gone")
    wait_ready(service)
    heard = {text[:6] for text in texts(service, post(service, "poet-1", 8, 6))}
    assert heard == {poet}

    assert load(service, "poet-2", write(tmp_path / "poet-2", 2)).status_code == 201
    assert load(service, "poet-3", write(tmp_path / "poet-3", 3)).json()["code"] == "adapters_full"
    assert service.http.delete(f"{ADAPTERS}/poet-1").status_code == 204
    assert load(service, "poet-3", tmp_path / "poet-3").status_code == 201
    said = {name: say(service, name) for name in ("policy", "poet-2", "poet-3")}
    assert said["policy"] == base
    assert len({poet, *said.values()}) == 4
    together = [post(service, name, 4, 6) for name in said]
    assert [set(texts(service, job)) for job in together] == [{text} for text in said.values()]


def test_an_adapter_that_does_not_fit_is_refused_before_it_reaches_vllm(
    service: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Otherwise vLLM would end at the next step, or load the wrong weights."""
    if not is_vllm(request):
        pytest.skip("llama-server is its own judge: tests/behaviour/test_adapters_at_run_time.py")
    base, pids = say(service, "policy"), [worker["pid"] for worker in service.get("/v1/workers")["workers"]]
    service.http.delete(f"{ADAPTERS}/poet-3")  # there is room
    config = json.loads((write_peft_adapter(tmp_path / "good", 1) / "adapter_config.json").read_text())
    for name, change in (("prompt", {"peft_type": "PROMPT_TUNING"}), ("none", {"r": "many"})):
        folder = write_peft_adapter(tmp_path / name, 1)
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
    write_peft_adapter(tmp_path / "large", 1, rank=32)
    write_peft_adapter(tmp_path / "wide", 1, width=48)
    cut = write_peft_adapter(tmp_path / "cut", 1) / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-10])
    (write_peft_adapter(tmp_path / "bare", 1) / "adapter_model.safetensors").unlink()
    for name in ("prompt", "none", "large", "wide", "cut", "bare", "nowhere"):
        refused = load(service, name, tmp_path / name)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_adapter"), (name, refused.text)
    strange = write_peft_adapter(tmp_path / "strange", 1, modules=("self_attn.z_proj",))
    refused = load(service, "strange", strange)
    assert (refused.status_code, refused.json()["code"]) == (502, "engine_refused"), refused.text
    assert [worker["pid"] for worker in service.get("/v1/workers")["workers"]] == pids
    assert say(service, "policy") == base


def test_weights_change_under_adapters(service: Service, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The base changes, and an adapter changes it; both are as before when the old weights are back."""
    if not is_vllm(request):
        pytest.skip("only weights of vLLM can change")
    service.http.delete(f"{ADAPTERS}/poet-3")  # there is room
    assert load(service, "poet-9", write_peft_adapter(tmp_path / "poet-9", 9)).status_code == 201
    before = [say(service, name) for name in ("policy", "poet-9")]
    assert update(service, write_checkpoint(tmp_path / "new", 5))["state"] == "completed"
    after = [say(service, name) for name in ("policy", "poet-9")]
    assert len({*before, *after}) == 4
    old = request.getfixturevalue("checkpoint")
    with trainer(service, request.getfixturevalue("vllm_python")) as tell:
        assert tell(checkpoint=str(old), version=2)["state"] == "completed"
    assert [say(service, name) for name in ("policy", "poet-9")] == before

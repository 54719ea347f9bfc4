"""LoRA adapters as agents use them: models with their own names, which also survive a kill of the service."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.adapters import write_gguf_adapter
from tests.harness.service import Document, run_command, serving
from tests.harness.waiting import wait_for

PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def job(*models: str, rounds: int = 1) -> Document:
    agents = [{"id": f"a{place}", "model": model, "params": PARAMS} for place, model in enumerate(models)]
    return {"agents": agents, "rounds": rounds, "conversations": [{"prompt": "Say something."}]}


@pytest.mark.system
def test_agents_use_adapters_as_models(tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]) -> None:
    """One worker serves the base and its adapters; an interrupted job continues with the same adapter."""
    write_gguf_adapter(tmp_path / "poet.gguf", 1)
    model = {
        "engine": "embedded",
        "model": str(tiny_model),
        "args": {"threads": 1},
        "adapters": {"poet": "poet.gguf"},
        "port": free_ports(1),
        "slots": 2,
        "bios": {"enabled": False},
        "repetition": {"lines": None},
    }
    with serving(tmp_path, free_ports(1), {"tiny": model}) as service:
        told = [service.post_job(job(name)) for name in ("tiny", "poet", "tiny", "poet")]
        texts = []
        for each in told:
            assert service.wait_ended(each)["state"] == "completed"
            (turn,) = service.get(f"/v1/jobs/{each}/result")["conversations"][0]["turns"]
            texts.append(turn["text"])
            assert turn["worker"] == "tiny-0"
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]
        refused = service.http.post("/v1/jobs", json=job("poem"))
        assert (refused.status_code, "did you mean 'poet'" in refused.text) == (422, True)
        long = job("poet", rounds=40)
        cut = service.post_job(long)
        wait_for(lambda: service.get(f"/v1/jobs/{cut}")["progress"]["turns"]["completed"] >= 2, "some turns have ended")
        service.kill()
        service.start()
        assert service.wait_ended(cut)["state"] == "completed"
        assert len(service.get(f"/v1/jobs/{cut}/result")["conversations"][0]["turns"]) == 40
        (other,) = [worker["requests"] for worker in service.get("/v1/workers")["workers"]]
        assert other == []


@pytest.mark.system
def test_a_missing_adapter_is_named(tmp_path: Path, tiny_model: Path) -> None:
    """The refusal comes before anything is started; and a name means one thing."""
    config = tmp_path / "roundhouse.yaml"
    for adapters, fault in (("{poet: nowhere.gguf}", "no GGUF file"), ("{tiny: x}", "already has this name")):
        config.write_text(f"models: {{tiny: {{engine: embedded, model: {tiny_model}, adapters: {adapters}}}}}\n")
        ended = run_command("check", "--config", str(config))
        assert (ended.returncode, fault in ended.stderr) == (2, True), ended.stderr

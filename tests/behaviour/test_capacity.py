"""Capacity in tokens through the service: the real llama.cpp, and a program that plays vLLM and reports its cache."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.cli.displays.status_table import plain_lines
from tests.behaviour.test_lanes import talk
from tests.conftest import ENGINE_PROGRAM
from tests.harness.service import Document, scripted_model, serving
from tests.harness.waiting import wait_for

PROGRAM = Path(__file__).parent.parent / "harness" / "programs" / "vllm_engine.py"


def tell(file: Path, *, used: float, preemptions: int) -> None:
    """Have the engine report this; a reader always sees a complete file."""
    half = file.with_suffix(".half")
    half.write_text(
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="10000",block_size="128",'
        'kv_cache_max_concurrency="2.4"} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
        f'vllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
    )
    half.replace(file)


@pytest.mark.system
def test_the_capacity_follows_the_engines_reports(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Only two slots of full length would fit. A preemption takes a fifth off the capacity."""
    metrics, checkpoint, faults = tmp_path / "metrics", tmp_path / "weights", tmp_path / "faults"
    faults.write_text("[]")
    checkpoint.mkdir()
    tell(metrics, used=0.5, preemptions=3)
    model = {
        "engine": "vllm",
        "model": str(checkpoint),
        "command": [sys.executable, "-I", "-S", str(PROGRAM)],
        "args": {"metrics": str(metrics), "fault-file": str(faults)},
        "capacity": "tokens",
        "context": 4096,
    }
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:

        def kv() -> Any:  # noqa: ANN401 - JSON of the service
            return service.get("/v1/workers/m-0")["kv"]

        assert service.get("/v1/workers/m-0")["slots"]["total"] == 256
        assert kv() == {"budget": 10_000, "reserved": 0, "used": 5000}
        job = service.post_job(talk(["m"], rounds=200))
        wait_for(lambda: kv()["reserved"] > 0, "turns reserve")
        assert {kv()["reserved"] % 128 for _ in range(10)} == {0}, "whole blocks"
        assert service.wait_ended(job)["state"] == "completed"
        tell(metrics, used=0.9, preemptions=4)
        wait_for(lambda: kv() == {"budget": 8000, "reserved": 0, "used": 9000}, "less is lent")
        exposition = service.http.get("/metrics").text
        assert 'roundhouse_worker_kv_budget_tokens{model="m",worker="m-0"} 8000.0' in exposition


@pytest.mark.system
def test_llama_cpps_slots_share_a_pool_that_is_never_full(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Eight first prompts at once, each twice as long as expected, do not fit together; those that fit go on."""
    model = {"engine": "embedded", "port": free_ports(1), "context": 512, "capacity": "tokens", "kv_tokens": 1400}
    agent = {"id": "a", "model": "m", "params": {"max_tokens": 40, "ignore_eos": True}}
    talks = [{"id": f"c{number}", "prompt": f"{number} " * 150, "rounds": 1} for number in range(8)]
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:
        worker = service.get("/v1/workers/m-0")
        assert (worker["slots"]["total"], worker["kv"]) == (16, {"budget": 1400, "reserved": 0, "used": 0})
        job = service.post_job({"name": "full", "agents": [agent], "conversations": talks})
        assert service.wait_ended(job)["state"] == "completed"
        turns = [turn for talk in service.get(f"/v1/jobs/{job}/result")["conversations"] for turn in talk["turns"]]
        reasons = [attempt["reason"] for turn in turns for attempt in turn["attempts"] if attempt["reason"]]
        assert set(reasons) <= {"cache_full"}
        assert all(turn["usage"]["prompt_tokens"] > 300 for turn in turns)
        assert "Context size has been exceeded" not in service.log()
        assert service.get("/v1/workers/m-0")["kv"]["reserved"] == 0


@pytest.mark.system
def test_a_prompt_that_exceeds_the_context_fails_before_it_is_sent(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """It has one token more than the context, in a pool that has room for two."""
    model = {"engine": "embedded", "port": free_ports(1), "context": 512, "capacity": "tokens", "kv_tokens": 1400}
    talks = [{"id": "c", "prompt": "x" * 700, "rounds": 1}]
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:
        job = service.post_job({"name": "long", "agents": [{"id": "a", "model": "m"}], "conversations": talks})
        assert service.wait_ended(job)["state"] == "failed"
        (turn,) = service.get(f"/v1/jobs/{job}/conversations/c")["turns"]
        assert turn["reason"] == "context_overflow"
        assert "one request may hold 512" in turn["detail"]


def test_a_wait_for_room_in_the_cache_is_shown(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The head of the ready turns shows how much is reserved, and so does the table of workers."""
    held = tmp_path / "go"
    model = scripted_model(free_ports(1), slots=4, hold=str(held))
    model |= {"capacity": "tokens", "context": 1000, "kv_tokens": 1000, "params": {"max_tokens": 600}}
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:
        talks = [{"id": f"c{number}", "prompt": str(held), "rounds": 1} for number in range(2)]
        job = service.post_job({"name": "hold", "agents": [{"id": "a", "model": "m"}], "conversations": talks})
        status: Document = {}

        def is_held() -> bool:
            status.update(service.get("/v1/status"))
            return any(head["waits_for"].startswith("room in") for head in status["heads"]["ready"])

        wait_for(is_held, "one has no room beside the other")
        reserved = status["workers"][0]["kv"]["reserved"]
        assert 600 < reserved < 1000
        told = f"room in the KV cache of m: {reserved} of 1000 tokens are reserved"
        assert [head["waits_for"] for head in status["heads"]["ready"]] == [told]
        assert f"kv {reserved / 1000:.1f}k/1.0k" in "\n".join(plain_lines(status))
        held.touch()
        assert service.wait_ended(job)["state"] == "completed"


@pytest.mark.system
def test_reserved_tokens_follow_the_reports_of_the_engine(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Counted prompts and growing answers correct the estimate; a request that takes less makes room at once."""
    model = {
        "engine": "llama-server",
        "command": [sys.executable, "-I", "-S", str(ENGINE_PROGRAM)],
        "args": {"counts": 700, "hold": "file=([^ ]+) ", "props-slots": 4},
        "port": free_ports(1),
        "slots": 4,
        "context": 4000,
        "capacity": "tokens",
        "kv_tokens": 5000,
    }
    agent = {"id": "a", "model": "m", "params": {"max_tokens": 9}}
    talks = [{"id": f"c{n}", "prompt": f"file={tmp_path}/{n} ".ljust(6000, "x"), "rounds": 1} for n in range(2)]
    with serving(tmp_path / "s", free_ports(1), {"m": model}) as service:

        def reserved() -> object:
            return service.get("/v1/workers/m-0")["kv"]["reserved"]

        job = service.post_job({"name": "large", "agents": [agent], "conversations": talks})
        wait_for(lambda: reserved() == 2 * (700 + 32), "both run, with what was counted")
        for number in range(2):
            (tmp_path / str(number)).touch()
        assert service.wait_ended(job)["state"] == "completed"
        assert reserved() == 0

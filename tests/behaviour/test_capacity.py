"""Capacity in tokens through the service, on a program that plays vLLM and tells its cache in a file."""

import sys
from collections.abc import Callable
from pathlib import Path

from tests.behaviour.test_lanes import talk
from tests.harness.service import serving
from tests.harness.waiting import wait_for

PROGRAM = Path(__file__).parent.parent / "harness" / "programs" / "vllm_engine.py"


def tell(file: Path, *, used: float, preemptions: int) -> None:
    """Have the engine tell that; whoever reads sees a whole file."""
    half = file.with_suffix(".half")
    half.write_text(
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="10000",kv_cache_max_concurrency="2.4"} 1.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
        f'vllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
    )
    half.replace(file)


def test_what_is_lent_follows_what_the_engine_tells(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Slots of full length would be two. A preemption takes a fifth of what is lent."""
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

        def kv() -> object:
            return service.get("/v1/workers/m-0")["kv"]

        assert service.get("/v1/workers/m-0")["slots"]["total"] == 256
        assert kv() == {"budget": 10_000, "reserved": 0, "used": 5000}
        job = service.post_job(talk(["m"], rounds=1))
        assert service.wait_ended(job)["state"] == "completed"
        tell(metrics, used=0.9, preemptions=4)
        wait_for(lambda: kv() == {"budget": 8000, "reserved": 0, "used": 9000}, "less is lent")
        exposition = service.http.get("/metrics").text
        assert 'roundhouse_worker_kv_budget_tokens{model="m",worker="m-0"} 8000.0' in exposition

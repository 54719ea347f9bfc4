"""The same KV cache lent by slots of full length and by tokens: turns a second, preemptions, waiting of the largest.

Real vLLM on the CPU with a made checkpoint (a token a byte) and room for 4 requests of 16,384 tokens: ``slots`` lends
4, ``tokens`` as many of at most 64 as have room. Prompts take a quarter of the context on average, drawn wide.

    python -m bench.capacity --vllm-python PYTHON [--conversations 60] [--rounds 2]
"""

import argparse
import random
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.engines.checkpoint import write_checkpoint
from tests.harness.service import Service, serving

PORT = 9860
CONTEXT, SLOTS, MOST = 16_384, 4, 64
BLOCK = 128  # tokens
PARAMS = {"temperature": 0.0, "ignore_eos": True}


def job_of(conversations: int, rounds: int) -> dict[str, Any]:
    """Return a job whose prompts are a quarter of the context on average."""
    dice = random.Random(3)

    def length() -> int:
        return int(min(CONTEXT * 0.7, max(100, dice.lognormvariate(8.0, 0.8))))

    return {
        "name": "capacity",
        "agents": [
            {"id": "a", "model": "m", "params": {**PARAMS, "max_tokens": 48}},
            {"id": "b", "model": "m", "params": {**PARAMS, "max_tokens": 24}},
        ],
        "conversations": [
            {"id": f"c{n}", "prompt": "".join(dice.choices("abcdefgh ", k=length())), "rounds": rounds}
            for n in range(conversations)
        ],
    }


def run(capacity: dict[str, object], options: argparse.Namespace) -> dict[str, Any]:
    """Run the job once; return what came of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = {
            "engine": "vllm",
            "model": str(write_checkpoint(folder / "checkpoint", seed=1)),
            "command": [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server"],
            "args": {"enforce-eager": True, "dtype": "bfloat16", "num-gpu-blocks-override": SLOTS * CONTEXT // BLOCK},
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            "context": CONTEXT,
            "repetition": None,
            **capacity,
        }
        with serving(folder / "service", PORT, {"m": model}, ready=False) as service:
            while not service.http.get("/readyz").is_success:  # its own start limit ends that
                time.sleep(0.5)
            return measure(service, job_of(options.conversations, options.rounds))


def measure(service: Service, document: dict[str, Any]) -> dict[str, Any]:
    """Run a job; return what came of it."""
    began, most, over = time.monotonic(), 0, 0.0
    job = service.post_job(document)
    while service.get(f"/v1/jobs/{job}")["state"] not in {"completed", "completed_with_failures", "failed"}:
        worker = service.get("/v1/workers")["workers"][0]
        most = max(most, worker["slots"]["in_use"])
        if worker["kv"] is not None:
            over = max(over, worker["kv"]["used"] / worker["kv"]["budget"])
        time.sleep(0.2)
    seconds = time.monotonic() - began
    talks = service.get(f"/v1/jobs/{job}/result")["conversations"]
    turns = [turn for talk in talks for turn in talk["turns"]]
    waits = sorted(
        (turn["usage"]["prompt_tokens"], _seconds(turn["queued_at"], turn["started_at"]))
        for turn in turns
        if turn["state"] == "completed"
    )
    largest = [wait for _, wait in waits[-len(waits) // 10 :]]
    return {
        "turns": len(waits),
        "failed": sum(turn["state"] != "completed" for turn in turns),
        "attempts": sum(len(turn["attempts"]) for turn in turns),
        "rate": len(waits) / seconds,
        "most": most,
        "wait": statistics.median(wait for _, wait in waits),
        "largest": statistics.median(largest),
        "fullest": over,
        "preempting": service.log().count("the engine preempts"),
    }


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm-python", required=True)
    options = parser.parse_args()
    ways: dict[str, dict[str, object]] = {"slots": {"slots": MOST}, "tokens": {"capacity": "tokens", "slots": MOST}}
    rates = {}
    for name, capacity in ways.items():
        told = run(capacity, options)
        rates[name] = told["rate"]
        print(f"{name:7} " + ", ".join(f"{key} {value:.4g}" for key, value in told.items()), flush=True)
    print(f"turns a second: {rates['tokens'] / rates['slots']:.2f} x")


if __name__ == "__main__":
    main()

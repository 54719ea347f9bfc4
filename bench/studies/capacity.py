"""The same KV cache lent by slots of full length and by tokens: turns per second, preemptions, waits of large turns.

``slots`` takes 4 requests of the whole context, ``tokens`` as many as fit in the same memory, and ``memory`` is the
bound: as many slots as ``tokens`` has, each with its own memory for the whole context. ``thrown`` is what a user would
do: an engine started as for ``tokens``, to which all ready turns are sent at once; its own queue orders them. Prompts
take a quarter of the context on average, with a wide spread. vLLM runs on the CPU with a generated checkpoint (a token
per byte).

    python -m bench.studies.capacity [--engine embedded|llama-server|vllm] [--program PROGRAM] [--conversations 60]
        [--rounds 2] [--ways slots,tokens,memory,thrown] [--times 1] [--policy critical_path|progress|fifo]
        [--model FILE] [--context TOKENS]

``--program`` is llama-server, or a Python that has vLLM. With ``--times`` the ways alternate, and medians count.
"""

import argparse
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.engines.checkpoint import write_checkpoint
from tests.harness.ports import find_ports
from tests.harness.service import Service, serving
from workers.engine.embedded.tiny_model import ensure_tiny_model

PORT = find_ports(4)
SLOTS = 4
CONTEXTS = {"vllm": 16_384, "embedded": 4096, "llama-server": 4096}
MOST = {"vllm": 64, "embedded": 16, "llama-server": 16}
BLOCK = 128  # tokens of a block of vLLM's cache
PARAMS = {"temperature": 0.0, "ignore_eos": True}
RATIOS = ("rate", "first token p95")


def job_of(conversations: int, rounds: int, context: int) -> dict[str, Any]:
    """Return a job whose prompts are a quarter of the context on average."""
    dice = random.Random(3)

    def length() -> int:
        return int(min(context * 0.5, max(50, dice.lognormvariate(math.log(context / 5.5), 0.8))))

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


def model_of(way: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the model of one way to lend the same memory; ``memory`` has more."""
    context, most = options.context or CONTEXTS[options.engine], MOST[options.engine]
    capacity: dict[str, Any] = {"capacity": "tokens" if way == "tokens" else "slots", "slots": most}
    shared = {"engine": options.engine, "context": context, "repetition": None}
    if options.engine != "vllm":
        if way == "tokens":
            capacity["kv_tokens"] = SLOTS * context
        elif way == "slots":
            capacity["slots"] = SLOTS
        if options.model or options.engine == "llama-server":
            shared["model"] = options.model or "roundhouse:tiny"
        return {**shared, **capacity, **({"command": [options.program]} if options.program else {})}
    lengths = most if way == "memory" else SLOTS
    return {
        **shared,
        **capacity,
        "model": str(write_checkpoint(folder / "checkpoint", seed=1)),
        "command": [options.program, "-m", "vllm.entrypoints.openai.api_server"],
        "args": {"enforce-eager": True, "dtype": "bfloat16", "num-gpu-blocks-override": lengths * context // BLOCK},
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job once; return its figures."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = model_of(way, options, folder)
        engine = _thrown_at(options, model, folder) if way == "thrown" else nullcontext(model)
        with (
            engine as model,
            serving(
                folder / "service", PORT, {"m": model}, ready=False, scheduling={"policy": options.policy}
            ) as service,
        ):
            while not service.http.get("/readyz").is_success:  # the service's own start limit bounds this
                time.sleep(0.5)
            job = job_of(options.conversations, options.rounds, options.context or CONTEXTS[options.engine])
            return measure(service, job)


@contextmanager
def _thrown_at(options: argparse.Namespace, model: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Run an engine with the memory of ``tokens``; yield an attached model that sends it all ready turns."""
    context, most, port = options.context or CONTEXTS[options.engine], MOST[options.engine], PORT + 1
    if options.engine == "vllm":
        flags = {**model["args"], "max-num-seqs": most, "max-model-len": context, "served-model-name": "m"}
        argv = [*model["command"], "--model", model["model"]]
    else:
        flags = {
            "model": options.model or str(ensure_tiny_model(folder / "tiny.gguf")),
            "ctx-size": SLOTS * context,
            "parallel": most,
        }
        flags |= {"kv-unified": True, "alias": "m"}
        argv = [options.program]
    for flag, value in {**flags, "port": port}.items():
        argv += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    with (folder / "engine.log").open("wb") as log:
        engine = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **model.get("env", {})})
        try:
            url = f"http://127.0.0.1:{port}"
            yield {"engine": "attached", "url": url, "model": "m", "slots": 4096, "repetition": None}
        finally:
            engine.terminate()
            engine.wait(60)


def measure(service: Service, document: dict[str, Any]) -> dict[str, Any]:
    """Run a job; return its figures."""
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
    firsts = sorted(
        _seconds(turn["queued_at"], turn["first_token_at"]) for turn in turns if turn.get("first_token_at") is not None
    )
    largest = [wait for _, wait in waits[-len(waits) // 10 :]]
    return {
        "turns": len(waits),
        "failed": dict(Counter(turn["reason"] for turn in turns if turn["state"] != "completed")),
        "attempts": sum(len(turn["attempts"]) for turn in turns),
        "rate": len(waits) / seconds,
        "most": most,
        "wait": statistics.median(wait for _, wait in waits),
        "largest": statistics.median(largest),
        "first token p95": firsts[len(firsts) * 95 // 100] if firsts else math.nan,
        "fullest": over,
        "gave way": sum(attempt["reason"] == "cache_full" for turn in turns for attempt in turn["attempts"]),
        "preemptions": _preemptions(service),
    }


def _preemptions(service: Service) -> int:
    """Return the number that vLLM reports; it is read only where its cache is lent by tokens."""
    lines = service.http.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("roundhouse_worker_kv_preemptions_total{")]
    return sum(int(float(line.split()[-1])) for line in told)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def main() -> None:
    """Measure the chosen ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engine", choices=sorted(CONTEXTS), default="embedded")
    parser.add_argument("--program")
    parser.add_argument("--model", help="model for llama.cpp; default: the tiny one")
    parser.add_argument("--context", type=int, help="tokens; default: the engine's own")
    parser.add_argument("--ways", default="slots,tokens,memory")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--policy", default="critical_path")
    options = parser.parse_args()
    ways = options.ways.split(",")
    told: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for way in ways * options.times:
        figures = run(way, options)
        told[way].append(figures)
        print(f"{way:7} " + ", ".join(f"{key} {_shown(value)}" for key, value in figures.items()), flush=True)
    print(f"medians of {options.times}, beside {ways[0]}:")
    for way in ways:
        beside = (f"{name} {_median(told[way], name) / _median(told[ways[0]], name):.2f} x" for name in RATIOS)
        print(f"{way:7} " + ", ".join(beside))


def _median(figures: list[dict[str, Any]], name: str) -> float:
    return float(statistics.median(each[name] for each in figures))


if __name__ == "__main__":
    main()

"""Prompt tokens that an engine reads for many forks of one turn / those of one, on real engines.

Each fork asks again what a recorded conversation of some thousand tokens was asked last. An engine reads the end of
each prompt for itself: llama.cpp the last token at least, vLLM the last block.

    python -m bench.forks [--ways tokens,slots,vllm] [--forks 100] [--tokens 4000] [--answer 8] [--vllm PYTHON]
        [--block 128]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.engines.checkpoint import write_checkpoint
from tests.harness.ports import find_ports
from tests.harness.service import serving
from tests.harness.waiting import wait_for

PORT = find_ports(4)
SLOTS = 4
START_S = 300.0
TOKENS_A_LINE = 12  # of the small model


def main() -> None:
    """Print a line for each way to keep the KV cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="tokens,slots")
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--vllm", default="python", help="a Python that has vLLM")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block of vLLM, which keeps whole ones")
    options = parser.parse_args()
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as name:
            print(f"{way:8s} {measure(way, Path(name), options)}", flush=True)


def measure(way: str, folder: Path, options: argparse.Namespace) -> str:
    """Record one conversation, and fork its last turn; return the counts in words."""
    line = "Item {}: the town has {} cars. "
    count = options.tokens // (len(line) if way == "vllm" else TOKENS_A_LINE)
    agents = [{"id": "a", "model": "m", "params": {"max_tokens": options.answer, "temperature": 0, "ignore_eos": True}}]
    talk = {"id": "c", "prompt": "".join(line.format(n, n * 7 % 13) for n in range(count))}
    with serving(folder / "service", PORT, {"m": model_of(way, folder, options)}, ready=False) as service:
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready", START_S)
        source = service.post_job({"agents": agents, "rounds": 2, "conversations": [talk]})
        ended = service.wait_ended(source, START_S)
        assert ended["state"] == "completed", service.get(f"/v1/jobs/{source}/result")["conversations"][0]["turns"]
        service.stop()  # no cache knows the prompt any more
        service.start(ready=False)
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready again", START_S)
        fork = {"from": {"job": source, "conversation": "c", "before": {"agent": "a", "round": 1}}}
        job_id = service.post_job({"agents": agents, "rounds": 2, "conversations": [fork] * options.forks})
        state = service.wait_ended(job_id, 6 * START_S)["state"]
        result: dict[str, Any] = service.get(f"/v1/jobs/{job_id}/result")
    turns = [turn for talk in result["conversations"] for turn in talk["turns"] if turn["inherited"] is None]
    once = turns[0]["usage"]["prompt_tokens"]
    read = sorted(turn["usage"]["prompt_tokens"] - turn["usage"]["cached_tokens"] for turn in turns)
    whole = sum(each > once / 2 for each in read)
    told = f"{sum(read) / once:.3f} x of one read; the whole {whole} times, and {read[len(read) // 2]} tokens each"
    return f"{len(turns)} forks of {once} tokens on {SLOTS} slots: {told}; {state}"


def model_of(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of a model."""
    context = options.tokens + 1024
    if way == "vllm":
        return {
            "engine": "vllm", "model": str(write_checkpoint(folder / "checkpoint", seed=1)), "port": PORT + 1,
            "command": [options.vllm, "-m", "vllm.entrypoints.openai.api_server"], "slots": SLOTS, "context": context,
            "args": {
                "enforce-eager": True, "dtype": "bfloat16", "block-size": options.block,
                "num-gpu-blocks-override": 8 * context // options.block,
            },
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        }  # fmt: skip
    shared = {"capacity": "tokens", "kv_tokens": SLOTS * context} if way == "tokens" else {}
    small = {"engine": "embedded", "model": "roundhouse:small", "port": PORT + 1}
    return {**small, "slots": SLOTS, "context": context, **shared}


if __name__ == "__main__":
    main()

"""Prompt tokens that an engine reads for many forks of one turn, relative to those for one, on real engines.

Each fork repeats the last turn of a recorded conversation of some thousand tokens. An engine reads the end of each
prompt separately: llama.cpp the last token at least, vLLM the last block.

    python -m bench.studies.forks [--ways tokens,slots,vllm] [--forks 100] [--tokens 4000] [--answer 8] [--vllm PYTHON]
        [--block 128]
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.parts.services import START_S, serving, wait_ended
from tests.engines.checkpoint import write_checkpoint
from tests.harness.ports import find_ports

PORT = find_ports(4)
SLOTS = 4
PAUSE_S = 0.2  # pause between two reads of a job's state
TOKENS_A_LINE = 12  # the small model's tokens of a line


def main() -> None:
    """Print a line for each way to keep the KV cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="tokens,slots")
    parser.add_argument("--forks", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=8)
    parser.add_argument("--vllm", default="python", help="a Python with vLLM")
    parser.add_argument("--block", type=int, default=128, help="tokens of a block of vLLM, which caches whole blocks")
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
    with serving(PORT, {"m": model_of(way, folder, options)}) as service:
        source = service.post_job({"agents": agents, "rounds": 2, "conversations": [talk]})
        ended = wait_ended(service, source, PAUSE_S)
        assert ended["state"] == "completed", service.get(f"/v1/jobs/{source}/result")["conversations"][0]["turns"]
        service.stop()  # the next engine's cache is empty
        service.start(limit_s=START_S)
        fork = {"from": {"job": source, "conversation": "c", "before": {"agent": "a", "round": 1}}}
        job_id = service.post_job({"agents": agents, "rounds": 2, "conversations": [fork] * options.forks})
        state = wait_ended(service, job_id, PAUSE_S)["state"]
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
            "engine": "vllm", "model": str(write_checkpoint(folder / "checkpoint", seed=1)),
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

"""Prompts on the real llama.cpp (embedded): reuse of its prefix caches, and its reading rate by batch size.

``reuse``: the cached tokens of each prompt / those that its agent's previous turn left, with conversations that fit the
slots, and with three times as many. ``batches``: tokens read a second and the longest silence with Roundhouse's batches
of 256 tokens, in pairs with llama.cpp's own default of 2,048.

    python -m bench.prompts [--part reuse batches] [--policies P,..] [--rounds N] [--model FILE.gguf] [--pairs N]
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import anyio

from bench.parts.services import run_job
from service.scheduling.core.policies import POLICIES
from tests.harness.ports import find_ports
from transport.client import EngineClient
from transport.dialects.llama_server import LLAMA_SERVER
from transport.request import ChatRequest, Message
from workers import EngineKind, Worker, WorkerSpec
from workers.engine.embedded.tiny_model import ensure_tiny_model
from workers.requests.generation import Generation

PORT = find_ports(4)
SLOTS = 4
SYSTEM = "You are a careful person who thinks about every matter at length and says so in simple words."
WORDS = 600  # two batches of the default: each letter is a token of the tiny model
RIVAL = {"batch_size": 2048, "ubatch_size": 512}


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("reuse", "batches"), default=("reuse", "batches"))
    parser.add_argument("--policies", default="critical_path,progress,fifo", help=", ".join(POLICIES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model", help="model for the batches; default: the tiny one")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if "reuse" in options.part:
        for policy in options.policies.split(","):
            measure_reuse(policy, options.rounds)
    if "batches" in options.part:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or str(ensure_tiny_model(Path(folder) / "tiny.gguf"))
            anyio.run(compare_batches, model, options.pairs)


def measure_reuse(policy: str, rounds: int) -> None:
    """Print a line for each number of conversations and shape."""
    for conversations, bound in ((SLOTS, 0.95), (3 * SLOTS, 0.8)):
        for agents in (1, 3):
            share = _reuse(conversations // agents if agents > 1 else conversations, agents, policy, rounds)
            print(f"{policy:14s} {conversations:2d} prompts on {SLOTS} slots, {agents} agents a conversation:"
                  f" {share:.3f} of the reusable tokens (bound {bound})", flush=True)  # fmt: skip


def _reuse(conversations: int, agents: int, policy: str, rounds: int) -> float:
    """Return reused / reusable tokens of one job."""
    model = {
        "engine": "embedded", "port": PORT, "slots": SLOTS, "context": 4096,
        "params": {"max_tokens": 48, "temperature": 0},
    }  # fmt: skip
    job = {
        "name": "reuse",
        "rounds": rounds,
        "agents": [{"id": f"a{number}", "model": "m", "system": f"{SYSTEM} ({number})"} for number in range(agents)],
        "conversations": [
            {"prompt": f"Topic {number}: should towns ban cars from street {number}, and who pays for it?"}
            for number in range(max(1, conversations))
        ],
    }
    transcripts = run_job({"m": model}, job, scheduling={"policy": policy})
    reused = reusable = 0
    for transcript in transcripts:
        known: dict[str, int] = {}
        for turn in transcript["turns"]:
            usage, agent = turn["usage"], turn["agent"]
            if agent in known:
                reusable += known[agent]
                reused += min(usage["cached_tokens"] or 0, known[agent])
            known[agent] = usage["prompt_tokens"] + usage["completion_tokens"]
    return reused / reusable


class Gaps(Generation):
    """Records the longest silence before the first token."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.longest_s, self._last_at = 0.0, time.monotonic()

    def touch(self) -> None:
        """Record the time since the last bytes."""
        now = time.monotonic()
        self.longest_s, self._last_at = max(self.longest_s, now - self._last_at), now
        super().touch()


async def _read(spec: WorkerSpec) -> tuple[float, float]:
    """Return tokens a second, and the longest silence in seconds, of one prompt that no cache holds."""
    async with Worker(spec) as worker:
        gaps = Gaps()
        chat = ChatRequest(
            model=spec.name,
            messages=(Message(role="user", content="a word " * WORDS),),
            params=LLAMA_SERVER.canary_params,
        )
        await EngineClient(worker.endpoint, LLAMA_SERVER).stream(chat, gaps)
    assert gaps.timings is not None
    return 1000 * gaps.timings.prompt_tokens / gaps.timings.prompt_ms, gaps.longest_s


async def compare_batches(model: str, pairs: int) -> None:
    """Print each pair, and the medians."""
    ours = WorkerSpec(engine=EngineKind.EMBEDDED, model=model, port=PORT, slots=2, context=8192, on_cpu=True)
    ratios, silences = [], []
    for _ in range(pairs):
        speed, silent_s = await _read(ours)
        rival, rival_s = await _read(replace(ours, args=RIVAL))
        ratios.append(speed / rival)
        silences.append((silent_s, rival_s))
        print(f"{speed:7.0f} tokens/s, silent {silent_s:6.2f} s; rival {rival:7.0f}, {rival_s:6.2f} s", flush=True)
    silent_s, rival_s = (statistics.median(each) for each in zip(*silences, strict=True))
    speed = statistics.median(ratios)
    print(f"speed / rival: {speed:.3f} (bound 0.95); silent {silent_s:.2f} s, rival {rival_s:.2f} s")


if __name__ == "__main__":
    main()

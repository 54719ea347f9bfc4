"""How fast an engine on the CPU reads a prompt, and how long it says nothing meanwhile, by the size of its batches.

On the real llama.cpp (embedded), with its own default of 2,048 tokens a batch as the rival, in pairs.

python -m bench.batches [--model FILE.gguf] [--pairs N]
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import anyio

from tests.harness.ports import find_ports
from transport.client import EngineClient
from transport.dialects.llama_server import LLAMA_SERVER
from transport.request import ChatRequest, Message
from workers import EngineKind, Worker, WorkerSpec
from workers.engine.embedded.tiny_model import ensure_tiny_model
from workers.requests.generation import Generation

PORT = find_ports(4)
WORDS = 600  # two batches of the default, where each letter is a token, as in the tiny model
RIVAL = {"batch_size": 2048, "ubatch_size": 512}


class Gaps(Generation):
    """Notes the longest silence before the first token."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.longest_s, self._last_at = 0.0, time.monotonic()

    def touch(self) -> None:
        """Take the fact that bytes came."""
        now = time.monotonic()
        self.longest_s, self._last_at = max(self.longest_s, now - self._last_at), now
        super().touch()


async def read(spec: WorkerSpec) -> tuple[float, float]:
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


async def compare(model: str, pairs: int) -> None:
    """Print each pair, and the medians."""
    ours = WorkerSpec(engine=EngineKind.EMBEDDED, model=model, port=PORT, slots=2, context=8192, on_cpu=True)
    ratios, silences = [], []
    for _ in range(pairs):
        speed, silent_s = await read(ours)
        rival, rival_s = await read(replace(ours, args=RIVAL))
        ratios.append(speed / rival)
        silences.append((silent_s, rival_s))
        print(f"{speed:7.0f} tokens/s, silent {silent_s:6.2f} s; rival {rival:7.0f}, {rival_s:6.2f} s", flush=True)
    silent_s, rival_s = (statistics.median(each) for each in zip(*silences, strict=True))
    speed = statistics.median(ratios)
    print(f"speed / rival: {speed:.3f} (bound 0.95); silent {silent_s:.2f} s, rival {rival_s:.2f} s")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(ensure_tiny_model(Path(folder) / "tiny.gguf"))
        anyio.run(compare, model, options.pairs)


if __name__ == "__main__":
    main()

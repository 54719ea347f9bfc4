"""Accuracy of an engine's predicted latency: ``predicted_ms`` beside ``latency_ms``, on the real embedded engine.

Two checkpoints on two lanes, one run after the other, with prompts and answers of many lengths; the first round loads
each. In parallel they would share the cores, and no speed would stay the same. It prints the median and the 95th
percentile of |predicted - measured| / measured.

    python -m bench.studies.latency [--rounds N]
"""

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from roundhouse import EngineKind, InferenceEngine, InferenceFailed, WorkerSpec
from roundhouse.inference.event_log import INFER_DONE, replay
from workers.models.small_model import ensure_small_model
from workers.outcome import FailureReason

LENGTHS = (16, 48, 96, 160)  # most tokens of an answer
WORDS = (10, 100, 400)  # words of a prompt
AGENTS = ("a", "b")


async def run_unless_it_loops(engine: InferenceEngine, agent: str, prompt: str, length: int) -> None:
    """Run an agent once; random words may send a toy model into a loop of lines, which has no latency."""
    try:
        await engine.run(agent, prompt, step="act", max_tokens=length)
    except InferenceFailed as error:
        if error.reason != FailureReason.REPEATED_LINE_LOOP:
            raise


async def play(model: Path, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the event log's entries of runs with a predicted latency."""
    log, dice = folder / "events.jsonl", random.Random(7)
    spec = WorkerSpec(engine=EngineKind.EMBEDDED, slots=1, context=2048)
    async with InferenceEngine(spec, event_log=log, ports=(9720, 9721)) as engine:
        for agent in AGENTS:
            copy = folder / f"{agent}.gguf"
            if not copy.exists():
                shutil.copy(model, copy)
            await engine.register_agent(agent_id=agent, model_ckpt=copy)
        for _ in range(rounds):
            for length in LENGTHS:
                for words in WORDS:
                    prompt = " ".join(dice.choice(("sea", "hill", "town", "night", "doctor")) for _ in range(words))
                    for agent in AGENTS:
                        await run_unless_it_loops(engine, agent, prompt, length)
    return [event for event in replay(log) if event["event"] == INFER_DONE and event["predicted_ms"] is not None]


def tell(runs: list[dict[str, Any]], asked: int) -> None:
    """Print the errors of predictions.

    Raises:
        SystemExit: fewer than half of the runs have a prediction.
    """
    if 2 * len(runs) < asked:
        raise SystemExit(f"only {len(runs)} of {asked} runs have a prediction")
    errors = sorted(abs(run["predicted_ms"] - run["latency_ms"]) / run["latency_ms"] for run in runs)
    tokens = statistics.mean(run["tokens_out"] for run in runs)
    print(
        f"{len(runs):4} of {asked} runs, {tokens:5.1f} tokens each: error median {statistics.median(errors):6.1%},"
        f" 95th {errors[len(errors) * 95 // 100]:6.1%}; {sum(run['swap_ms'] > 0 for run in runs)} with a swap"
    )


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = asyncio.run(play(ensure_small_model(), Path(folder), options.rounds))
    tell(runs, asked=options.rounds * len(LENGTHS) * len(WORDS) * len(AGENTS))


if __name__ == "__main__":
    main()

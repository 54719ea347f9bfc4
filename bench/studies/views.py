"""The cost of ``view: shared`` beside ``view: own``: prompt tokens that an engine reads, and the makespan.

Four agents speak one after the other over six rounds, on one embedded engine with the small model and a cache for all
of them; every answer has the same length.

    python -m bench.studies.views [--pairs N]
"""

import argparse
from datetime import datetime

from bench.parts.services import run_job
from tests.harness.ports import find_ports

PORT = find_ports(2)
NAMES = ("ana", "ben", "cid", "dee")
ROUNDS = 6
LENGTH = 40  # tokens of an answer
BOUNDS = (0.45, 0.85)  # most tokens read and longest makespan, as shares


def run(view: str) -> tuple[int, float]:
    """Return the uncached tokens that were read, and the makespan in seconds."""
    params = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.3, "seed": 5}
    model = {
        "engine": "embedded", "model": "roundhouse:small", "port": PORT, "slots": len(NAMES), "context": 8192,
        "args": {"threads": 2}, "params": params,
    }  # fmt: skip
    agents = [
        {"id": name, "model": "m", "system": "Argue in one short sentence.", "speak_after_within_round": NAMES[:place]}
        for place, name in enumerate(NAMES)
    ]
    prompt = "Should towns ban cars from their centres, and who pays for it?"
    job = {
        "name": view,
        "rounds": ROUNDS,
        "view": view,
        "agents": agents,
        "conversations": [{"id": "c", "prompt": prompt}],
    }
    (transcript,) = run_job({"m": model}, job)
    turns = transcript["turns"]
    read = sum(turn["usage"]["prompt_tokens"] - (turn["usage"]["cached_tokens"] or 0) for turn in turns)
    began = min(datetime.fromisoformat(turn["started_at"]) for turn in turns)
    return read, (max(datetime.fromisoformat(turn["finished_at"]) for turn in turns) - began).total_seconds()


def main() -> None:
    """Print a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    for _ in range(parser.parse_args().pairs):
        (own, own_s), (shared, shared_s) = run("own"), run("shared")
        print(
            f"tokens read: own {own}, shared {shared}, {shared / own:.2f} x (bound {BOUNDS[0]});"
            f" makespan: own {own_s:.1f} s, shared {shared_s:.1f} s, {shared_s / own_s:.2f} x (bound {BOUNDS[1]})",
            flush=True,
        )


if __name__ == "__main__":
    main()

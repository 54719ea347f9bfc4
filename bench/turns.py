"""The cost of a durable turn: the service's CPU for each of 8,000 turns of one token, from the queue to the disk.

One job of 2,000 conversations with 4 rounds of one agent, on 64 slots of an attached engine that answers at once. The
CPU is the service's own, user and system, from the first turn to the last. With ``--beside TREE``, a checkout of
another commit that uses this environment, both are measured in turn, and the ratio is taken per pair.

    python -m bench.turns [--rounds 3] [--conversations 2000] [--beside TREE]
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Final

from bench.parts.services import cpu_s, process_of, serving, wait_ended
from bench.parts.timed_engine import timed_engine
from tests.harness.ports import find_ports

PORT: Final = find_ports(2)
SLOTS: Final = 64
ROUNDS: Final = 4  # rounds of a conversation
PAUSE_S: Final = 0.1  # pause between two reads of the job's state
HERE: Final = Path(__file__).parents[1]
START: Final = (
    sys.executable,
    "-P",
    "-c",
    "from service.cli.main import main; main()",
)  # -P: modules of the tree alone


def measure(tree: Path, conversations: int) -> float:
    """Return the microseconds of CPU per turn with a tree's service."""
    job = {
        "name": "turns",
        "agents": [{"id": "a", "model": "m", "system": "You answer.", "params": {"max_tokens": 1}}],
        "conversations": [{"prompt": f"Say {number}.", "rounds": ROUNDS} for number in range(conversations)],
    }
    with timed_engine(1, "at-once") as engine:
        model = {"engine": "attached", "url": f"http://127.0.0.1:{engine}", "slots": SLOTS}
        paths = os.pathsep.join([str(tree), str(tree / "client")])
        with serving(PORT, {"m": model}, command=START, environment={"PYTHONPATH": paths}) as service:
            process = process_of(service)
            before = cpu_s(process)
            state = wait_ended(service, service.post_job(job), PAUSE_S)["state"]
            used_s = cpu_s(process) - before
    if state != "completed":
        sys.exit(f"the job is {state}")
    return used_s / (conversations * ROUNDS) * 1e6


def main() -> None:
    """Print a line for each tree, and the ratio of the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    options = parser.parse_args()
    trees = [HERE, *([options.beside.absolute()] if options.beside else [])]
    figures: dict[Path, list[float]] = {tree: [] for tree in trees}
    for _ in range(options.rounds):
        for tree in trees:
            figures[tree].append(measure(tree, options.conversations))
    print(f"{options.conversations * ROUNDS} durable turns of one token on {SLOTS} slots, {options.rounds} rounds")
    for tree, runs in figures.items():
        name = "this tree" if tree == HERE else "beside it"
        print(f"{name:<12}{statistics.median(runs):>8.0f} us of CPU a turn")
    if options.beside:
        pairs = [one / other for one, other in zip(*figures.values(), strict=True)]
        print(f"in pairs: {statistics.median(pairs):.2f} (from {min(pairs):.2f} to {max(pairs):.2f})")


if __name__ == "__main__":
    main()

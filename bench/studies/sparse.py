"""Makespan / longest chain of prompts' dependencies, where agents read few others, with a slot for every agent.

The chain has the run's own durations, from the engine's log. Beside it is the makespan of whole rounds: the sum of the
longest turn of each round.

python -m bench.studies.sparse [--rounds N] [--scale SECONDS] [--seeds N]
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench.makespan import drawn_service, run_all

Shape = Mapping[str, frozenset[str]]  # the agents that each agent reads


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--scale", type=float, default=0.3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--capacity", default="slots")
    options = parser.parse_args()
    for name, shape in {"ring of 12": ring(12), "10 groups of 4": groups(10, 4), "full, 12": full(12)}.items():
        for seed in range(options.seeds):
            options.seed = seed
            print(f"{name:16s} seed {seed}  {measure(shape, options)}", flush=True)


def ring(size: int) -> Shape:
    """Return agents that each read their two neighbours."""
    return {f"r{n}": frozenset({f"r{n}", f"r{(n - 1) % size}", f"r{(n + 1) % size}"}) for n in range(size)}


def groups(count: int, size: int) -> Shape:
    """Return groups that meet through one member of each."""
    heads = frozenset(f"g{group}m0" for group in range(count))
    shape: dict[str, frozenset[str]] = {}
    for group in range(count):
        members = frozenset(f"g{group}m{member}" for member in range(size))
        shape |= {name: members | (heads if name in heads else frozenset()) for name in sorted(members)}
    return shape


def full(size: int) -> Shape:
    """Return agents that read each other."""
    names = frozenset(f"f{n}" for n in range(size))
    return dict.fromkeys(sorted(names), names)


def measure(shape: Shape, options: argparse.Namespace) -> str:
    """Run one conversation; return both ratios in words."""
    agents = [
        {"id": speaker, "model": "m", "visible_to": [who for who in shape if speaker in shape[who] and who != speaker]}
        for speaker in shape
    ]
    job = {
        "name": "j",
        "rounds": options.rounds,
        "agents": agents,
        "conversations": [{"id": "c", "prompt": "TOPIC-j-c"}],
        "prompts": {"cue": "(Round $round of $rounds)", "context": "You are $agent."},
    }
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with drawn_service(log, len(shape), "fifo", options) as service:
            run_all(service, [job])
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(entries) == len(shape) * options.rounds
    took = {(entry["turn"][2], entry["turn"][3]): entry["end"] - entry["came"] for entry in entries}
    makespan = max(entry["end"] for entry in entries) - min(entry["came"] for entry in entries)
    chain = dict.fromkeys(shape, 0.0)
    for number in range(options.rounds):
        chain = {who: took[who, number] + max(chain[other] for other in shape[who]) for who in shape}
    rounds = sum(max(took[who, number] for who in shape) for number in range(options.rounds))
    ratios = f"/ longest chain {makespan / max(chain.values()):.3f}, / whole rounds {makespan / rounds:.3f}"
    return f"makespan {makespan:6.2f} s, {ratios}"


if __name__ == "__main__":
    main()

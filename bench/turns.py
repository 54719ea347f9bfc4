"""What a durable turn costs: CPU of the service for each of 8,000 turns of one token, from a job's queue to its disk.

One job of 2,000 conversations with 4 rounds of one agent, on the 64 slots of an attached engine that answers at once.
The CPU is the service's own, user and system, from the first turn to the last. With ``--beside TREE``, a checkout of
another commit whose environment is this one's, both are measured in turn, and the ratio is that of each pair.

    python -m bench.turns [--rounds 3] [--conversations 2000] [--beside TREE]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import psutil

from bench.relay import engine_of
from tests.harness.ports import find_ports

PORT: Final = find_ports(2)
SLOTS: Final = 64
ROUNDS: Final = 4  # of a conversation
LIMIT_S: Final = 300.0
HERE: Final = Path(__file__).parents[1]
START: Final = "from service.cli.main import main; main()"


def ask(path: str, body: object = None) -> Any:  # noqa: ANN401
    """Return the JSON of an answer of the service."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as answer:  # noqa: S310
        return json.load(answer)


def wait_for(path: str, state: str | None) -> Any:  # noqa: ANN401
    """Return what is at a path, once it is there, or in a state."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        try:
            told = ask(path)
            if state is None or told["state"] == state:
                return told
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"{path} is not {state or 'there'}")


def measure(tree: Path, conversations: int) -> float:
    """Return the microseconds of CPU of a turn, with the service of a tree."""
    job = {
        "name": "turns",
        "agents": [{"id": "a", "model": "m", "system": "You answer.", "params": {"max_tokens": 1}}],
        "conversations": [{"prompt": f"Say {number}.", "rounds": ROUNDS} for number in range(conversations)],
    }
    with tempfile.TemporaryDirectory() as folder, engine_of(1, "at-once") as engine:
        config = Path(folder) / "config.yaml"
        model = {"engine": "attached", "url": f"http://127.0.0.1:{engine}", "slots": SLOTS}
        config.write_text(json.dumps({"server": {"port": PORT, "state_dir": folder}, "models": {"m": model}}))
        paths = os.pathsep.join([str(tree), str(tree / "client")])
        command = [sys.executable, "-c", START, "serve", "--config", str(config)]
        with subprocess.Popen(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL
        ) as service:
            try:
                wait_for("/readyz", None)
                process = psutil.Process(service.pid)
                before = process.cpu_times()
                posted = ask("/v1/jobs", job)
                wait_for(f"/v1/jobs/{posted['id']}", "completed")
                after = process.cpu_times()
            finally:
                service.send_signal(signal.SIGTERM)
                service.wait(30)
    used_s = after.user + after.system - before.user - before.system
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

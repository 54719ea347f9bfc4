"""A debate of the small model on this machine's cores, idle and beside busy processes, by engines' way of waiting.

Threads of an engine on the CPU wait for each other many times per token. While they spin, a process that shares a core
with one of them stops all. The bound is the kernel's fair share: beside as many busy processes as cores, an engine with
a thread per core has half of each, and takes twice as long. The rival is libgomp's own way of waiting.

python -m bench.studies.beside [--rounds 3] [--pairs 2]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import yaml

from workers.devices.discovery import usable_cores

BUSY = (sys.executable, "-I", "-S", "-c", "while True: pass")
LIMIT_S = 300.0
WAYS = {"roundhouse": {}, "libgomp's own": {"GOMP_SPINCOUNT": "300000"}}  # its default on free cores, in iterations


def job(rounds: int) -> dict[str, object]:
    """Return the README's debate."""
    sides = [{"id": side, "model": "small", "system": f"You argue {side} the motion."} for side in ("for", "against")]
    chair = {
        "id": "chair",
        "model": "small",
        "system": "Say who leads.",
        "speak_after_within_round": ["for", "against"],
        "visible_to": [],
        "validation": {"choices": ["for", "against"]},
    }
    prompts = ("Should towns ban cars?", "Should homework be abolished?")
    talks = [{"prompt": prompt} for prompt in prompts]
    return {"name": "debate", "rounds": rounds, "agents": [*sides, chair], "conversations": talks}


def run(folder: Path, more: dict[str, str]) -> float:
    """Run the job to its end; return the seconds of the whole command, at most ``LIMIT_S``."""
    began = time.monotonic()
    command = ["-m", "service.cli.main", "run", "job.yaml", "--model", "roundhouse:small"]
    output = tempfile.mkdtemp(dir=folder)
    with subprocess.Popen(
        [sys.executable, *command, "--output", output],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            process.terminate()
            return LIMIT_S
    return time.monotonic() - began


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy for a block."""
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Print a line for each way of waiting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(yaml.safe_dump(job(options.rounds)))
        run(folder, {})  # fetches the model
        for way, more in WAYS.items():
            idle, shared = [], []
            for _ in range(options.pairs if way == "roundhouse" else 1):
                idle.append(run(folder, more))
                with busy(usable_cores()):
                    shared.append(run(folder, more))
            ratio, ended = median(shared) / median(idle), "" if max(shared) < LIMIT_S else "; it had not ended"
            took = f"idle {median(idle):6.1f} s  busy {median(shared):6.1f} s{ended}"
            print(f"{way:14s} {took}  {ratio:5.2f} x (fair share 2.0)", flush=True)


if __name__ == "__main__":
    main()

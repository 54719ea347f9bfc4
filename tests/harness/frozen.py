"""Frozen files in ``tests/data/net``: the surface, and digests of seeds. ``RENEW_FROZEN=1`` renews a test's own."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "net"
LIMIT_OF_A_SEED_S = 20.0


def run_seeds(module: str, seeds: range) -> subprocess.CompletedProcess[str]:
    """Run a module of the harness with seeds, in a process in which sets of names have one order."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.harness.{module}", *map(str, seeds)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_OF_A_SEED_S * len(seeds),
        check=False,
    )


def digests_of(ran: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the digest of each seed that was run."""
    lines = (line.split() for line in ran.stdout.splitlines() if line[0].isdigit())
    return {line[0]: line[1] for line in lines}


def frozen(name: str, now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the frozen digests of these seeds."""
    file = FOLDER / f"{name}.txt"
    known = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {}
    if os.environ.get("RENEW_FROZEN"):
        known |= now
        file.write_text("".join(f"{seed} {known[seed]}\n" for seed in sorted(known, key=int)))
    return {seed: known.get(seed) for seed in now}


def frozen_text(name: str, now: str) -> str:
    """Return the frozen text."""
    file = FOLDER / name
    if os.environ.get("RENEW_FROZEN"):
        file.write_text(now, encoding="utf-8")
    return file.read_text(encoding="utf-8")


def shrinking_list(name: str, now: Sequence[str]) -> list[str]:
    """Return the frozen list, a line each; it is renewed only if it is not longer than before."""
    file = FOLDER / name
    if os.environ.get("RENEW_FROZEN") and (not file.exists() or len(now) <= len(file.read_text().splitlines())):
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in now))
    return file.read_text().splitlines()

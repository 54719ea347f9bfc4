"""Every benchmark in turn, with what each prints kept in one file beside the commit that it was taken on.

    python -m bench.all [--only NAME ...] [--least] [--output bench/results.json]

The file keeps what it has of those that did not run; ``python -m bench.pages`` makes the figures of pages of it. With
``--least`` each runs with the least parameters that it has: whether it still runs, and not what it measures; nothing is
kept of that.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One program with its arguments; ``least`` are those that only show that it runs."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    least: tuple[str, ...] = ()


BENCHMARKS: tuple[Benchmark, ...] = (
    Benchmark(name="token_path", module="token_path", least=("--streams", "4", "--tokens", "20", "--rounds", "1")),
    Benchmark(name="worker", module="worker"),
    Benchmark(name="decisions", module="decisions"),
    Benchmark(name="sparse", module="sparse", least=("--rounds", "2", "--scale", "0.02", "--seeds", "1")),
    Benchmark(name="forks", module="forks", least=("--ways", "tokens", "--forks", "3", "--tokens", "200")),
    Benchmark(name="memory", module="memory", least=("--rounds", "3")),
    Benchmark(name="summaries", module="summaries", least=("--seeds", "1", "--wordings", "1")),
    Benchmark(name="orders", module="orders", least=("--seeds", "1", "--rounds", "1")),
    Benchmark(name="prefix", module="prefix"),
    Benchmark(name="beside", module="beside", least=("--rounds", "1", "--pairs", "1")),
    Benchmark(
        name="bodies",
        module="bodies",
        least=("--part", "forks", "awaited", "--forks", "50", "--rounds", "5", "--awaited", "200"),
    ),
    Benchmark(name="batches", module="batches", least=("--pairs", "1")),
    Benchmark(name="capacity", module="capacity", least=("--conversations", "2", "--rounds", "1")),
    Benchmark(name="capacity_gpu", module="capacity_gpu", least=("--conversations", "8", "--rounds", "1")),
    Benchmark(name="replicas", module="replicas", least=("--seeds", "1")),
    Benchmark(name="swaps", module="swaps", least=("--requests", "200")),
    Benchmark(name="latency", module="latency", least=("--rounds", "1")),
    Benchmark(name="agents_servers", module="agents", arguments=("servers",), least=("--seconds", "3")),
    Benchmark(name="agents_load", module="agents", arguments=("load",), least=("--seconds", "3")),
    Benchmark(name="agents_kills", module="agents", arguments=("kills",), least=("--seconds", "12")),
    Benchmark(name="posting", module="posting", least=("--seconds", "1")),
    Benchmark(name="loop", module="loop"),
    Benchmark(name="queued", module="queued"),
    Benchmark(name="callers", module="callers", least=("--conversations", "100", "--words", "10")),
    Benchmark(
        name="relay",
        module="relay",
        least=("--rivals", "", "--streams", "4", "--tokens", "10", "--requests", "5", "--rounds", "1"),
    ),
    Benchmark(name="turns", module="turns", least=("--rounds", "1", "--conversations", "5")),
    Benchmark(name="programs", module="programs", least=("--made", "2", "--requests", "2", "--rounds", "1")),
    Benchmark(name="door", module="door", least=("--part", "usage", "--requests", "100", "--seconds", "2")),
    Benchmark(name="upgrade", module="upgrade", least=("--times", "1")),
    Benchmark(name="telemetry", module="telemetry", least=("--rounds", "1", "--seconds", "1")),
    Benchmark(name="dashboard", module="dashboard", least=("--seconds", "1", "--rounds", "1")),
    Benchmark(name="dashboard_page", module="dashboard_page", least=("--seconds", "1")),
    Benchmark(
        name="makespan_mixed",
        module="makespan",
        arguments=("--mixed", "--slots", "8"),
        least=("--rounds", "1", "--scale", "0.02"),
    ),
    Benchmark(
        name="makespan_skewed",
        module="makespan",
        arguments=("--skewed", "--policies", "critical_path", "--slots", "4,8,16"),
        least=("--rounds", "1", "--scale", "0.02", "--slots", "4"),
    ),
    Benchmark(
        name="makespan_policies",
        module="makespan",
        arguments=("--policies", "critical_path"),
        least=("--rounds", "1", "--scale", "0.02", "--jobs", "1", "--slots", "4", "--kinds", "chain"),
    ),
)


def main() -> None:
    """Run them, print as they print, and write the file."""
    names = [each.name for each in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--least", action="store_true", help="only whether each runs")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    failed = []
    for each in BENCHMARKS:
        if each.name not in options.only:
            continue
        taken = {
            "commit": _git("rev-parse", "--short=10", "HEAD"),
            "is_clean": not _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results.json"),
            "day": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, CPython {platform.python_version()}",
        }
        told = run(each, is_least=options.least)
        if told["status"]:
            failed.append(each.name)
        elif not options.least:  # such figures mean nothing, and pages are made of the file
            results[each.name] = {**taken, **told}
            options.output.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(benchmark: Benchmark, *, is_least: bool) -> dict[str, object]:
    """Return what one has printed, how it ended, and how long it took."""
    arguments = (*benchmark.arguments, *(benchmark.least if is_least else ()))
    command = [sys.executable, "-m", f"bench.{benchmark.module}", *arguments]
    print(f"== {' '.join(command[1:])}", flush=True)
    began_at = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        lines = _shown(process)
    seconds = round(time.monotonic() - began_at, 1)
    return {"arguments": list(arguments), "seconds": seconds, "status": process.returncode, "lines": lines}


def _shown(process: "subprocess.Popen[str]") -> Sequence[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip("\n"))
    process.wait(LIMIT_S)
    return lines


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    return told.stdout.strip()


if __name__ == "__main__":
    main()

"""Runs every benchmark in turn, and keeps their output in one file with the commit.

    python -m bench.all [--only NAME ...] [--studies] [--least] [--output bench/results.json]

The gates run without arguments, the studies when they are named or with ``--studies``. The file keeps the output of
those that did not run; ``python -m bench.pages`` writes it into the pages. With ``--least`` each runs with its smallest
parameters: that shows whether it still runs, and no output is kept.
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
LIMIT_S = 3600.0  # time that a benchmark may take to end once its output has


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One program with its arguments; ``least`` are its smallest ones, which only show that it runs."""

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    least: tuple[str, ...] | None = None


# Each holds a bar that users or the specification rely on.
GATES: tuple[Benchmark, ...] = (
    Benchmark(
        name="token_path",
        module="token_path",
        least=("--streams", "4", "--tokens", "10", "--rounds", "1", "--only", "roundhouse followed", "aiohttp+msgspec"),
    ),
    Benchmark(
        name="relay",
        module="relay",
        least=("--rivals", "", "--streams", "4", "--tokens", "10", "--requests", "5", "--rounds", "1"),
    ),
    Benchmark(name="decisions", module="decisions", least=("--decisions", "100", "--queued", "1000")),
    Benchmark(
        name="makespan_skewed",
        module="makespan",
        arguments=("--skewed", "--policies", "critical_path", "--slots", "4,8,16"),
        least=("--rounds", "1", "--scale", "0.02", "--slots", "4"),
    ),
    Benchmark(name="makespan_mixed", module="makespan", arguments=("--mixed", "--slots", "8")),
    Benchmark(name="turns", module="turns", least=("--rounds", "1", "--conversations", "5")),
    Benchmark(name="posting", module="posting", arguments=("--part", "jobs"), least=("--seconds", "1")),
    Benchmark(
        name="queued",
        module="posting",
        arguments=("--part", "queued"),
        least=("--seconds", "1", "--queued", "1000"),
    ),
    Benchmark(name="worker", module="worker", least=("--idle-s", "1", "--restarts", "1")),
    Benchmark(
        name="prefix",
        module="prompts",
        arguments=("--part", "reuse"),
        least=("--policies", "critical_path", "--rounds", "2"),
    ),
    Benchmark(name="batches", module="prompts", arguments=("--part", "batches"), least=("--pairs", "1")),
    Benchmark(name="loop", module="loop", least=("--only", "nothing")),
    Benchmark(name="upgrade", module="upgrade", least=("--times", "1")),
    Benchmark(name="telemetry", module="telemetry", least=("--rounds", "1", "--seconds", "1", "--load", "flat-out")),
    Benchmark(name="dashboard", module="dashboard", least=("--seconds", "1", "--rounds", "1", "--settle-s", "1")),
)
# These explain a design, or take long, or a test holds their bar.
STUDIES: tuple[Benchmark, ...] = (
    Benchmark(name="agents_servers", module="studies.agents", arguments=("servers",)),
    Benchmark(name="agents_load", module="studies.agents", arguments=("load",)),
    Benchmark(name="agents_kills", module="studies.agents", arguments=("kills",)),
    Benchmark(name="beside", module="studies.beside"),
    Benchmark(name="bodies", module="studies.bodies"),
    Benchmark(name="breaks", module="studies.breaks"),
    Benchmark(name="callers", module="studies.callers"),
    Benchmark(name="capacity", module="studies.capacity"),
    Benchmark(name="capacity_gpu", module="studies.capacity_gpu", least=("--conversations", "8", "--rounds", "1")),
    Benchmark(name="dashboard_page", module="studies.dashboard_page"),
    Benchmark(name="door", module="studies.door"),
    Benchmark(name="forks", module="studies.forks"),
    Benchmark(name="latency", module="studies.latency"),
    Benchmark(name="makespan_policies", module="makespan", arguments=("--policies", "critical_path")),
    Benchmark(name="memory", module="studies.memory"),
    Benchmark(name="nodes", module="studies.nodes", least=("--nodes", "2", "--processes", "1", "--seconds", "2")),
    Benchmark(name="orders", module="studies.orders", least=("--seeds", "1", "--rounds", "1")),
    Benchmark(name="programs", module="studies.programs"),
    Benchmark(name="replicas", module="studies.replicas", least=("--seeds", "1")),
    Benchmark(name="rollouts", module="studies.rollouts", least=("--chains", "5")),
    Benchmark(name="spares", module="studies.spares"),
    Benchmark(name="spans", module="studies.spans", least=("--cuts", "1", "--nodes", "2")),
    Benchmark(name="sparse", module="studies.sparse"),
    Benchmark(name="summaries", module="studies.summaries"),
    Benchmark(name="swaps", module="studies.swaps", least=("--requests", "200")),
    Benchmark(name="views", module="studies.views"),
    Benchmark(name="words", module="studies.words"),
)
BENCHMARKS = (*GATES, *STUDIES)


def main() -> None:
    """Run the benchmarks, print their output as it comes, and write the file."""
    names = [each.name for each in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--studies", action="store_true", help="run the studies in place of the gates")
    parser.add_argument("--least", action="store_true", help="only check that each runs")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results.json")
    options = parser.parse_args()
    asked = options.only or [each.name for each in (STUDIES if options.studies else GATES)]
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    failed = []
    for each in BENCHMARKS:
        if each.name not in asked or (options.least and each.least is None):
            continue
        taken = {
            "commit": _git("rev-parse", "--short=10", "HEAD"),
            "is_clean": not _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results.json"),
            "day": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, CPython {platform.python_version()}",
        }
        run_of = run(each, is_least=options.least)
        if run_of["status"]:
            failed.append(each.name)
        elif not options.least:  # those figures mean nothing, and must not reach pages
            results[each.name] = {**taken, **run_of}
            options.output.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(benchmark: Benchmark, *, is_least: bool) -> dict[str, object]:
    """Return a benchmark's output, exit status and duration."""
    arguments = (*benchmark.arguments, *((benchmark.least or ()) if is_least else ()))
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
    shown = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    return shown.stdout.strip()


if __name__ == "__main__":
    main()

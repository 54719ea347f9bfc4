"""The figures of README and of docs/benchmarks.md, taken from the output of the benchmarks.

    python -m bench.pages

They stand between ``<!-- results: NAME -->`` and ``<!-- end -->``, where NAME is a benchmark or ``readme``.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "bench" / "results.json"
PAGES: Final = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
_PLACE: Final = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that a benchmark prints: the first match of ``pattern`` in its lines, after one that has ``under``."""

    benchmark: str
    pattern: str
    under: str = ""

    def read(self, results: Results) -> str:
        """Return the number as it was printed.

        Raises:
            LookupError: the benchmark did not print it.
        """
        lines = results[self.benchmark]["lines"]
        first = next(number for number, line in enumerate(lines) if self.under in line)
        for line in lines[first:]:
            found = re.search(self.pattern, line)
            if found is not None:
                return found.group(1)
        raise LookupError(f"{self.benchmark} prints no {self.pattern!r}")


TOKEN: Final = Figure(benchmark="token_path", under="256 streams", pattern=r"^roundhouse followed +([\d.]+)")
DECISION: Final = Figure(benchmark="decisions", under="critical_path", pattern=r"p99 ([\d.]+) ms")
AIOHTTP: Final = Figure(benchmark="token_path", under="256 streams", pattern=r"^aiohttp\+msgspec +([\d.]+)")
HTTPX: Final = Figure(benchmark="token_path", under="256 streams", pattern=r"^httpx\+httpx-sse +([\d.]+)")
MAKESPAN: Final = Figure(benchmark="makespan_skewed", pattern=r"^skewed +8 +([\d.]+)")
GATHERED: Final = Figure(benchmark="makespan_skewed", pattern=r"^skewed +8 +[\d.]+ +([\d.]+)")
RESTART: Final = Figure(benchmark="worker", pattern=r"SIGKILL to READY [\d.]+ s, ([+-][\d.]+) s")
# Columns: the measurement, Roundhouse's figure, and the rival's or the bound.
README_ROWS: Final = (
    (
        "CPU per streamed token, 256 streams, every request watched and followed",
        "{} µs",
        (TOKEN,),
        "aiohttp, without any watching: {} µs; httpx: {} µs",
        (AIOHTTP, HTTPX),
    ),
    (
        "makespan, 42 conversations of unequal length on 8 slots",
        "{} times the lower bound",
        (MAKESPAN,),
        "a gather with a semaphore: {} times",
        (GATHERED,),
    ),
    ("a restart after SIGKILL, compared with a first start", "{} s", (RESTART,), "bound: + 0.5 s", ()),
    ("one scheduling decision with 10,000 ready turns, p99", "{} ms", (DECISION,), "bound: 1 ms", ()),
)


def main() -> None:
    """Write the pages."""
    results = json.loads(RESULTS.read_text())
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), results), encoding="utf-8")


def filled(page: str, results: Results) -> str:
    """Return a page with the recorded figures filled in."""
    return _PLACE.sub(lambda place: f"{place[1]}{_shown(place[2], results)}{place[3]}", page)


def _shown(name: str, results: Results) -> str:
    return _readme_table(results) if name == "readme" else _printed(results[name])


def _readme_table(results: Results) -> str:
    lines = ["| measured | Roundhouse | compared with |", "| --- | --- | --- |"]
    for what, ours, own, beside, others in README_ROWS:
        told, compared = (
            text.format(*(figure.read(results) for figure in figures))
            for text, figures in ((ours, own), (beside, others))
        )
        lines.append(f"| {what} | {told} | {compared} |")
    return "\n".join(lines) + "\n"


def _printed(taken: Mapping[str, Any]) -> str:
    printed = "\n".join(line.rstrip() for line in taken["lines"]).strip("\n")
    commit = taken["commit"] if taken["is_clean"] else f"{taken['commit']}, with uncommitted changes"
    return f"```text\n{printed}\n```\n\nMeasured on {taken['day']} at commit {commit}: {taken['machine']}.\n"


if __name__ == "__main__":
    main()

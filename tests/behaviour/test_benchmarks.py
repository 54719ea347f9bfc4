"""Each gate runs, and so do the quick studies; the pages show the recorded output."""

import json
import re

import pytest

from bench.all import BENCHMARKS, GATES, STUDIES, Benchmark, run
from bench.pages import PAGES, README_ROWS, RESULTS, filled
from tests.documents.pages import ROOT, rows, section

BENCH = ROOT / "bench"
BY_HAND = {"studies.router"}  # it needs the path of llama-server


@pytest.mark.system
@pytest.mark.parametrize(
    "benchmark", [each for each in BENCHMARKS if each.least is not None], ids=lambda each: each.name
)
def test_a_benchmark_runs_with_its_smallest_parameters(benchmark: Benchmark) -> None:
    """The figures mean nothing then, but the benchmark ends well and prints some."""
    told = run(benchmark, is_least=True)
    assert told["status"] == 0, told["lines"]
    assert told["lines"]


def test_every_program_is_a_gate_or_a_study_and_is_on_the_page() -> None:
    """A gate is a file of ``bench``, with a run of smallest parameters; a study is a file of ``bench/studies``."""
    gates = {file.stem for file in BENCH.glob("*.py")} - {"all", "pages"}
    studies = {f"studies.{file.stem}" for file in (BENCH / "studies").glob("*.py")}
    assert gates == {each.module for each in GATES}
    assert gates == {each.module for each in GATES if each.least is not None}
    assert studies - BY_HAND == {each.module for each in STUDIES} - gates
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| \[`bench\.([\w.]+)`\]", page, re.MULTILINE)) == gates | studies


def test_the_pages_show_the_recorded_output() -> None:
    """The file of results and the pages have the same figures; ``python -m bench.pages`` makes them so."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == filled(text, results), page.name
    assert set(results) <= {each.name for each in BENCHMARKS}


def test_the_figures_of_the_readme_are_the_benchmarks() -> None:
    """Each number of its table was printed by the benchmark that it names."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    table = rows(section(ROOT / "README.md", "Measured"))
    assert len(table) == len(README_ROWS)
    for (_, ours, beside), (_, _, own, _, others) in zip(table, README_ROWS, strict=True):
        for figure in (*own, *others):
            assert figure.read(results) in f"{ours} {beside}"

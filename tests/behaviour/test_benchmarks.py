"""Each benchmark runs: what nobody runs is broken when its figure is wanted. The pages have what was printed."""

import json
import re
import shutil

import pytest

from bench.all import BENCHMARKS, run
from bench.pages import PAGES, README_ROWS, RESULTS, filled
from tests.documents.pages import ROOT, rows, section

NEEDS_A_BROWSER = {"dashboard_page"}


@pytest.mark.system
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_a_benchmark_runs_with_its_least_parameters(benchmark: object) -> None:
    """What it measures then means nothing; that it prints something does."""
    found = next(each for each in BENCHMARKS if each is benchmark)
    if found.name in NEEDS_A_BROWSER and shutil.which("chromium") is None:
        pytest.skip("there is no browser")
    told = run(found, is_least=True)
    assert told["status"] == 0, told["lines"]
    assert told["lines"]


def test_every_benchmark_of_the_page_is_in_the_target() -> None:
    """One that is in no target is measured by nobody."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"bench[./](\w+)", page)) - {"all", "pages", "results"}
    programs = {"as_a_user_would", "drawn_engine", "timed_engine"}  # of which benchmarks are made
    asked = {"router", "words"}  # these need a program, or a reader of words
    assert named - {each.module for each in BENCHMARKS} <= programs | asked


def test_the_pages_have_what_was_printed() -> None:
    """The file of results and the pages are the same figures; ``python -m bench.pages`` makes them so."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text == filled(text, results), page.name
    assert set(results) <= {each.name for each in BENCHMARKS}


def test_the_figures_of_the_readme_are_the_benchmarks() -> None:
    """Each number of its table was printed, and is of the benchmark that it names."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    table = rows(section(ROOT / "README.md", "Measured"))
    assert len(table) == len(README_ROWS)
    for (_, ours, beside), (_, _, own, _, others) in zip(table, README_ROWS, strict=True):
        for figure in (*own, *others):
            assert figure.read(results) in f"{ours} {beside}"

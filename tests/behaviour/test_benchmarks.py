"""Each benchmark runs: what nobody runs is broken when its figure is wanted. README has the figures of the page."""

import re
import shutil

import pytest

from bench.all import BENCHMARKS, run
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
    named = set(re.findall(r"bench[./](\w+)", page)) - {"all", "results"}
    programs = {"as_a_user_would", "drawn_engine", "timed_engine"}  # of which benchmarks are made
    asked = {"router", "words"}  # these need a program, or a reader of words
    assert named - {each.module for each in BENCHMARKS} <= programs | asked


def test_the_figures_of_the_readme_are_those_of_the_page() -> None:
    """Each number of the table stands on the page that it leads to."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for what, ours, beside in rows(section(ROOT / "README.md", "Measured")):
        for figure in re.findall(r"\d+\.\d+", f"{ours} {beside}"):
            assert figure in page, f"{what}: {figure}"

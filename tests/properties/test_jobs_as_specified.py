"""Jobs on a whole simulated node go as a plain implementation of the specification requires (tests/reference)."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.job.job import JobId
from service.errors import InvalidJob
from tests.harness.drawn_jobs import FACTORS, REFUSALS, JobDrawer, draw_row, refusal_of
from tests.harness.job_world import calm_plan, run_rows
from tests.harness.pairs import every_pair, make_rows, pairs_of
from tests.harness.planted import PLANTED, Planted

ROWS = make_rows()
AT_ONCE = 4  # rows of one node
QUICK = 3  # nodes; the others take too long for every run of the tests
NODES = range(-(-len(ROWS) // AT_ONCE))
SEEDS, SOAK_SEEDS = 12, 600  # some 18 jobs each
LIMIT_OF_A_SEED_S = 60.0
ROWS_OF_A_FAULT = 72  # in which it has to be found
RULES = JobRules(models=("m0", "m1"), limits=Limits())
RULES_OF_READING = ("service", "workers", "transport", "roundhouse")


@pytest.mark.parametrize(
    "node", [*NODES[:QUICK], *(pytest.param(node, marks=pytest.mark.system) for node in NODES[QUICK:])]
)
def test_each_row_of_the_array_goes_as_specified(node: int) -> None:
    """Each pair of a job's options, under kills of engines and of the node, bad disks and refusals."""
    world = run_rows(node, ROWS[node * AT_ONCE : (node + 1) * AT_ONCE])
    assert (world.faults, world.differences) == ([], [])
    assert world.counts["jobs"] >= AT_ONCE or node == NODES[-1]
    assert world.counts["requests"] > 0


def test_the_array_has_every_pair_that_a_job_may_have() -> None:
    """Only pairs that a job's parser refuses are left out."""
    refused = {pair for pair in every_pair() if refusal_of(dict(pair)) is not None}
    assert every_pair() - set().union(*map(pairs_of, ROWS)) == refused
    assert len(refused) == len(REFUSALS)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_pair_that_is_left_out_is_refused(refusal: str) -> None:
    """A pair that cannot be posted needs no row."""
    pair = next(dict(each) for each in every_pair() if refusal_of(dict(each)) == refusal)
    row = {name: levels[0] for name, levels in FACTORS.items()} | pair
    refusals = 0
    for number in range(20):
        document = JobDrawer("j0", row, Random(number)).draw().document  # noqa: S311
        try:
            parse_job(document, JobId("job-1"), RULES)
        except InvalidJob as error:
            refusals += any(fault.path.startswith("memory.summary") for fault in error.faults)
    # A cast is drawn for some conversations, and one agent may sum up for none but itself.
    assert refusals >= (20 if refusal.startswith("in a shared view") else 5)


def test_rows_without_such_a_pair_are_accepted() -> None:
    """Otherwise a refusal that is too wide would empty the array unnoticed."""
    chance = Random(1)  # noqa: S311
    for _ in range(200):
        parse_job(JobDrawer("j0", draw_row(chance), chance).draw().document, JobId("job-1"), RULES)


def test_a_disk_that_fails_as_waits_for_callers_end_ends_no_service() -> None:
    """The error arrived in an exception group, which handlers of store errors missed."""
    row = {name: levels[0] for name, levels in FACTORS.items()} | {"callers": "otherwise"}
    plan = replace(calm_plan(Random(1), is_calm=True), bad_commits=0.9)  # noqa: S311
    for seed in range(3):
        world = run_rows(seed, [row] * 3, plan=plan)
        assert (world.faults, world.differences) == ([], [])


@pytest.mark.system
def test_random_jobs_go_as_specified(request: pytest.FixtureRequest) -> None:
    """Two hundred random jobs, ten thousand in a soak.

    The specification's implementation and the service agree on all.
    """
    count = SOAK_SEEDS if request.config.getoption("--soak") else SEEDS
    seeds = [str(1000 + seed) for seed in range(count)]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.harness.job_world", *seeds],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT_OF_A_SEED_S * count,
        check=False,
    )
    faults = [line for line in ran.stdout.splitlines() if line.startswith("  seed ")]
    replay = "PYTHONHASHSEED=0 python -m tests.harness.job_world --show SEED"
    assert (faults, ran.returncode) == ([], 0), f"{ran.stderr[-2000:]}\nagain: {replay}"
    assert "conversations completed" in ran.stdout


@pytest.mark.system
@pytest.mark.parametrize("planted", PLANTED, ids=[each.name for each in PLANTED])
def test_a_fault_of_the_service_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that finds nothing proves nothing: one behaviour is broken at a time."""
    chance = Random(planted.name)  # noqa: S311
    rows = [draw_row(chance, planted.factors) for _ in range(ROWS_OF_A_FAULT)]
    rows = [{**row, **planted.fixed} for row in rows]
    planted.plant(monkeypatch)
    plan = replace(calm_plan(chance, is_calm=True), interval_s=1.0, deaths_a_minute=12.0 if planted.kills else 0.0)
    for seed in range(0, ROWS_OF_A_FAULT, AT_ONCE):
        world = run_rows(seed, rows[seed : seed + AT_ONCE], plan=plan)
        if world.differences:
            return
        assert world.faults == []
    pytest.fail("it was not found")


def test_the_implementation_of_the_specification_imports_nothing_of_the_program() -> None:
    """If it used the program's code it would agree with all its faults."""
    folder = Path(__file__).parents[1] / "reference"
    for path in folder.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        names = {line.split()[1].split(".")[0] for line in lines}
        assert not names & set(RULES_OF_READING), path
        assert all("tests.reference" in line for line in lines if "tests" in line), path

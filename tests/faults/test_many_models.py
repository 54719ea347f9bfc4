"""Two to eight models of every kind of engine, started, reloaded and stopped again and again on the same state.

Each engine records its own starts and every SIGTERM it gets.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.behaviour.test_configurations import (
    check_lives,
    check_reload,
    check_stopped,
    check_work,
    check_workers,
    running,
)
from tests.harness.configurations import FACTORS, KINDS, REFUSED, Row
from tests.harness.laid_out import LaidOut, ports_of

LIVES, SOAK_LIVES = (5, 6), range(100)
FEWEST, MOST = 2, 8  # models
START_S = 60.0  # each vLLM engine waits for the one before


def row_of(kind: str, life: int) -> Row:
    """Return the configuration of one run: each number of models comes with each change in turn."""
    changes = [each for each in FACTORS["change"] if (("beside", kind), ("change", each)) not in REFUSED]
    numbers = range(FEWEST, MOST + 1)
    number, lap = numbers[life % len(numbers)], life // len(numbers)
    return Row(kind=kind, beside=kind, models=number, change=changes[(life + lap) % len(changes)])


def test_every_number_of_models_comes_with_every_change() -> None:
    """In a soak, with each kind."""
    for kind in KINDS:
        rows = {row_of(kind, life) for life in SOAK_LIVES}
        assert len(rows) == (MOST - FEWEST + 1) * len({row.change for row in rows})


@pytest.mark.system
@pytest.mark.parametrize("kind", KINDS)
def test_no_engine_starts_unasked_and_no_healthy_one_ends(
    kind: str, tmp_path: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest
) -> None:
    """A soak makes a hundred runs; each serves a job of all its models after the reload."""
    lives = SOAK_LIVES if request.config.getoption("--soak") else LIVES
    began_at, begun = time.monotonic(), 0
    for life in lives:
        row = row_of(kind, life)
        with ExitStack() as stack:
            laid = LaidOut(row, tmp_path / str(life), free_ports(ports_of(row)), "", stack)
            with running(laid, START_S, state_dir=str(tmp_path / "state")) as service:
                check_workers(laid, service)
                reloaded = check_reload(laid, service)
                check_work(laid, service, reloaded.names, topic=life, is_changed=reloaded.is_changed)
                check_lives(laid, service, reloaded)
                pids = {name: laid.lives(name, "begin") for name in laid.models}
            check_stopped(laid, pids)
            begun += sum(map(len, pids.values()))
    print(f"\n{len(lives)} lives of {kind}: {begun} starts, each asked for, in {time.monotonic() - began_at:.0f} s")

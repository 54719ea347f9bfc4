"""Everything at once: kills, reloads, upgrades, forks, callers and cancels; half a minute, or hours in a soak."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.harness.long_run import long_run

SHORT_S: Final = 30.0
SETTLED_S: Final = 360.0  # caches are full by then
_never = threading.Event()


@pytest.mark.system
@pytest.mark.parametrize("upgrades", [True, False], ids=["with upgrades", "without"])
def test_everything_at_once_loses_and_doubles_nothing(
    tmp_path: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest, *, upgrades: bool
) -> None:
    """Each turn is there once, as its engine or its caller said it; no process is left.

    A soak of ``--soak-minutes`` shows how quick health is, and how memory grows, which a short run cannot.
    """
    minutes = request.config.getoption("--soak-minutes") if request.config.getoption("--soak") else 0
    lasts_s = 60.0 * minutes or SHORT_S
    with long_run(tmp_path, free_ports(4), seed=int(lasts_s), upgrades=upgrades) as run:
        _never.wait(lasts_s)
    seen = run.seen
    told = {**seen.counts, "p50 ms": 1000 * seen.quantile(0.5), "p99 ms": 1000 * seen.quantile(0.99)}
    print(json.dumps(told, indent=1))
    first, last = (seen.rss_at(at) for at in (min(SETTLED_S, lasts_s / 2), seen.rss_mib[-1][0] - 30.0))
    print(f"RSS {first:.1f} MiB after six minutes, {last:.1f} MiB at the end: {last / first:.3f} x")
    assert seen.faults == [], "\n\n".join(seen.faults)
    assert seen.counts["turns"] > 20
    if minutes:
        assert seen.quantile(0.99) <= 0.1, seen.quantile(0.99)
    if minutes and not upgrades:  # an upgrade begins with another memory
        assert last <= 1.1 * first

"""No input of one client delays all others."""

from collections.abc import Callable, Iterator

import pytest

from tests.harness.loads import LOADS, probing
from tests.harness.service import Service, scripted_model, serving

STEP_S = 0.05  # bound for the event loop's CPU time
SLOWER = 3


@pytest.fixture
def loaded(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    model = scripted_model(free_ports(1), slots=4, tokens=30)
    with serving(tmp_path_factory.mktemp("loop"), free_ports(1), {"m": model}) as running:
        yield running


@pytest.mark.parametrize("load", list(LOADS))
def test_no_step_blocks_the_event_loop(loaded: Service, load: str) -> None:
    """Health probes in between are answered without a long delay."""
    with probing(loaded) as probe:
        LOADS[load](loaded)
    assert len(probe.busy) > 10
    worst = sorted(probe.busy)[-3:]
    print(f"{load}: {len(probe.busy)} probes, the loop computed {[round(each * 1e3) for each in worst]} ms at most")
    assert worst[-1] < SLOWER * STEP_S

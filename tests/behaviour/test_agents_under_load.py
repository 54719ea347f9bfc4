"""A thousand requests a minute over eight devices (document 004): nothing is lost, nothing is said twice."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench.studies.agents import Tally, arrive, ask_in_turn, engine_on, register

SECONDS, DEVICES, EACH = 12.0, 8, 2


@pytest.mark.system
async def test_a_thousand_requests_a_minute_are_answered_once_each(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """For ten minutes by ``python -m bench.studies.agents load``; each answer names its question."""
    tally = Tally()
    async with engine_on(tmp_path, DEVICES, EACH, free_ports(DEVICES * EACH)) as engine:
        names = await register(engine, 64, DEVICES * EACH)
        await arrive(SECONDS, 1000 / 60, partial(ask_in_turn, tally, engine, names))
    assert tally.asked > SECONDS * 1000 / 60 / 2
    assert tally.failed == []
    assert tally.answers == {"right": tally.asked}

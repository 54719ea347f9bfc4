"""The check of the scheduling core, a few items at a time while no event is handled."""

import logging
import time
from collections.abc import Callable, Iterator

import pytest

from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.integrity import IntegrityCheck
from service.scheduling.work import RunCounters
from tests.harness.jobs import DEBATE, job


class DamagedCore(SchedulingCore):
    """A core in which one item of every few fails its check."""

    looked_at = 0

    def check(self) -> Iterator[str | None]:
        for number in range(1000):
            self.looked_at += 1
            yield "a turn is in two pools" if number == 500 else None


@pytest.fixture
def core() -> DamagedCore:
    made = DamagedCore(POLICIES["fifo"])
    made.handle(events.JobAdmitted(job=job(*DEBATE)))
    return made


def test_a_fault_is_logged_with_the_event_before_it_and_counted(
    core: DamagedCore, caplog: pytest.LogCaptureFixture
) -> None:
    """Specification, "Deterministic decisions": a fault ends nothing."""
    counters = RunCounters()
    check = IntegrityCheck(counters)
    check.last = (events.Paused(),)
    for _ in range(2):
        check.check_piece(core)
    assert counters.integrity_faults == 1
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "scheduling: a turn is in two pools, after (Paused(),)"
    ]


def test_a_core_that_handles_an_event_is_not_checked_meanwhile(core: DamagedCore) -> None:
    """An event handled between two pieces would change the collections that the check iterates over."""
    check = IntegrityCheck(RunCounters())
    for _ in range(10):
        core.handle()
        check.check_piece(core)
    assert core.looked_at == 0


def test_a_core_in_order_is_checked_once(core: DamagedCore) -> None:
    """An idle service spends no time on checks."""
    check = IntegrityCheck(RunCounters())
    for _ in range(10):
        check.check_piece(core)
    assert core.looked_at == 1000


def test_a_piece_of_the_check_stays_within_its_time_limit(
    core: DamagedCore, monkeypatch: pytest.MonkeyPatch, clock: Callable[[], float]
) -> None:
    """A core with a million turns is checked a few at a time."""
    monkeypatch.setattr(time, "monotonic", clock)
    check = IntegrityCheck(RunCounters())
    check.check_piece(core)
    check.check_piece(core)
    assert core.looked_at < 1000
    for _ in range(1000):
        check.check_piece(core)
    assert core.looked_at == 1000


@pytest.fixture
def clock() -> Callable[[], float]:
    """A clock on which a step of the check takes 0.6 ms."""
    now = iter(range(10**6))
    return lambda: 0.0006 * next(now)

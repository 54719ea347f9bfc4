"""Slots that stay idle for a turn on several slots are charged to its key, in the account and in its share."""

import pytest

from service.conversations.job.job import TurnKey
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.events import JobAdmitted, SlotsReserved, StartTurn, TurnCompleted, WorkerReady
from service.scheduling.core.policies import POLICIES
from service.scheduling.reserved_slots import ReservedSlots
from service.store.records import UsageKey
from tests.harness.jobs import key
from tests.unit.service.test_fair_shares import owned


def whose(turn: TurnKey) -> UsageKey:
    return UsageKey(day="2026-11-24", key_name=turn.job_id, job_id="", agent=turn.agent_id, model="m")


def test_seconds_are_counted_by_slots() -> None:
    """They are counted for each turn, whatever the slots are reserved for in the end, and once, as it ends."""
    kept = ReservedSlots(whose)
    wide, other = key("a", name="alice"), key("a", name="bob")
    assert kept.settle({}, 10.0) == []
    assert kept.settle({wide: 1}, 20.0) == []
    assert kept.settle({wide: 3}, 21.0) == []
    assert kept.take_over() == []
    (used,) = kept.settle({other: 2}, 22.5)
    assert (used.used[0], used.used[1].slot_s, used.used[1].attempts) == (whose(wide), 1.0 + 3 * 1.5, 0)
    assert kept.take_over() == [SlotsReserved(owner="alice", model="m", slot_s=5.5)]
    assert kept.take_over() == []
    (used,) = kept.settle({}, 23.0)
    assert used.used[1].slot_s == 1.0
    assert kept.settle({}, 99.0) == []


@pytest.mark.parametrize("idle_s", [0.0, 100.0])
def test_a_key_is_charged_for_slots_reserved_for_it(idle_s: float) -> None:
    """Another key goes first then, as if the slots had been in use."""
    core = SchedulingCore(POLICIES["fifo"], shares={})
    core.handle(WorkerReady(worker="w", model="m", slots=1))
    (running,) = [each.key for each in core.handle(JobAdmitted(job=owned("alice"))) if isinstance(each, StartTurn)]
    core.handle(JobAdmitted(job=owned("bob")))
    order = []
    core.handle(SlotsReserved(owner="alice", model="m", slot_s=idle_s))
    for _ in range(6):
        (started,) = [each for each in core.handle(TurnCompleted(key=running)) if isinstance(each, StartTurn)]
        running = started.key
        order.append(running.job_id)
    assert order == (["bob"] * 6 if idle_s else ["bob", "alice"] * 3)

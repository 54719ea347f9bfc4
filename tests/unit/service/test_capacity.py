"""A worker's slots are used only as far as its KV cache has room."""

import pytest
from msgspec.structs import replace

from service.scheduling.core import events
from service.scheduling.core.blame import Trial
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.kv_budgets import KvBudgets
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.turn_needs import (
    TEMPLATE_TOKENS,
)
from tests.harness.capacity import (
    MOST,
    admit,
    asks,
    core_of,
    done,
    kv_need,
    names,
    ready,
    reserved,
    seated,
    speaker,
    turn,
)

# What workers have room for


def test_reservations_stay_within_the_budget_to_the_token() -> None:
    """The sum of reservations and new turns stays within the budget to the token."""
    kv = KvBudgets()
    kv.open("w", 100)
    kv.reserve("w", turn("a"), kv_need(60))
    assert (kv.budget("w"), kv.reserved("w")) == (100, 60)
    assert kv.fits("w", kv_need(40))
    assert not kv.fits("w", kv_need(41))
    kv.reserve("w", turn("b"), kv_need(40))
    assert not kv.fits("w", kv_need(0 + 1))
    kv.free_room("w", turn("a"))
    assert kv.reserved("w") == 40
    kv.free_room("w", turn("a"))
    kv.free_room("v", turn("a"))
    assert kv.fits("w", kv_need(60))


def test_a_turn_alone_on_a_worker_always_fits() -> None:
    """Only the engine can judge whether a turn fits at all."""
    kv = KvBudgets()
    kv.open("w", 100)
    assert kv.fits("w", kv_need(10**6))
    kv.reserve("w", turn("a"), kv_need(10**6))
    assert not kv.fits("w", kv_need(1))
    kv.free_room("w", turn("a"))
    assert kv.fits("w", kv_need(10**6))


def test_a_worker_without_a_budget_has_room_for_anything() -> None:
    """Its slots bound it. Each worker is counted separately."""
    kv = KvBudgets()
    kv.open("w", 100)
    kv.open("v", None)
    for worker in ("w", "v"):
        kv.reserve(worker, turn("a"), kv_need(90))
    assert kv.fits("v", kv_need(10**6))
    assert not kv.fits("w", kv_need(20))
    kv.open("w", 200)
    assert kv.reserved("w") == 90
    assert kv.fits("w", kv_need(110))
    kv.open("w", None)
    assert kv.budget("w") is None
    assert kv.fits("w", kv_need(10**6))


# What starts


def test_turns_start_as_far_as_there_is_room() -> None:
    """There are eight slots, and room for three turns."""
    core = core_of(ready(kv=1000))
    assert len(seated(core.handle(admit(asks("j", 300, conversations=5))))) == 3
    assert reserved(core) == 900
    assert list(seated(core.handle(done(turn("j"))))) == [turn("j", conversation=3)]
    assert reserved(core) == 900


def test_turns_that_fill_the_budget_exactly_start() -> None:
    """The last token counts as room."""
    core = core_of(ready(kv=1000))
    assert len(seated(core.handle(admit(asks("j", 250, conversations=9))))) == 4


def test_a_turn_larger_than_any_budget_runs_alone() -> None:
    """Nothing starts beside it, and it starts beside nothing."""
    core = core_of(ready(kv=1000), jobs=[asks("small", 100)])
    assert names(core.handle(admit(asks("huge", 5000)))) == []
    assert names(core.handle(done(turn("small")))) == ["huge"]
    assert names(core.handle(admit(asks("next", 70)))) == []
    assert names(core.handle(done(turn("huge")))) == ["next"]


@pytest.mark.parametrize("end", ["completed", "failed", "interrupted", "tried", "rejected", "cut off", "closed"])
def test_room_is_given_back_however_a_turn_ends(end: str) -> None:
    """A turn gives back its own room, once."""
    core = core_of(ready(), jobs=[asks("j", 400), asks("k", 500), asks("l", 300)])
    assert reserved(core) == 900
    key = turn("j")
    match end:
        case "completed":
            assert names(core.handle(done(key))) == ["l"]
        case "failed":
            assert names(core.handle(events.TurnFailed(key=key, reason="engine_rejected"))) == ["l"]
        case "interrupted":
            assert names(core.handle(events.TurnInterrupted(key=key))) == ["j"]
        case "tried":
            core.handle(events.TurnInterrupted(key=key, trial=Trial.NEXT))
            assert reserved(core) == 500
            assert names(core.handle(done(turn("k")))) == ["j"]
            assert reserved(core) == 400
            return
        case "rejected":
            assert names(core.handle(events.TurnRejected(key=key))) == ["j"]
        case "cut off":
            assert names(core.handle(events.JobCancelled(job_id=key.job_id))) == []
            assert reserved(core) == 900
            assert names(core.handle(events.TurnCutOff(key=key))) == ["l"]
        case _:
            core.handle(events.WorkerNotReady(worker="w", returns=True))
            assert reserved(core) == 900  # the turns on it tell their own end
            core.handle(events.TurnInterrupted(key=key))
            assert reserved(core) == 500
            assert names(core.handle(ready(kv=850))) == ["l"]
    assert reserved(core) == 500 + (400 if end in ("interrupted", "rejected") else 300)


def test_a_worker_that_returns_with_a_smaller_budget_gets_fewer_turns() -> None:
    """Turns that are still on it count, and nothing starts until they are within the new budget."""
    core = core_of(ready(kv=1000), jobs=[asks("j", 300, conversations=3), asks("next", 200, conversations=2)])
    core.handle(events.WorkerNotReady(worker="w", returns=True))
    assert seated(core.handle(ready(kv=500))) == {}
    assert reserved(core) == 900
    assert names(core.handle(done(turn("j")))) == []
    assert names(core.handle(done(turn("j", conversation=1)))) == ["next"]
    assert reserved(core) == 500


def test_a_worker_that_returns_with_a_budget_counts_its_running_turns() -> None:
    """Turns that started while slots alone bounded it still take their room."""
    core = core_of(ready(kv=None), jobs=[asks("j", 300)])
    core.handle(ready(kv=1000))
    assert names(core.handle(admit(asks("huge", 5000)))) == []
    assert names(core.handle(done(turn("j")))) == ["huge"]


def test_a_turn_goes_to_the_worker_with_room() -> None:
    """It does so even if another worker has more free slots."""
    core = core_of(ready("w", kv=1000, slots=8), ready("v", kv=1000, slots=2), jobs=[asks("j", 700)])
    assert seated(core.handle(admit(asks("k", 400)))) == {turn("k"): "v"}
    assert seated(core.handle(admit(asks("l", 300)))) == {turn("l"): "w"}
    assert seated(core.handle(admit(asks("huge", 700)))) == {}
    assert seated(core.handle(done(turn("k")))) == {turn("huge"): "v"}


@pytest.mark.parametrize(("other", "worker"), [(300, "w"), (700, "v")])
def test_a_worker_with_the_prompt_cached_is_taken_if_it_has_room(other: int, worker: str) -> None:
    """If it has none, reading the prompt on another worker is better than waiting."""
    core = core_of(ready("w", slots=2), jobs=[asks("j", 300, rounds=2), asks("other", other)])
    core.handle(ready("v", slots=8))
    core.handle(events.Paused(), done(turn("j"), 300, 10))
    assert seated(core.handle(events.Unpaused())) == {turn("j", 1): worker}


def test_each_model_bounds_its_own_answers() -> None:
    """Long answers of one model reserve nothing at another."""
    long = events.WorkerReady(worker="n0", model="n", slots=2, kv_tokens=10**6, most_answer=10**5)
    core = core_of(ready(kv=2 * (TEMPLATE_TOKENS + MOST)), long)
    job = replace(asks("j", 0, conversations=3), agents=(speaker("a0"),))
    assert len(seated(core.handle(admit(job)))) == 2


def test_a_model_on_lanes_is_full_where_its_cache_is() -> None:
    """Turns wait although slots are free.

    The shortage is reported in the decision that leaves them waiting, and withdrawn once one fits.
    """
    core = SchedulingCore(POLICIES["fifo"], on_demand=("m",))
    core.handle(ready())
    core.handle(admit(asks("first", 700)))
    assert not core.view.waiting_on_demand()["m"].is_full
    core.handle(admit(asks("second", 700)))
    waiting = core.view.waiting_on_demand()["m"]
    assert (waiting.count, waiting.is_full) == (1, True)
    core.handle(ready("v"))
    assert core.view.waiting_on_demand()["m"].count == 0

"""Whether refusals, and requests that get no answer, count against the request or the engine: the pure parts."""

import pytest

from transport.counters import EngineCounters, SlotWork
from workers.policy.leaked_slots import SlotTasks
from workers.policy.liveness import EngineObservations, RequestObservations, Scope, StallLimits, judge
from workers.policy.refusals import SICK_S, SICK_TURNS, Refusals

LIMITS = StallLimits(prefill_s=120, decode_s=60)


def refused(turns: int, incarnation: int = 1, at: float = 0.0) -> Refusals:
    refusals = Refusals()
    for number in range(turns):
        refusals.add(number, incarnation, at)
    return refusals


def test_refusals_of_a_few_turns_are_their_own_fault() -> None:
    """The engine is innocent: some turns ask for something it cannot do, however often they are asked again."""
    refusals = refused(SICK_TURNS - 1)
    for again in range(100):
        refusals.add(0, 1, again)
    assert not refusals.speak_against_engine(1)


def test_refusals_of_many_turns_are_the_engines_fault_and_it_is_replaced() -> None:
    """It answers canaries, which proves only that it computes."""
    refusals = refused(SICK_TURNS)
    assert refusals.speak_against_engine(1)
    assert not refusals.are_too_many(1, SICK_S - 0.1)
    assert refusals.are_too_many(1, SICK_S)


def test_a_served_turn_excuses_the_engine() -> None:
    """A refusal then concerns only its request."""
    refusals = refused(SICK_TURNS)
    refusals.clear()
    assert not refusals.speak_against_engine(1)


def test_a_turn_that_the_next_engine_refuses_as_well_is_at_fault() -> None:
    """One replacement is the whole remedy: an engine is not replaced for ever for turns that none can serve."""
    refusals = refused(SICK_TURNS)
    for number in range(9):
        refusals.add(number, 2, SICK_S)
    assert not refusals.speak_against_engine(2)
    assert not refusals.are_too_many(2, 9 * SICK_S)


def work(task: int, tokens: int, *, is_busy: bool = True) -> SlotWork:
    return SlotWork(task=task, prompt_tokens=5, output_tokens=tokens, is_busy=is_busy)


class TestSlotTasks:
    def test_a_task_that_appears_with_a_request_may_be_its_own(self) -> None:
        """It progresses: a request whose answer arrives only when complete is being served."""
        tasks = SlotTasks()
        for second in range(10):
            tasks.observe_slots(EngineCounters(work=(work(1, second),)), float(second))
        assert tasks.newest_advance(0.0, 2.0) == 9.0

    def test_a_task_that_stands_still_shows_it(self) -> None:
        """It holds its slot and makes no progress."""
        tasks = SlotTasks()
        for second in range(10):
            tasks.observe_slots(EngineCounters(work=(work(1, min(second, 3)),)), float(second))
        assert tasks.newest_advance(0.0, 2.0) == 3.0

    def test_tasks_from_before_or_long_after_a_request_belong_to_others(self) -> None:
        """They prove that other requests are served."""
        tasks = SlotTasks()
        for second in range(30):
            long, short = work(1, second), work(100 + second, 1)
            tasks.observe_slots(EngineCounters(work=(long, short)), float(second))
        assert tasks.newest_advance(5.0, 8.0) is None


@pytest.mark.parametrize("is_mute", [False, True])
def test_a_request_that_is_passed_over_stalls_after_three_limits_though_counters_rise(is_mute: bool) -> None:
    """The engine works for others all the time, and their answers arrive only when complete."""
    rising = EngineObservations(is_serving=True, rose_at=2000.0, unexplained_at=2000.0)
    for seconds, scope in ((359.0, None), (361.0, Scope.REQUEST)):
        at = 2000.0 - seconds
        held = RequestObservations(has_token=False, progress_at=at, is_mute=is_mute, is_passed_over=True)
        assert judge(LIMITS, held, rising, 2000.0).scope is scope


def test_a_request_that_may_be_served_invisibly_does_not_stall() -> None:
    """It is innocent: its answer is not streamed, and takes an hour."""
    rising = EngineObservations(is_serving=True, rose_at=5000.0, unexplained_at=5000.0)
    served = RequestObservations(has_token=False, progress_at=1000.0, is_mute=True)
    assert judge(LIMITS, served, rising, 5000.0).scope is None

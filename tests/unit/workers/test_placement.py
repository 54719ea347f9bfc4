"""Which model is loaded on which lane: single moments, whole runs in virtual time, and what holds in any run."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.lanes import Arrival, Simulation, belady, lru, mixes
from workers.policy.lane_life import LanePhase
from workers.policy.placement import (
    AssignLane,
    Heat,
    LaneView,
    LeaveLane,
    LoadModel,
    ModelDemand,
    Placement,
    PlacementAction,
    SwapRule,
)

ROOM = {"gpu": 200}
READY, EMPTY, LOADING = LanePhase.READY, LanePhase.EMPTY, LanePhase.LOADING
LEAVING, BROKEN = LanePhase.LEAVING, LanePhase.BROKEN


def lane(number: int, resident: str | None = None, phase: LanePhase = READY, **fields: object) -> LaneView:
    where = {"device": "gpu", "memory_mib": 100, **fields}
    return LaneView(
        id=f"lane-{number}",
        resident=resident,
        phase=phase if resident else EMPTY,
        **where,  # type: ignore[arg-type]
    )


def model(name: str, *first: int, **fields: object) -> ModelDemand:
    return ModelDemand(name=name, waiting=len(first), first=first, **fields)  # type: ignore[arg-type]


def decide(
    lanes: Sequence[LaneView], models: Sequence[ModelDemand], rule: SwapRule = SwapRule.FAIR, now: float = 0.0
) -> list[PlacementAction]:
    rooms = {each.device: ROOM["gpu"] for each in lanes}
    return Placement(rooms, rule).decide(lanes, models, now)


def assigned(actions: Sequence[PlacementAction]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(each.lane, each.model, each.leaving) for each in actions if isinstance(each, AssignLane)]


def loaded(actions: Sequence[PlacementAction]) -> list[tuple[str, str]]:
    return [(each.lane, each.model) for each in actions if isinstance(each, LoadModel)]


class TestEmptyLanes:
    def test_no_model_is_loaded_without_a_waiting_turn(self) -> None:
        """A model takes memory only once a turn wants it."""
        assert decide([lane(0), lane(1)], [model("a"), model("b")]) == []

    def test_models_with_waiting_turns_are_loaded_at_once_the_oldest_first(self) -> None:
        """In order of arrival, not by name."""
        assert loaded(decide([lane(0)], [model("a", 7), model("b", 3)])) == [("lane-0", "b")]

    def test_devices_are_distinct_until_all_are_used(self) -> None:
        """Four models on two devices of two lanes each."""
        lanes = [lane(number, device=f"gpu-{number // 2}") for number in range(4)]
        models = [model(name, place) for place, name in enumerate("abcd")]
        assert loaded(decide(lanes, models)) == [("lane-0", "a"), ("lane-1", "c"), ("lane-2", "b"), ("lane-3", "d")]

    def test_a_hinted_lane_comes_first(self) -> None:
        """It comes before the lane with the smallest number."""
        assert loaded(decide([lane(0), lane(1)], [model("a", 1, hint="lane-1")])) == [("lane-1", "a")]

    def test_a_pinned_model_needs_no_turn_and_comes_before_all(self) -> None:
        """It is loaded when its first turn arrives."""
        assert loaded(decide([lane(0)], [model("a", 1), model("house", is_pinned=True)])) == [("lane-0", "house")]

    def test_a_lane_whose_cache_is_full_takes_no_turn_whatever_slots_it_has(self) -> None:
        """30 turns fill the KV cache of an engine of 256 slots, and 200 wait: the second lane is for them."""
        lanes = [lane(0, "a", in_flight=30, slots=256), lane(1)]
        waiting = tuple(range(16))
        assert loaded(decide(lanes, [model("a", *waiting, is_full=True)])) == [("lane-1", "a")]
        assert decide(lanes, [model("a", *waiting)]) == []
        loading = [lanes[0], lane(1, "a", LOADING, slots=256), lane(2, device="other")]
        assert decide(loading, [model("a", *waiting, is_full=True)]) == [], "what loads will take them"

    def test_a_model_gets_a_second_lane_only_if_one_is_empty(self) -> None:
        """No other model leaves for a second copy."""
        waits = model("a", 1, 2, 3)
        assert loaded(decide([lane(0, "a", in_flight=1), lane(1)], [waits])) == [("lane-1", "a")]
        assert decide([lane(0, "a", in_flight=1), lane(1, "b")], [waits, model("b")]) == []

    def test_a_model_that_failed_on_a_lane_goes_to_another(self) -> None:
        """It avoids the lane until the lane may be tried again."""
        assert loaded(decide([lane(0, barred=frozenset("a")), lane(1)], [model("a", 1)])) == [("lane-1", "a")]

    def test_a_lane_on_hold_gets_no_model(self) -> None:
        """An operator has drained it."""
        assert decide([lane(0, is_held=True)], [model("a", 1)]) == []


class TestWhoLeaves:
    def test_without_waiting_turns_the_model_with_the_least_demand_leaves(self) -> None:
        """The least recently used one may have more demand."""
        lanes = [lane(0, "a", used_at=9.0), lane(1, "b", used_at=1.0)]
        models = [model("a", heat=0.1), model("b", heat=3.0), model("c", 1)]
        assert assigned(decide(lanes, models)) == [("lane-0", "c", ("lane-0",))]

    def test_with_waiting_turns_the_model_whose_turns_are_last_in_the_queue_leaves(self) -> None:
        """The queue is the known part of the future."""
        lanes = [lane(0, "a", in_flight=1), lane(1, "b", in_flight=1)]
        assert assigned(decide(lanes, [model("a", 8), model("b", 5), model("c", 2)])) == [("lane-0", "c", ("lane-0",))]

    def test_a_free_lane_is_taken_before_a_busy_one(self) -> None:
        """Even if the busy lane's model has less demand."""
        lanes = [lane(0, "a", in_flight=1), lane(1, "b")]
        models = [model("a", heat=0.0), model("b", heat=5.0), model("c", 1)]
        assert assigned(decide(lanes, models)) == [("lane-1", "c", ("lane-1",))]

    @pytest.mark.parametrize("phase", [LOADING, LEAVING])
    def test_an_engine_that_loads_is_never_ended_and_one_that_leaves_is_ended_once(self, phase: LanePhase) -> None:
        """A step that has begun is finished first."""
        actions = decide([lane(0, "a", phase, next=None if phase is LOADING else "b")], [model("a"), model("c", 1)])
        assert assigned(actions) == []

    def test_turns_that_have_waited_longer_go_first_if_their_model_is_loaded(self) -> None:
        """Then the lane is given away."""
        assert decide([lane(0, "a", in_flight=1)], [model("a", 1), model("b", 2)]) == []
        assert assigned(decide([lane(0, "a", in_flight=1)], [model("a", 3), model("b", 2)])) != []

    def test_a_pinned_model_stays(self) -> None:
        """Whatever waits."""
        assert decide([lane(0, "a")], [model("a", is_pinned=True), model("b", 1)]) == []

    def test_a_broken_engine_keeps_no_lane_from_another_model_and_is_not_restarted_sooner(self) -> None:
        """Its restart has its own pauses."""
        assert assigned(decide([lane(0, "a", BROKEN)], [model("a"), model("b", 1)])) == [("lane-0", "b", ("lane-0",))]
        assert decide([lane(0, "a", BROKEN)], [model("a", 1)]) == []
        assert loaded(decide([lane(0, "a", BROKEN), lane(1)], [model("a", 1)])) == [("lane-1", "a")]

    def test_few_lets_a_model_stay_while_its_turns_wait_but_not_for_ever(self) -> None:
        """The bound is returned as the next moment to look."""
        lanes = [lane(0, "a", in_flight=1)]
        models = [model("a", 5), model("b", 2, waits_since=100.0)]
        placement = Placement(ROOM, SwapRule.FEW, patience_s=60.0)
        assert placement.decide(lanes, models, 159.0) == []
        assert placement.next_look(lanes, models, 159.0) == 160.0
        assert assigned(placement.decide(lanes, models, 160.0)) == [("lane-0", "b", ("lane-0",))]

    def test_few_loads_the_model_with_the_most_waiting_turns(self) -> None:
        """One load serves them all."""
        models = [model("a"), model("b", 1), model("c", 2, 3)]
        assert assigned(decide([lane(0, "a")], models, SwapRule.FEW)) == [("lane-0", "c", ("lane-0",))]

    def test_a_model_that_was_idle_for_its_time_leaves(self) -> None:
        """It leaves at that time, not before, and not with a turn on it."""
        idle = [lane(0, "a", used_at=3.0, idle_since=10.0)]
        placement = Placement(ROOM, SwapRule.FAIR)
        models = [model("a", keep_s=5.0)]
        assert placement.decide(idle, models, 14.9) == []
        assert placement.next_look(idle, models, 14.9) == 15.0
        assert placement.decide(idle, models, 15.0) == [LeaveLane(lane="lane-0", because="a was idle for 5 s")]
        assert placement.decide([lane(0, "a", idle_since=10.0, in_flight=1)], models, 99.0) == []


class TestMemory:
    def test_models_are_placed_by_memory_and_not_by_count(self) -> None:
        """Two lanes of 100 share 200: a model of 150 leaves 50 to the other."""
        lanes = [lane(0, "big"), lane(1)]
        big = model("big", need_mib=150)
        assert loaded(decide(lanes, [big, model("small", 1, need_mib=50)])) == [("lane-1", "small")]
        assert assigned(decide(lanes, [big, model("other", 1, need_mib=60)])) == [("lane-0", "other", ("lane-0",))]

    def test_a_model_larger_than_a_lane_makes_others_leave_its_device(self) -> None:
        """Two halves make a whole."""
        lanes = [lane(0, "a"), lane(1, "b")]
        models = [model("a", heat=1.0), model("b"), model("big", 1, need_mib=180)]
        ((where, what, leaving),) = assigned(decide(lanes, models))
        assert (what, sorted(leaving)) == ("big", ["lane-0", "lane-1"])
        assert where in leaving

    def test_a_model_is_loaded_only_when_its_memory_is_free(self) -> None:
        """A neighbour that is leaving still has its memory."""
        big = model("big", 1, need_mib=180)
        kept = lane(0, next="big")
        assert loaded(decide([kept, lane(1, "b", LEAVING, in_flight=1)], [big, model("b")])) == []
        assert loaded(decide([kept, lane(1)], [big, model("b")])) == [("lane-0", "big")]

    def test_a_model_of_unknown_size_takes_its_lanes_part(self) -> None:
        """It takes exactly that part."""
        lanes = [lane(0, "unknown"), lane(1)]
        assert loaded(decide(lanes, [model("unknown"), model("a", 1, need_mib=100)])) == [("lane-1", "a")]
        assert loaded(decide(lanes, [model("unknown"), model("a", 1, need_mib=101)])) == []


class TestWholeRuns:
    @pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
    def test_fair_swaps_no_more_often_than_least_recently_used_does(self, rate: float) -> None:
        """Six models on two lanes, nine mixes together; the benchmark reports each of them, over 10,000 requests."""
        ours, usual = 0, 0
        for seed in (1, 2, 3):
            for _, arrivals in mixes(400, 6, rate, seed):
                outcome = Simulation(arrivals, 2, SwapRule.FAIR).run()
                assert outcome.worst <= 2.0  # the work that arrived before a request
                ours, usual = ours + outcome.swaps, usual + lru([each for _, each, _ in arrivals], 2)
        assert ours <= usual

    def test_few_swaps_less_often_than_the_best_in_order_schedule(self) -> None:
        """The schedule knows the future and keeps the order; with eight or more waiting turns on average."""
        for kind, arrivals in mixes(600, 6, 3.5):
            outcome = Simulation(arrivals, 2, SwapRule.FEW).run()
            assert sum(outcome.queued) / len(outcome.queued) >= 8
            assert outcome.swaps <= belady([each for _, each, _ in arrivals], 2), kind

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.floats(0, 3), st.sampled_from("abcde"), st.floats(0.01, 5)), min_size=1, max_size=40),
        st.integers(1, 3),
        st.sampled_from(SwapRule),
    )
    def test_every_request_is_served_whatever_arrives(
        self, steps: list[tuple[float, str, float]], lanes: int, rule: SwapRule
    ) -> None:
        """No mix, rule or number of lanes leaves one behind."""
        at, arrivals = 0.0, list[Arrival]()
        for pause, name, work in steps:
            at += pause
            arrivals.append((at, name, work))
        outcome = Simulation(arrivals, lanes, rule).run()  # it fails where one is left
        assert len(outcome.waits) == len(arrivals)


def test_demand_counts_recent_and_frequent_requests() -> None:
    """Four requests weigh more than one, and forty for other models reduce their weight."""
    heat = Heat()
    for name in "aaaab":
        heat.note(name)
    assert heat.of_model("a") > heat.of_model("b") > heat.of_model("c") == 0.0
    for _ in range(40):
        heat.note("b")
    assert heat.of_model("a") < 0.2

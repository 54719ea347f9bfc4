"""Engines that sleep on lanes of workers: events while they sleep, wake or die."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.sleeping import BEGIN, END, SLEEP, WAKE, lanes
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK
from workers.errors import GroupMissing
from workers.lanes import sleep
from workers.policy.placement import Waiting
from workers.policy.weight_update import UpdateState
from workers.policy.weights import WeightsPolicy
from workers.states import Hold, WorkerState
from workers.weights.group import GroupRequest, GroupState
from workers.weights.update import Tensor, UpdateRequest


@pytest.mark.parametrize("do", ["fail", "absent", "end", "stall"])
async def test_an_engine_on_a_lane_that_cannot_sleep_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: str
) -> None:
    """The other model gets the lane nevertheless; at the next attempt the engine may sleep."""
    monkeypatch.setattr(sleep, "SLEEP_S", 0.2)
    async with lanes(tmp_path) as told:
        assert await told.say("a") == "weights-a"
        told.misbehave("a", "sleep", do)
        assert await told.say("b") == "weights-b"
        ends = [] if do == "end" else [("a", END)]
        assert told.swaps() == [("a", BEGIN), ("a", SLEEP), *ends, ("b", BEGIN)]
        told.behave("a")
        monkeypatch.setattr(sleep, "SLEEP_S", LIMIT_S)
        assert [await told.say(model) for model in "ab"] == ["weights-a", "weights-b"]
        assert told.swaps("a")[-2:] == [("a", BEGIN), ("a", SLEEP)]
        await told.wait_asleep("a")
        told.check_sleepers()


async def test_an_update_of_a_sleeping_model_is_applied_at_its_load(tmp_path: Path) -> None:
    """Its engine is started again, and takes no turn before it has the new weights."""
    async with lanes(tmp_path) as told:
        assert await told.say("a") == "weights-a"
        await told.want("b")
        await told.wait_asleep("a")
        checkpoint = str(told.checkpoint("one"))
        update = await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [])
        assert await told.say("a") == "one"
        assert told.swaps("a") == [("a", BEGIN), ("a", SLEEP), ("a", END), ("a", BEGIN)]
        assert [await told.say(model) for model in "ba"] == ["weights-b", "one"]
        assert told.swaps("a")[-2:] == [("a", SLEEP), ("a", WAKE)]  # with those that it has
        told.check_sleepers()


async def test_an_engine_that_slept_has_its_models_current_adapters(tmp_path: Path) -> None:
    """If an adapter was added or removed meanwhile, the engine is started with the current ones; otherwise it wakes."""
    path = {"poet": str(tmp_path / "poet")}
    async with lanes(tmp_path, max_adapters=2) as told:
        await told.want("a")
        for adapters, last in ((path, BEGIN), (path, WAKE), ({}, BEGIN)):
            await told.want("b")
            await told.wait_asleep("a")
            told.workers["a"].want_adapters(adapters)
            worker = await told.want("a")
            assert (worker.adapters.loaded, told.swaps("a")[-1]) == (adapters, ("a", last))
        assert [asked for _, asked in told.swaps("a")].count(END) == 2
        told.check_sleepers()


async def test_changes_during_a_wake_start_the_engine_again(tmp_path: Path) -> None:
    """An update, and then an adapter: it wakes with the old state, and is started again."""
    async with lanes(tmp_path, max_adapters=2) as told:
        worker = await told.want("a")
        checkpoint = str(told.checkpoint("one"))
        for change in ("weights", "adapter"):
            await told.want("b")
            await told.wait_asleep("a")
            told.misbehave("a", "wake", "hold")
            told.note("a")
            await told.wait_asked("a", WAKE)
            if change == "weights":
                await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
            else:
                worker.want_adapters({"poet": str(tmp_path / "poet")})
            told.behave("a")
            assert await told.say("a") == "one"
            assert told.swaps("a")[-3:] == [("a", WAKE), ("a", END), ("a", BEGIN)], change
        assert set(worker.adapters.loaded) == {"poet"}


async def test_an_engine_that_falls_asleep_gets_no_update(tmp_path: Path) -> None:
    """Its model's next engine has the new weights."""
    async with lanes(tmp_path) as told:
        await told.want("a")
        told.misbehave("a", "sleep", "hold")
        told.note("b")
        await told.wait_asked("a", SLEEP)
        checkpoint = str(told.checkpoint("one"))
        update = await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [])
        told.behave("a")
        assert [await told.say(model) for model in "ba"] == ["weights-b", "one"]
        assert told.swaps("a")[-2:] == [("a", END), ("a", BEGIN)]
        told.check_sleepers()


async def test_an_engine_behind_in_weights_does_not_sleep(tmp_path: Path) -> None:
    """Nor does it during an update: it would have to be started again."""
    async with lanes(tmp_path) as told:
        checkpoint = str(told.checkpoint("one"))
        await told.fleet.weights["a"].update(UpdateRequest(checkpoint=checkpoint))
        told.misbehave("a", "receive", "hold")
        told.note("a")
        await wait_until(lambda: told.workers["a"].now.holds == {Hold.STALE_WEIGHTS}, "it is behind")
        await wait_until(lambda: told.workers["a"].now.is_serving, "and there")
        assert await told.say("b") == "weights-b"
        assert told.swaps("a") == [("a", BEGIN), ("a", END)]
        told.behave("a")
        assert await told.say("a") == "one"


async def test_a_trainers_group_has_no_sleeping_engine(tmp_path: Path) -> None:
    """It would wait for that engine until its time is over: the group has to be formed again without it."""
    policy = WeightsPolicy(receive_s=5, keep=False)
    group = GroupRequest(backend=policy.backend, address="127.0.0.1", port=1, timeout_s=LIMIT_S)
    tensors = UpdateRequest(tensors=(Tensor(name="w", dtype="float32", shape=(1,)),))
    async with lanes(tmp_path, "ac", count=2, weights=policy) as told:
        weights = told.fleet.weights["a"]
        told.fleet.lane_pool.note_waiting({"a": Waiting(count=9, first=(1, 2))})  # more turns than one engine has slots
        there = [lane.workers["a"] for lane in told.all_lanes]
        await wait_until(lambda: all(worker.now.state is WorkerState.READY for worker in there), "it is on both lanes")
        made = await weights.init(group)
        await wait_until(lambda: made.state is GroupState.READY, "all have joined")
        other = await told.want("c")
        sleeper = [lane.current for lane in told.all_lanes].index(other)
        await wait_until(lambda: there[sleeper].now.holds == {Hold.ASLEEP}, "one sleeps")
        with pytest.raises(GroupMissing, match=f"lane-{sleeper} sleeps"):
            await weights.update(tensors)
        made = await weights.init(group)
        await wait_until(lambda: made.state is GroupState.READY, "the other has joined")
        update = await weights.update(tensors)
        assert await weights.wait_over(update.number, LIMIT_S)
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, [f"lane-{1 - sleeper}"])
        told.check_sleepers()


async def test_every_engine_of_a_lane_has_a_number_of_its_own(tmp_path: Path) -> None:
    """Transcripts, incidents and logs use the number; an engine that wakes keeps its own."""
    async with lanes(tmp_path, "abc") as told:
        numbers = [(await told.want(model)).now.incarnation for model in "abacbd"[:5]]
        assert numbers == [1, 2, 1, 3, 2]


async def test_an_engine_that_fails_asleep_for_the_last_time_stays_down(tmp_path: Path) -> None:
    """If one failure is enough to give up, a turn has to ask for the one more try."""
    restart = replace(QUICK, failures=1, retry_s=2 * LIMIT_S)
    async with lanes(tmp_path, restart=restart) as told:
        await told.want("a")
        await told.want("b")
        await told.wait_asleep("a")
        os.kill(told.pids("a")[0], signal.SIGTERM)  # it ends by itself: no signal that killed it explains that
        await wait_until(lambda: told.workers["a"].now.state is WorkerState.STOPPED, "it is not to come back")
        assert await told.say("b") == "weights-b"
        assert told.swaps("a") == [("a", BEGIN), ("a", SLEEP), ("a", END)]
        assert await told.say("a") == "weights-a"
        assert told.swaps("a")[-1] == ("a", BEGIN)


async def test_an_engine_that_dies_before_it_sleeps_leaves_its_lane_to_the_next(tmp_path: Path) -> None:
    """It waits for a neighbour's start meanwhile, and so does the other model's wake, which is requested once."""
    async with lanes(tmp_path, "abc", count=2) as told:
        told.fleet.lane_pool.demand.hints |= {"a": "lane-0", "b": "lane-0", "c": "lane-1"}
        neighbour = await told.want("c")
        await told.want("b")
        first = await told.want("a")
        assert [lane.current.spec.name for lane in told.all_lanes] == ["a", "c"]
        told.misbehave("c", "begin", "stall")
        os.kill(told.pids("c")[0], signal.SIGKILL)
        await wait_until(lambda: told.swaps("c") == [("c", BEGIN)] * 2, "the neighbour starts again")
        told.note("b")
        await wait_until(lambda: told.lane.is_turning, "it is to sleep, and waits for the neighbour")
        os.kill(told.pids("a")[0], signal.SIGKILL)
        await wait_until(lambda: told.lane.current.spec.name == "b", "the other has its lane")
        told.misbehave("b", "wake", "hold")
        told.behave("c")
        await told.wait_asked("b", WAKE)
        assert neighbour.now.state is WorkerState.READY
        told.behave("b")
        await told.want("b")
        assert (await told.want("a")) is first
        assert told.swaps("a", "b")[3:] == [("b", WAKE), ("b", SLEEP), ("a", BEGIN)]

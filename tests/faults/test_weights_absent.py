"""Weight updates while engines or checkpoints are missing, at the beginning or later."""

import os
import shutil
import signal
from pathlib import Path

import anyio
import pytest

from tests.faults.test_weights import Fault, Two, is_over, tensors, two
from tests.harness.waiting import wait_until
from workers.errors import GroupMissing
from workers.policy.weight_update import UpdateState
from workers.policy.weights import Backend, WeightsPolicy
from workers.states import WorkerState
from workers.weights import catch_up, update_run
from workers.weights.group import GroupRequest, GroupState


async def kill_bad(workers: Two) -> None:
    pid = workers.bad.snapshot().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await wait_until(lambda: not workers.bad.now.is_serving, "its death is known")


async def begin_again(workers: Two) -> Fault:
    """Kill an engine; its successor does not become ready as long as the returned fault stands."""
    fault = Fault(port=workers.bad.spec.port, phase="begin", do="stall")
    workers.fail(fault)
    await kill_bad(workers)
    await wait_until(lambda: workers.bad.now.incarnation == 2 and workers.bad.snapshot().pid, "another begins")
    return fault


async def test_an_engine_that_starts_beside_a_group_breaks_it(tmp_path: Path) -> None:
    """Otherwise a trainer would be refused for ever: it forms a group only where there is none."""
    async with two(tmp_path) as workers:
        weights = workers.weights
        await begin_again(workers)
        group = await weights.init(GroupRequest(backend=Backend.GLOO, address="127.0.0.1", port=1, timeout_s=5))
        await wait_until(lambda: group.state is GroupState.READY, "all have joined")
        update = await weights.update(tensors("w"))
        await is_over(weights)
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, ["m-0"])
        workers.fault.unlink()
        await workers.back("version-1")
        assert (group.state, group.error) == (GroupState.BROKEN, "m-1 is not in it")
        await workers.join()
        update = await weights.update(tensors("w"))
        await is_over(weights)
        assert (update.state, len(update.shares)) == (UpdateState.COMPLETED, 2)


async def test_a_group_with_a_dead_member_begins_nothing(tmp_path: Path) -> None:
    """A broadcast that one rank never joins would block all others until their limit."""
    async with two(tmp_path) as workers:
        await workers.join()
        await begin_again(workers)
        with pytest.raises(GroupMissing, match="m-1 is gone"):
            await workers.weights.update(tensors("w"))
        workers.fault.unlink()
        await workers.back("launched")


async def test_a_slow_member_beside_a_failure_has_its_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a worker that still waits for the trainer is hurried; one that loads weights is healthy, and not killed."""
    monkeypatch.setattr(update_run, "GRACE_S", 0.0)
    async with two(tmp_path, limits=WeightsPolicy(keep=False)) as workers:
        await workers.join()
        slow, broken = (each.spec.port for each in (workers.good, workers.bad))
        hold = Fault(port=slow, phase="finish", do="hold")
        workers.fail(hold, Fault(port=broken, phase="finish", do="fail"))
        update = await workers.weights.update(tensors("w"))
        await wait_until(lambda: update.shares[workers.bad.spec.id].error, "one has failed")
        workers.fail(hold)
        await anyio.wait_all_tasks_blocked()
        assert update.shares[workers.good.spec.id].stage == "finishing"
        workers.fault.unlink()
        await is_over(workers.weights)
        assert (update.state, workers.good.now.incarnation) == (UpdateState.PARTIAL, 1)


async def test_an_engine_that_starts_during_an_update_takes_no_turn(tmp_path: Path) -> None:
    """It would answer with the old weights, and be interrupted for the new ones."""
    async with two(tmp_path, limits=WeightsPolicy(keep=False)) as workers:
        starting = await begin_again(workers)
        hold = Fault(port=workers.good.spec.port, phase="receive", do="hold")
        workers.fail(starting, hold)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(workers.weights.update, workers.request("one"))
            await wait_until(lambda: workers.weights.running, "it is under way")
            workers.fail(hold)
            await wait_until(lambda: workers.bad.now.is_serving, "it has started")
            assert workers.bad.now.state is WorkerState.DRAINING
            assert workers.weights.running
            workers.fault.unlink()
        await workers.back("one")
        assert workers.bad.now.incarnation == 2


async def test_a_missing_checkpoint_kills_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts later waits for it, and says so; it loads the checkpoint once it is back."""
    monkeypatch.setattr(catch_up, "BRING_AGAIN_S", 0.05)
    async with two(tmp_path) as workers:
        await workers.weights.update(workers.request("one"))
        await is_over(workers.weights)
        shutil.move(tmp_path / "one", tmp_path / "away")
        await kill_bad(workers)
        await wait_until(lambda: "cannot be read" in workers.weights.catch_up.waits_for(workers.bad), "it is told")
        assert (workers.bad.now.state, workers.bad.now.incarnation) == (WorkerState.DRAINING, 2)
        shutil.move(tmp_path / "away", tmp_path / "one")
        await workers.back("one")
        assert workers.bad.now.incarnation == 2

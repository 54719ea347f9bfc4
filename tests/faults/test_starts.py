"""Engines that start slowly, badly or not at all, and starts and stops requested at odd moments."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.conftest import SpecFactory
from tests.harness.waiting import LIMIT_S, is_alive, wait_until
from tests.harness.working import QUICK, STALLS, ask, working
from workers import (
    NO_SLOT_AVAILABLE,
    RequestState,
    Worker,
    WorkerTimeouts,
)
from workers.errors import StartFailed
from workers.states import WorkerState


async def test_an_engine_that_loads_slowly_is_waited_for(scripted_spec: SpecFactory) -> None:
    """503 while loading is no failure."""
    async with working(scripted_spec(load=0.5)) as worker:
        assert (worker.now.incarnation, (await ask(worker)).state) == (1, RequestState.COMPLETED)


async def test_an_engine_that_never_gets_ready_is_given_up(scripted_spec: SpecFactory) -> None:
    """A start has its own limit, and so have restarts."""
    spec = scripted_spec(never_ready=True, timeouts=replace(STALLS, start_s=0.4))
    worker = Worker(replace(spec, restart=QUICK))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed, match=r"gave up after 3 failures.*not ready within 0\.4 s"):
            await worker.start()
        assert [incident.reason for incident in worker.recorder.incidents] == ["engine_unreachable"] * 3
        assert await worker.submit("a job", "", "Go.") is NO_SLOT_AVAILABLE
        await worker.stop()


async def test_an_engine_that_exits_at_once_leaves_its_last_words(scripted_spec: SpecFactory) -> None:
    """The line that matters is in the error and in the incident."""
    worker = Worker(replace(scripted_spec(exit_at_once=7), restart=QUICK))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed, match="exited with status 7") as failed:
            await worker.start()
        assert "scripted engine: cannot allocate the universe" in failed.value.log_tail
        because = worker.snapshot().because
        assert because.endswith("exited with status 7; its last line: scripted engine: cannot allocate the universe")
        incident = next(iter(worker.recorder.incidents))
        assert (incident.exit is not None, incident.incarnation) == (True, 3)
        assert incident.exit is not None
        assert incident.exit.status == 7
        assert incident.stdout_tail == ("scripted engine: cannot allocate the universe",)
        await worker.stop()


async def test_the_output_of_a_ready_engine_is_for_operators(scripted_spec: SpecFactory) -> None:
    """It may contain prompts; a key that sees a worker's state does not see its log."""
    worker = Worker(replace(scripted_spec(flood=100), restart=replace(QUICK, initial_s=60.0, max_s=60.0)))
    with anyio.fail_after(LIMIT_S):
        await worker.start()
        pid = worker.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: worker.now.state is WorkerState.BACKOFF, "its engine is gone")
        assert worker.supervisor.log.tail(1)
        assert "last line" not in worker.snapshot().because
        await worker.stop()


async def test_a_worker_that_gave_up_tries_once_more_later(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """As a half-open circuit breaker does: the fault may have passed."""
    fault = tmp_path / "fault"
    fault.touch()
    policy = replace(QUICK, retry_s=0.2)
    worker = Worker(replace(scripted_spec(exit_if=str(fault)), restart=policy))
    with anyio.fail_after(LIMIT_S):
        with pytest.raises(StartFailed):
            await worker.start()
        await wait_until(lambda: worker.now.incarnation >= 5, "it has tried again, twice")
        fault.unlink()
        await wait_until(lambda: worker.now.state is WorkerState.READY, "it is back")
        await worker.stop()


async def test_a_stop_that_is_cancelled_or_requested_twice_is_a_stop(scripted_spec: SpecFactory) -> None:
    """A signal handler and the end of a block may come together; the worker can be started again."""
    timeouts = WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=60)
    async with working(scripted_spec(timeouts=timeouts, ignore_sigterm=True)) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        with anyio.move_on_after(0.1):
            await worker.stop()
        assert (worker.now.state, is_alive(pid)) == (WorkerState.STOPPED, False)
        await worker.start()
        assert (await ask(worker)).text == "word0 word1 word2 "
        with anyio.move_on_after(0.1):
            await asyncio.gather(worker.stop(), worker.stop())
        await worker.stop()
        assert worker.now.state is WorkerState.STOPPED


async def test_a_failed_start_can_be_tried_again(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """The state directory was a file, and then is none."""
    (tmp_path / "state").write_text("")
    worker = Worker(replace(scripted_spec(), state_dir=tmp_path / "state"))
    with anyio.fail_after(LIMIT_S):
        for _ in range(2):
            with pytest.raises(OSError, match="state"):
                await worker.start()
        (tmp_path / "state").unlink()
        await worker.start()
        assert (await ask(worker)).state is RequestState.COMPLETED
        await worker.stop()


async def test_the_drain_of_a_worker_that_gave_up_holds(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """Whatever starts its engine again."""
    spec = scripted_spec(die_after=0, die_once=str(tmp_path / "once"))
    with anyio.fail_after(2 * LIMIT_S):
        worker = Worker(replace(spec, restart=replace(QUICK, failures=1)))
        await worker.start()
        await ask(worker)
        await wait_until(lambda: worker.now.state is WorkerState.FAILED, "it gives up")
        worker.drain_nowait("a test")
        worker.restart_nowait("a test")
        await wait_until(lambda: worker.now.state is WorkerState.DRAINING, "it is there, and drained")
        await worker.stop()

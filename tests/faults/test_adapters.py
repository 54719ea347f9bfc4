"""An adapter that is loaded or unloaded while an engine fails; vLLM's control endpoints are played."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic

import anyio
import pytest

from tests.conftest import SpecFactory
from tests.engines.adapters import write_gguf_adapter, write_peft_adapter
from tests.faults.test_weights import Two, two
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK
from workers.adapters import provision
from workers.adapters.model_adapters import ModelAdapters
from workers.errors import AdapterRefused, NoEngineReady
from workers.fleet import Fleet
from workers.outcome import Completed, EngineFailed, FailureReason, RequestFailed
from workers.requests.answer import Answer
from workers.requests.request import Request, user_conversation
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

BEGIN_LIMIT_S = 1.0


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "LOAD_LIMIT_S", BEGIN_LIMIT_S)
    monkeypatch.setattr(provision, "UNLOAD_LIMIT_S", BEGIN_LIMIT_S)


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Two, ModelAdapters]]:
    write_peft_adapter(tmp_path / "poet", 1)
    async with two(tmp_path, max_adapters=4) as workers:
        yield workers, workers.fleet.adapters["m"]


async def ask(worker: SupervisedWorker, adapter: str | None) -> str:
    answer = Answer(monotonic)
    asked = Request(job_name="test", system="", conversation=user_conversation("Go."), adapter=adapter)
    with worker.lease_nowait():
        outcome = await worker.requests.perform(asked, answer)
    if isinstance(outcome, RequestFailed):
        return outcome.reason
    assert isinstance(outcome, Completed)
    return answer.text


async def ready(workers: Two) -> None:
    await wait_until(lambda: all(each.now.state is WorkerState.READY for each in workers.fleet), "both are ready")


async def check(workers: Two, expected: str) -> None:
    """Return whether both workers serve the base, and the adapter as expected."""
    await ready(workers)
    for worker in workers.fleet:
        assert (await ask(worker, None), await ask(worker, "poet")) == ("launched", expected)


async def test_an_adapter_is_loaded_and_unloaded(tmp_path: Path) -> None:
    """By name, and with its weights: vLLM itself only forgets the name."""
    async with pair(tmp_path) as (workers, adapters):
        assert await adapters.load("poet", tmp_path / "poet")
        await check(workers, "launched+poet")
        assert not await adapters.load("poet", tmp_path / "poet")
        pid = workers.bad.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: workers.bad.now.incarnation == 2, "another begins")
        await check(workers, "launched+poet")
        await adapters.unload("poet")
        await check(workers, FailureReason.ADAPTER_UNLOADED)
        assert [worker.now.incarnation for worker in workers.fleet] == [1, 2]
        assert [worker.adapters.numbers for worker in workers.fleet] == [{}, {}]
        assert adapters.names == []


async def test_adapters_stay_with_their_model(tmp_path: Path) -> None:
    """After a restart with another model of that name they are left out: no engine would start with them."""
    async with pair(tmp_path) as (workers, adapters):
        await adapters.load("poet", tmp_path / "poet")
        spec = workers.good.spec
    for model, names in ((spec.model, ["poet"]), (str(tmp_path / "one"), [])):
        later = Fleet([replace(spec, model=model)], os.environ, tmp_path / "state")
        assert later.adapters["m"].names == names
        assert list(next(iter(later)).adapters.wanted) == names


async def test_an_adapter_that_one_engine_refuses_is_on_none(tmp_path: Path) -> None:
    """The other engine has it for a moment, and unloads it."""
    async with pair(tmp_path) as (workers, adapters):
        workers.misbehave("load", "fail")
        with pytest.raises(AdapterRefused, match="m-1 does not take adapter poet"):
            await adapters.load("poet", tmp_path / "poet")
        workers.fault.unlink()
        await check(workers, FailureReason.ADAPTER_UNLOADED)
        assert [worker.now.incarnation for worker in workers.fleet] == [1, 1]
        assert (adapters.names, workers.good.adapters.loaded, workers.good.adapters.wanted) == ([], {}, {})
        assert await adapters.load("poet", tmp_path / "poet")
        await check(workers, "launched+poet")


@pytest.mark.system
@pytest.mark.parametrize("do", ["stall", "end"])
async def test_an_engine_that_fails_over_an_adapter_is_replaced(tmp_path: Path, do: str) -> None:
    """The other engine has loaded it; the next engine starts with it."""
    async with pair(tmp_path) as (workers, adapters):
        workers.misbehave("load", do)
        assert await adapters.load("poet", tmp_path / "poet")
        workers.fault.unlink()
        await wait_until(lambda: workers.bad.now.incarnation == 2, "another begins")
        await check(workers, "launched+poet")
        workers.misbehave("unload", do)
        await adapters.unload("poet")
        workers.fault.unlink()
        await wait_until(lambda: workers.bad.now.incarnation == 3, "another begins")
        await check(workers, FailureReason.ADAPTER_UNLOADED)
        assert workers.good.now.incarnation == 1


async def test_a_death_over_an_adapter_is_not_tried_on_the_next(tmp_path: Path) -> None:
    """The adapter may be the cause of the death: no other engine gets it, and the name is free."""
    async with pair(tmp_path) as (workers, adapters):
        workers.misbehave("load", "end", both=True)
        with pytest.raises(NoEngineReady, match="m-0 went away over adapter poet"):
            await adapters.load("poet", tmp_path / "poet")
        workers.fault.unlink()
        await wait_until(lambda: workers.good.now.incarnation == 2, "another begins")
        await check(workers, FailureReason.ADAPTER_UNLOADED)
        assert workers.bad.now.incarnation == 1


async def test_an_adapter_that_no_engine_survives_is_on_none(tmp_path: Path) -> None:
    """Nothing has changed once all are back."""
    async with pair(tmp_path) as (workers, adapters):
        workers.good.drain_nowait("so that the other is alone")
        await workers.good.end_engine("so that the other is alone")
        workers.misbehave("load", "end")
        with pytest.raises(NoEngineReady):
            await adapters.load("poet", tmp_path / "poet")
        workers.fault.unlink()
        workers.good.resume_nowait("again")
        await wait_until(lambda: workers.bad.now.incarnation == 2, "another begins")
        await check(workers, FailureReason.ADAPTER_UNLOADED)
        assert list((tmp_path / "state" / "adapters" / "m").iterdir()) == []


async def test_an_engine_that_starts_meanwhile_is_held_until_it_has_the_adapter(tmp_path: Path) -> None:
    """It started without the adapter, and takes no request before it has it."""
    async with pair(tmp_path) as (workers, adapters):
        workers.misbehave("begin", "stall")
        pid = workers.bad.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: workers.bad.now.incarnation == 2 and workers.bad.snapshot().pid, "another begins")
        assert await adapters.load("poet", tmp_path / "poet")
        assert Hold.ADAPTERS in workers.bad.now.holds
        assert await ask(workers.good, "poet") == "launched+poet"
        workers.fault.unlink()
        await check(workers, "launched+poet")
        assert workers.bad.now.incarnation == 2


async def test_a_load_goes_on_after_its_caller_has_disconnected(tmp_path: Path) -> None:
    """Half a change would have no owner."""
    async with pair(tmp_path) as (workers, adapters):
        workers.misbehave("load", "stall")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(adapters.load, "poet", tmp_path / "poet")
            await wait_until(lambda: adapters.changing, "it is under way")
            tasks.cancel_scope.cancel()
        workers.fault.unlink()
        await wait_until(lambda: adapters.names == ["poet"], "it is loaded")
        await check(workers, "launched+poet")


async def test_an_engine_that_gives_up_ends_the_wait_for_it(scripted_spec: SpecFactory, tmp_path: Path) -> None:
    """llama.cpp: the change waits for running requests, and the engine dies for good; the next change gets its turn."""
    poet = write_gguf_adapter(tmp_path / "poet.gguf", 1)
    spec = replace(scripted_spec(tokens=1000, interval=0.01), max_adapters=2, restart=replace(QUICK, failures=1))
    fleet = Fleet([spec], os.environ, tmp_path / "state")
    (worker,), adapters = fleet, fleet.adapters["scripted"]
    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running(), anyio.create_task_group() as tasks:
            await fleet.wait_ready()
            tasks.start_soon(_ask_in_vain, worker)
            await wait_until(lambda: worker.slots.in_use, "a request is in flight")
            tasks.start_soon(_load_in_vain, adapters, poet)
            await wait_until(lambda: Hold.ADAPTERS in worker.now.holds, "the worker is held")
            pid = worker.snapshot().pid
            assert pid is not None
            os.kill(pid, signal.SIGSEGV)  # its own death: a SIGKILL from outside does not count
            await wait_until(
                lambda: worker.now.state is WorkerState.FAILED and not adapters.changing, "the wait is over"
            )
            assert worker.now.holds == frozenset()
            worker.resume_nowait("an operator")
            await fleet.wait_ready()
            assert (worker.adapters.loaded, adapters.names) == ({}, [])


async def _ask_in_vain(worker: SupervisedWorker) -> None:
    asked = Request(job_name="test", system="", conversation=user_conversation("Go."))
    with worker.lease_nowait():
        assert isinstance(await worker.requests.perform(asked, Answer(monotonic)), EngineFailed)


async def _load_in_vain(adapters: ModelAdapters, path: Path) -> None:
    with pytest.raises(NoEngineReady, match="scripted-0 went away"):
        await adapters.load("poet", path)

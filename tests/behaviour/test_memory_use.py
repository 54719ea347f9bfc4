"""Measured memory of engines on their devices corrects the placement, on real processes of the scripted engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from roundhouse import InferenceEngine
from service.api.routes.workers import shown_lane
from tests.harness.agents import engine as scripted_engine
from tests.harness.agents import say
from tests.harness.devices import FIRST, LOOK_S, Machine
from tests.harness.waiting import LIMIT_S, wait_until
from workers.devices.device_health import DeviceHealth
from workers.devices.readers import MachineReader
from workers.files.model_memory import model_memory
from workers.lanes.memory_use import MIB, MemoryUse
from workers.spec import EngineKind, WorkerSpec

LIMIT = 3 * LIMIT_S
CONTEXT = 64


def engine(first_port: int, *, count: int) -> InferenceEngine:
    return scripted_engine(first_port, count=count, ports=(first_port, first_port + 3), context=CONTEXT)


def seen(game: InferenceEngine) -> dict[str, int]:
    return {name: model.measured_mib for name, model in game.status().models.items() if model.measured_mib is not None}


def needs(game: InferenceEngine) -> dict[str, int | None]:
    """Return the needs that the placement works with."""
    return {name: model.need_mib for name, model in game.status().models.items()}


def residents(game: InferenceEngine) -> list[str]:
    return sorted(lane.resident for lane in game.status().lanes if lane.resident)


def rss_mib(game: InferenceEngine) -> list[int]:
    """Return the memory of the engines on the lanes, without their guardians."""
    pids = [lane.current.pid for lane in game.status().lanes]
    return [psutil.Process(pid).memory_info().rss // MIB for pid in pids if pid is not None]


async def test_measured_memory_on_the_cpu_corrects_the_estimate_from_files(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their files only one of two models fits at a time; they turn out to be small, and stay side by side."""
    for name in "ab":
        (tmp_path / f"{name}.gguf").symlink_to(tiny_model)
    known = model_memory(str(tmp_path / "a.gguf"))
    assert known is not None
    told = known.need_mib(CONTEXT)
    assert told is not None
    monkeypatch.setattr("workers.devices.discovery.open_nvml", lambda: None)  # a machine without a GPU
    monkeypatch.setattr("workers.lanes.lane_pool.LOOK_S", LOOK_S)
    monkeypatch.setattr("service.config.inventory.host_memory_mib", lambda: (told + 5) * 100 // 95)
    async with asyncio.timeout(LIMIT), engine(free_ports(4), count=2) as game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt=str(tmp_path / f"{name}.gguf"))
        assert needs(game) == {"a": told, "b": told}
        await say(game, "a")
        await wait_until(lambda: seen(game).keys() == {"a"}, "one is measured")
        assert residents(game) == ["a"]
        assert [seen(game)["a"]] == pytest.approx(rss_mib(game), abs=2)
        await say(game, "b")
        assert residents(game) == ["b"]  # its smaller use has not been seen yet
        await wait_until(lambda: seen(game).keys() == {"a", "b"}, "the other one is measured")
        await say(game, "a")
        assert residents(game) == ["a", "b"]
        assert needs(game) == seen(game)
        pool = game._pool
        assert [shown_lane(pool, lane).measured_mib for lane in pool.lanes] == [seen(game)] * 2


async def test_an_engines_gpu_memory_is_the_most_the_driver_has_shown(
    tmp_path: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maximum ever seen, of its own processes alone; if the driver shows none, the files' size counts."""
    machine = Machine(tmp_path / "machine", monkeypatch)
    async with asyncio.timeout(LIMIT), engine(free_ports(4), count=1) as game:
        pool = game._pool
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        for held, most in (
            ({}, {}),
            ({1: 5000}, {}),
            ({1: 5000, pid: 3000}, {"m": 3000}),
            ({1: 5000, pid: 2000}, {"m": 3000}),
            ({pid: 3500}, {"m": 3500}),
            ({}, {"m": 3500}),
        ):
            await machine.show(FIRST, 6000, held)
            assert pool.memory_use is not None
            await pool.memory_use.refresh(pool.lanes)
            assert seen(game) == most
        assert needs(game) == {"m": 3500}


def test_vllm_counts_with_the_part_that_it_is_given(tmp_path: Path) -> None:
    """Measurements do not matter: it fills that part with its cache."""
    use = MemoryUse(DeviceHealth(MachineReader(tmp_path / "nowhere")))
    use.most_mib["m"] = 70
    for told in (None, 40):
        assert use.need_mib(WorkerSpec(engine=EngineKind.VLLM, name="m", model="m", need_mib=told)) == told
        assert use.need_mib(WorkerSpec(engine=EngineKind.LLAMA_SERVER, name="m", model="m", need_mib=told)) == 70
        assert use.need_mib(WorkerSpec(engine=EngineKind.LLAMA_SERVER, name="n", model="n", need_mib=told)) == told

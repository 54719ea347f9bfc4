"""The GPUs of this machine, if any: the same checks as with invented ones. Skipped elsewhere."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from roundhouse.inference.event_log import INFER_DONE, replay
from service.config.load import load_config
from service.config.machine_plan import first_devices
from service.config.workers import worker_specs
from tests.conftest import ENGINE_PROGRAM
from tests.harness.agents import LIMIT, engine_for_agents, say
from workers.devices.device import check_devices
from workers.devices.device_health import DeviceHealth, check_view
from workers.devices.discovery import find_gpus, host_memory_mib
from workers.devices.layout import LayoutPolicy, devices_in, lanes_of
from workers.devices.nvml import open_nvml
from workers.devices.readers import MachineReader
from workers.engine.launch import command_for

pytestmark = pytest.mark.skipif(not find_gpus(), reason="this machine has no GPU")


def test_the_driver_of_this_machine_is_consistent() -> None:
    """NVML numbers its devices in order, and no more memory is used or reserved on each than it has."""
    gpus = find_gpus()
    check_devices(gpus)
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
    session = open_nvml()
    assert session is not None
    try:
        told, buses = session.memory(), session.buses()
    finally:
        session.close()
    assert set(buses.values()) <= {gpu.uuid for gpu in gpus}
    sizes = {gpu.uuid: gpu.memory_mib for gpu in gpus}
    sizes |= {each.uuid: each.memory_mib for gpu in gpus for each in gpu.mig or ()}
    assert {uuid: memory.total_mib for uuid, memory in told.items()} == {
        uuid: size for uuid, size in sizes.items() if size is not None
    }
    for memory in told.values():
        assert 0 <= memory.used_mib <= memory.total_mib
        assert sum((memory.held or {}).values()) <= memory.total_mib


def test_lanes_of_this_machine_fit_its_devices() -> None:
    """No device twice, shares within the memory, and a slice is what an engine would see."""
    for each in (1, 2, 4):
        lanes = lanes_of(find_gpus(), LayoutPolicy(max_agents_per_gpu=each, enable_mig=True), host_memory_mib())
        shares = Counter[str]()
        for lane in lanes:
            shares[lane.device.uuid] += lane.memory_mib or 0
            if lane.device.is_slice:
                check_view(lane.device)
        known = {lane.device.uuid: lane.device.memory_mib for lane in lanes if lane.device.memory_mib is not None}
        assert all(shares[uuid] <= memory_mib for uuid, memory_mib in known.items())


async def test_healthy_devices_are_not_marked() -> None:
    """They are read as a service reads them."""
    reader = MachineReader()
    health = DeviceHealth(reader)
    try:
        with anyio.fail_after(LIMIT):
            for _ in range(3):
                await health.refresh()
            for lane in lanes_of(find_gpus(), LayoutPolicy(enable_mig=True), host_memory_mib()):
                await health.wait_free(lane.device)
    finally:
        reader.close()
    assert health.marks == {}
    assert {gpu.uuid for gpu in find_gpus() if gpu.memory_mib is not None} <= health.memory.keys()


async def test_agents_are_spread_over_this_machine(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Distinct devices until all are used; each run reports its device."""
    count = len(lanes_of(find_gpus(), LayoutPolicy(max_agents_per_gpu=1), host_memory_mib()))
    log = tmp_path / "events.jsonl"
    first = free_ports(count)
    town = engine_for_agents(
        engine="llama-server",
        command=(sys.executable, "-I", "-S", str(ENGINE_PROGRAM)),
        max_agents_per_gpu=1,
        ports=(first, first + count - 1),
        event_log=log,
    )
    async with asyncio.timeout(LIMIT), town:
        for number in range(count):
            await town.register_agent(agent_id=f"a{number}", model_ckpt=f"m{number}")
        await asyncio.gather(*(say(town, f"a{number}") for number in range(count)))
    devices = {event["gpu"] for event in replay(log) if event["event"] == INFER_DONE}
    assert len(devices) == count


def test_replicas_stand_on_devices_of_their_own(tmp_path: Path) -> None:
    """As many as there are devices: each engine is shown another one."""
    count = len(devices_in(find_gpus()))
    path = tmp_path / "roundhouse.yaml"
    model = {"engine": "vllm", "model": "org/name", "command": ["/bin/true"], "replicas": count}
    path.write_text(json.dumps({"models": {"m": model}}))
    specs = first_devices(worker_specs(load_config(path), tmp_path, tmp_path))
    shown = [command_for(spec, {}).env["CUDA_VISIBLE_DEVICES"] for spec in specs]
    assert len(set(shown)) == count

"""Devices that fail, on real processes of the scripted engine: no engine starts there, and agents go on elsewhere."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import psutil
import pytest
from fastapi import FastAPI

from roundhouse import InferenceEngine
from roundhouse.inference.event_log import INFER_START, replay
from roundhouse.inference.failures import InferenceFailed, NoLane
from service.api.routes.workers import lanes_router, workers_router
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from tests.conftest import SpecFactory
from tests.harness.agents import engine as scripted_engine
from tests.harness.agents import say
from tests.harness.devices import FIRST, GPUS, SECOND, TOTAL_MIB, Machine
from tests.harness.waiting import LIMIT_S, wait_until
from workers.devices.device import DeviceMemory
from workers.devices.device_health import DeviceHealth
from workers.devices.layout import LayoutPolicy, devices_in, lanes_of
from workers.devices.readers import MachineReader
from workers.fleet import Fleet
from workers.health.incident import Incident, Incidents, WorkerSnapshot, incident_document
from workers.lanes.lane_spec import on_lane
from workers.policy.placement import Waiting
from workers.policy.restart import RestartPolicy
from workers.spec import WorkerSpec
from workers.states import WorkerState

LIMIT = 3 * LIMIT_S
XID = "the kernel has logged Xid 79 of it"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(RestartPolicy, "delay_s", lambda *_: 0.05)
    return Machine(tmp_path / "machine", monkeypatch)


def engine(first_port: int, **fields: Any) -> InferenceEngine:  # noqa: ANN401
    """Return an inference engine with a lane on each of the two GPUs."""
    return scripted_engine(first_port, count=1, ports=(first_port, first_port + 1), **fields)


def started_on(log: Path) -> list[str]:
    """Return the devices that runs have started on."""
    return [event["gpu"] for event in replay(log) if event["event"] == INFER_START]


def current(game: InferenceEngine, lane_id: str) -> WorkerSnapshot:
    """Return the worker whose engine is on a lane, as it is now."""
    return next(each.current for each in game.status().lanes if each.lane == lane_id)


def sick(game: InferenceEngine) -> list[str | None]:
    return [lane.sick for lane in game.status().lanes]


async def wait_marked(game: InferenceEngine, *uuids: str) -> None:
    await wait_until(lambda: game.status().sick.keys() == set(uuids), f"{uuids or 'none'} are left alone")


async def test_a_broken_engine_is_not_started_again_on_a_failed_device(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """An engine that works there goes on; when it breaks, its agent's next answer comes from the other device."""
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        machine.fail(FIRST, 79)
        await wait_marked(game, FIRST)
        await say(game, "a")
        psutil.Process(pid).kill()
        await wait_until(lambda: current(game, "lane-0").state is WorkerState.STOPPED, "its lane is empty")
        assert current(game, "lane-0").because == f"{FIRST} is left alone: {XID}"
        await say(game, "a")
        assert (machine.engines(FIRST), current(game, "lane-0").incarnation) == ([], 1)
        assert sick(game) == [f"{FIRST} is left alone: {XID}", None]
    assert started_on(log) == [FIRST, FIRST, SECOND]


async def test_a_run_whose_engine_breaks_with_its_device_goes_on_elsewhere(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Its caller waits a little longer."""
    log = tmp_path / "events.jsonl"
    game = engine(free_ports(2), event_log=log, args={"hold": r"HOLD=(\S+?)!"})
    async with asyncio.timeout(LIMIT), game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        run = asyncio.create_task(game.run("a", f"HOLD={tmp_path}/go!", step="act", max_tokens=9))
        await wait_until(lambda: started_on(log) == [FIRST], "it runs")
        machine.fail(FIRST, 79)
        await wait_marked(game, FIRST)
        (pid,) = machine.engines(FIRST)
        psutil.Process(pid).kill()
        await wait_until(lambda: started_on(log) == [FIRST, SECOND], "it runs elsewhere")
        (tmp_path / "go").touch()
        assert (await run).split() == ["word0", "word1", "word2"]
        assert (machine.engines(FIRST), current(game, "lane-0").incarnation) == ([], 1)


async def test_a_failed_device_gets_no_new_model(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Models that were placed there alternate on the other device."""
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        machine.fail(FIRST, 79)
        await wait_marked(game, FIRST)
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt=name, lane_hint=0)
        await asyncio.gather(say(game, "a"), say(game, "b"))
        assert [worker.incarnation for worker in game.status().lanes[0].workers] == [0, 0]
        assert machine.engines(FIRST) == []
        assert game.status().models["a"].has_room
    assert started_on(log) == [SECOND, SECOND]


async def test_an_xid_of_a_program_keeps_no_model_away(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A killed engine leaves one; the log is read to its end before the start."""
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        machine.fail(FIRST, 43)
        psutil.Process(pid).kill()
        await wait_until(lambda: current(game, "lane-0").incarnation == 2, "it is started again")
        await say(game, "a")
        assert sick(game) == [None, None]
    assert started_on(log) == [FIRST, FIRST]


async def test_with_all_devices_failed_a_run_waits_for_an_operator(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """With a deadline it gets the reason; without one it is answered by the resumed device, and by no other."""
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        machine.fail(FIRST, 79)
        await wait_marked(game, FIRST)
        machine.fail(SECOND, 48)
        await wait_marked(game, FIRST, SECOND)
        await game.register_agent(agent_id="a", model_ckpt="m")
        with pytest.raises(InferenceFailed) as failed:
            await say(game, "a", deadline_s=0.1)
        causes = f"lane-0: {FIRST} is left alone: {XID}; lane-1: {SECOND} is left alone: {XID.replace('79', '48')}"
        trouble = f"m has failed on every lane that could hold it: {causes}"
        assert str(failed.value) == f"agent 'a': deadline: no answer within 0.1 s; m: {trouble}"
        model = game.status().models["m"]
        assert (model.has_room, model.is_lost, model.trouble) == (False, False, trouble)
        run = asyncio.create_task(say(game, "a"))
        await wait_until(lambda: game.status().models["m"].waiting == 1, "it waits")
        await game.resume_lane(1)  # nothing but this wakes it
        assert (game.status().models["m"].has_room, sick(game)) == (True, [f"{FIRST} is left alone: {XID}", None])
        assert await run
        with pytest.raises(NoLane):
            await game.resume_lane(2)
        assert machine.engines(FIRST) == []
    assert started_on(log) == [SECOND]


async def test_a_start_on_a_lane_waits_while_memory_comes_back(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """An engine that starts too early finds no room, and fails because of its predecessor."""
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        machine.use(FIRST, 6000)
        psutil.Process(pid).kill()
        await wait_until(lambda: current(game, "lane-0").incarnation == 2, "it is to be started again")
        await machine.wait_looks(4)
        assert (current(game, "lane-0").state, machine.engines(FIRST)) == (WorkerState.STARTING, [])
        machine.use(FIRST, 300)
        await say(game, "a")
        assert (current(game, "lane-0").incarnation, sick(game)) == (2, [None, None])
    assert started_on(log) == [FIRST, FIRST]


async def test_a_device_whose_memory_was_missing_is_used_again_when_it_is_back(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the other device serves; no operator has to act."""
    monkeypatch.setattr("workers.devices.device.BACK_S", 0.1)
    log = tmp_path / "events.jsonl"
    async with asyncio.timeout(LIMIT), engine(free_ports(2), event_log=log) as game:
        for name in "ab":
            await game.register_agent(agent_id=name, model_ckpt=name, lane_hint=0)
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        machine.use(FIRST, 6000)
        psutil.Process(pid).kill()
        await wait_marked(game, FIRST)
        told = "5900 MiB of an engine that has ended have not come back, and no process has them"
        assert sick(game) == [f"{FIRST} is left alone: {told}", None]
        await say(game, "a")
        machine.use(FIRST, 100)
        await wait_marked(game)
        await say(game, "b")
    assert started_on(log) == [FIRST, SECOND, FIRST]


async def test_an_incident_names_its_model_its_device_and_its_memory(
    machine: Machine, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The memory is that of the last look; the record survives a restart."""
    async with asyncio.timeout(LIMIT), engine(free_ports(2), state_dir=tmp_path / "state") as game:
        await game.register_agent(agent_id="a", model_ckpt="m")
        await say(game, "a")
        (pid,) = machine.engines(FIRST)
        await machine.show(FIRST, 5000, {pid: 4900})
        psutil.Process(pid).kill()
        (worker,) = [worker for worker in game._pool if worker.spec.id == "lane-0"]
        await wait_until(lambda: list(worker.recorder.incidents), "an incident is kept")
        (incident,) = worker.recorder.incidents
    memory = DeviceMemory(total_mib=TOTAL_MIB, used_mib=5000, held={pid: 4900})
    assert about(incident) == ("m", FIRST, memory)
    told = incident_document(incident)
    assert (told["model"], told["device"]) == ("m", FIRST)
    assert told["device_memory"] == {"total_mib": TOTAL_MIB, "used_mib": 5000, "held": {pid: 4900}}
    (file,) = (tmp_path / "state").rglob("*incidents*/*")
    (read,) = Incidents(file)
    assert about(read) == about(incident)


async def test_an_incident_of_an_engine_on_no_lane_names_its_fullest_device(
    machine: Machine, tmp_path: Path, scripted_spec: SpecFactory
) -> None:
    """Among the devices that its engine computes on."""
    spec = replace(scripted_spec(), state_dir=tmp_path / "state", devices=tuple(devices_in(GPUS)))
    fleet = Fleet([spec], os.environ, health=DeviceHealth(MachineReader(machine.log)))
    with anyio.fail_after(LIMIT):
        async with fleet.running():
            (worker,) = fleet
            await wait_until(lambda: worker.now.state is WorkerState.READY, "it is ready")
            await machine.show(SECOND, 7000)
            assert worker.supervisor.root_pid is not None
            psutil.Process(worker.supervisor.root_pid).kill()
            await wait_until(lambda: list(worker.recorder.incidents), "an incident is kept")
            (incident,) = worker.recorder.incidents
    assert incident.device == SECOND
    assert incident.device_memory is not None
    assert incident.device_memory.used_mib == 7000


def about(incident: Incident) -> tuple[str | None, str | None, DeviceMemory | None]:
    return incident.model, incident.device, incident.device_memory


def specs_on(make: SpecFactory, first_port: int) -> Sequence[WorkerSpec]:
    """Return the workers of a model, one for each of the two GPUs."""
    lanes = lanes_of(GPUS, LayoutPolicy(max_agents_per_gpu=1, ports=(first_port, first_port + 1)), 0)
    return [on_lane(make(), lane, None) for lane in lanes]


async def test_an_operator_resumes_a_lane_of_a_failed_device(
    machine: Machine, free_ports: Callable[[int], int], scripted_spec: SpecFactory
) -> None:
    """Over HTTP: the lane shows why it is not used, and the resume starts its engine again."""
    health = DeviceHealth(MachineReader(machine.log))
    fleet = Fleet(specs_on(scripted_spec, free_ports(2)), os.environ, health=health)
    app = FastAPI()
    app.include_router(workers_router(fleet, lambda: SchedulingCore(POLICIES["fifo"]).view))
    app.include_router(lanes_router(fleet.lane_pool))
    transport = httpx.ASGITransport(app)
    with anyio.fail_after(LIMIT):
        async with fleet.running(), httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            fleet.lane_pool.note_waiting({"scripted": Waiting(count=1, first=(1,))})
            (worker, _) = fleet.lane_pool
            await wait_until(lambda: worker.now.state is WorkerState.READY, "its model is loaded")
            fleet.lane_pool.note_waiting({})
            machine.fail(FIRST, 79)
            await wait_until(lambda: health.marks.keys() == {FIRST}, f"{FIRST} is left alone")
            (pid,) = machine.engines(FIRST)
            psutil.Process(pid).kill()
            await wait_until(lambda: worker.now.state is WorkerState.STOPPED, "its lane is empty")
            lanes = (await http.get("/v1/lanes")).json()["lanes"]
            assert [(lane["device"], lane["sick"]) for lane in lanes] == [
                (FIRST, f"{FIRST} is left alone: {XID}"),
                (SECOND, None),
            ]
            assert lanes[1]["device_memory"] == {"total_mib": TOTAL_MIB, "used_mib": 100}
            (incident,) = (await http.get("/v1/workers/lane-0/incidents")).json()["incidents"]
            assert (incident["model"], incident["device"]) == ("scripted", FIRST)
            assert incident["device_memory"] == {"total_mib": TOTAL_MIB, "used_mib": 100, "held": None}
            (await http.post("/v1/workers/lane-0/resume")).raise_for_status()
            await wait_until(lambda: worker.now.state is WorkerState.READY, "its engine is there again")
            lanes = (await http.get("/v1/lanes")).json()["lanes"]
            assert [lane["sick"] for lane in lanes] == [None, None]
            assert len(machine.engines(FIRST)) == 1
            fleet.lane_pool.close()
            await fleet.stop("the test is over")

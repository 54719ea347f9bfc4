"""A weight update in which one engine fails, in every phase and with every way of delivery."""

import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NotRequired, TypedDict

import anyio
import pytest

from tests.faults.test_worker import ask
from tests.harness.ports import find_ports
from tests.harness.programs import PROGRAMS
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK
from workers import EngineKind, WorkerSpec, WorkerTimeouts
from workers.devices.layout import LayoutPolicy, lanes_of
from workers.errors import GroupMissing, NoWorkerReady, UpdateRunning, VersionNotNewer
from workers.fleet import Fleet
from workers.lanes.lane_spec import on_lane
from workers.policy.placement import Waiting
from workers.policy.weight_update import DOING, UpdateState
from workers.policy.weights import Backend, UpdatePhase, WeightsPolicy
from workers.spec import WorkerId
from workers.states import WorkerState
from workers.weights.group import GroupRequest, GroupState
from workers.weights.model_weights import ModelWeights
from workers.weights.update import Tensor, UpdateRequest, WeightUpdate, WorkerProgress

PROGRAM = PROGRAMS / "vllm_engine.py"
PHASE_S = 1.0
POOLS = {"pending": 5, "ready": 3, "in_flight": 2, "capacity": 2}
PHASES = ("pause", "start", "receive", "finish", "resume", "keep", "wait", "init")


def limits_of(late: str | None = None) -> WeightsPolicy:
    """Return limits in which only the phase that will be late has a short one: a busy machine keeps the others."""
    return WeightsPolicy(**{f"{phase}_s": PHASE_S if phase == late else LIMIT_S for phase in PHASES})  # type: ignore[arg-type]


class Fault(TypedDict):
    """An engine's behaviour in a phase: see the program."""

    port: int
    phase: str
    do: str
    pid: NotRequired[int]  # the next engine of that port does it no more


class Two:
    """Two workers of one model, and the file that makes one of them misbehave."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        self.good, self.bad = fleet
        self.fault = folder / "fault"

    @property
    def weights(self) -> ModelWeights:
        return self.fleet.weights["m"]

    def misbehave(self, phase: str, do: str, *, both: bool = False) -> None:
        self.fail(Fault(port=0 if both else self.bad.spec.port, phase=phase, do=do))

    def fail(self, *faults: "Fault") -> None:
        half = self.fault.with_suffix(".half")
        half.write_text(json.dumps(faults))
        half.replace(self.fault)

    def request(self, name: str, **fields: object) -> UpdateRequest:
        return UpdateRequest(checkpoint=str(self.folder / name), **fields)  # type: ignore[arg-type]

    async def join(self) -> None:
        backend = self.good.spec.weights.backend
        group = await self.weights.init(GroupRequest(backend=backend, address="127.0.0.1", port=1, timeout_s=5))
        assert (group.world_size, [each.first_rank for each in group.members.values()]) == (3, [1, 2])
        await wait_until(lambda: group.state is GroupState.READY, "all have joined")

    async def back(self, expected: str) -> None:
        """Return when both take traffic again, with the weights of this name, or with the sent ones saved under it."""
        await wait_until(lambda: all(each.now.state is WorkerState.READY for each in self.fleet), "both are ready")
        for worker in self.fleet:
            assert (await ask(worker))[1] in ({"w", expected} if expected.startswith("version") else {expected})
            assert worker.weights is not None
            assert worker.weights.version == self.weights.current.version


@asynccontextmanager
async def two(
    tmp_path: Path, backend: Backend = Backend.GLOO, limits: WeightsPolicy | None = None, **changes: object
) -> AsyncIterator[Two]:
    port = find_ports(2)
    for name in ("launched", "one", "two"):
        _write_checkpoint(tmp_path / name)
    spec = WorkerSpec(
        engine=EngineKind.VLLM,
        id=WorkerId("m-0"),
        name="m",
        model=str(tmp_path / "launched"),
        port=port,
        command=(sys.executable, "-I", "-S", str(PROGRAM)),
        args={"fault-file": str(tmp_path / "fault")},
        timeouts=WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
        restart=QUICK,
        weights=replace(limits or limits_of(), backend=backend),
        **changes,  # type: ignore[arg-type]
    )
    specs = [spec, replace(spec, id=WorkerId("m-1"), port=port + 1)]
    fleet = Fleet(specs, os.environ, tmp_path / "state", count_pools=lambda: POOLS)
    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            await fleet.wait_ready()
            yield Two(fleet, tmp_path)


async def test_an_update_of_a_model_that_is_not_loaded_is_kept_and_applied_at_its_load(tmp_path: Path) -> None:
    """The engine of a lane takes no turn before it has the weights that the model got while it was unloaded."""
    for name in ("launched", "one"):
        _write_checkpoint(tmp_path / name)
    port = find_ports(1)
    (lane,) = lanes_of([], LayoutPolicy(max_agents_per_gpu=1, ports=(port, port)), host_memory_mib=1000)
    spec = WorkerSpec(
        engine=EngineKind.VLLM,
        name="m",
        model=str(tmp_path / "launched"),
        command=(sys.executable, "-I", "-S", str(PROGRAM)),
        args={"fault-file": str(tmp_path / "fault")},
        restart=QUICK,
        weights=limits_of(),
    )
    fleet = Fleet([on_lane(spec, lane, None)], os.environ, tmp_path / "state")
    weights = fleet.weights["m"]
    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            update = await weights.update(UpdateRequest(checkpoint=str(tmp_path / "one")))
            assert (update.state, weights.current.version, list(update.shares)) == (UpdateState.COMPLETED, 1, [])
            with pytest.raises(VersionNotNewer):
                await weights.update(UpdateRequest(checkpoint=str(tmp_path / "one"), version=1))
            fleet.lane_pool.note_waiting({"m": Waiting(count=1, first=(1,))})
            (worker,) = fleet
            await wait_until(lambda: worker.now.state is WorkerState.READY, "it is loaded")
            assert (await ask(worker))[1] == "one"
            assert worker.weights is not None
            assert worker.weights.version == 1


def _write_checkpoint(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)


def tensors(name: str) -> UpdateRequest:
    return UpdateRequest(tensors=(Tensor(name=name, dtype="float32", shape=(1,)),))


async def is_over(weights: ModelWeights) -> None:
    await wait_until(lambda: weights.running is None, "the update is over")


async def fail_in(workers: Two, request: UpdateRequest, phase: str, do: str) -> WeightUpdate:
    """Run an update in which the bad worker fails a phase; return the update at its end, without the fault."""
    weights = workers.weights
    before = len(weights.updates)
    pid = workers.bad.snapshot().pid
    assert pid is not None
    fault = Fault(port=workers.bad.spec.port, phase=phase, do="fail" if do == "fail" else "stall", pid=pid)
    workers.fail(fault)
    doing = DOING[UpdatePhase(phase)]

    def share() -> WorkerProgress:
        return weights.updates[-1].shares[workers.bad.spec.id]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(weights.update, request)
        await wait_until(lambda: len(weights.updates) > before, "it is under way, or has failed at once")
        if do == "kill":
            await wait_until(lambda: share().stage == doing, "the phase is reached")
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: share().error, "it has failed")
        workers.fault.unlink()
        await is_over(weights)
    assert f"m-1: {phase}" in (weights.updates[-1].error or "")
    return weights.updates[-1]


@pytest.mark.parametrize("do", ["kill", "stall", "fail"])
@pytest.mark.parametrize("phase", ["pause", "receive", "finish", "resume"])
async def test_the_others_go_on_if_a_worker_fails_a_phase_of_a_checkpoint(tmp_path: Path, phase: str, do: str) -> None:
    """They have the new version; the failed one is named, and gets that version before it takes traffic."""
    async with two(tmp_path, limits=limits_of(phase if do == "stall" else None)) as workers:
        began_at = time.monotonic()
        update = await fail_in(workers, workers.request("one"), phase, do)
        assert time.monotonic() - began_at < PHASE_S + 5
        assert (update.state, update.version, workers.weights.current.version) == (UpdateState.PARTIAL, 1, 1)
        assert "m-0" not in (update.error or "")
        assert (await ask(workers.good))[1] == "one"
        await workers.back("one")
        assert workers.good.now.incarnation == 1
        assert workers.bad.now.incarnation > 1


@pytest.mark.parametrize("phase", ["pause", "start", "receive", "finish"])
async def test_the_others_go_on_if_a_worker_is_killed_in_a_broadcast(tmp_path: Path, phase: str) -> None:
    """Workers that have received everything use the new version; if nothing was sent yet, nothing has changed."""
    async with two(tmp_path) as workers:
        await workers.join()
        update = await fail_in(workers, tensors("w"), phase, "kill")
        is_begun = phase not in {"pause", "start"}
        assert (update.state, "receive" in update.phase_s) == (
            (UpdateState.PARTIAL, True) if is_begun else (UpdateState.FAILED, False)
        )
        await workers.back("version-1" if is_begun else "launched")
        assert workers.good.now.incarnation == 1
        with pytest.raises(GroupMissing):  # a group is whole, or has to be made again
            await workers.weights.update(tensors("w"))


async def test_a_broadcast_that_runs_out_of_time_leaves_an_incident(tmp_path: Path) -> None:
    """Its engine keeps the old weights; the incident lists the requests that waited meanwhile."""
    async with two(tmp_path, limits=limits_of("receive")) as workers:
        await workers.join()
        workers.misbehave("receive", "stall", both=True)
        update = await workers.weights.update(tensors("w"))
        await is_over(workers.weights)
        assert update.state is UpdateState.FAILED
        workers.fault.unlink()
        await workers.back("launched")
        assert [worker.now.incarnation for worker in workers.fleet] == [1, 1]
        incidents = [incident for worker in workers.fleet for incident in worker.recorder.incidents]
        assert incidents, "whoever was given up after it has none"
        for incident in incidents:
            assert (incident.reason, incident.exit, incident.pools) == ("weights_timeout", None, POOLS)
            assert incident.because == "weights 1: receive: not within 1 s"


@pytest.mark.parametrize("backend", list(Backend))
async def test_a_broadcast_reaches_all(tmp_path: Path, backend: Backend) -> None:
    """Both ways of broadcasting, through all phases."""
    async with two(tmp_path, backend) as workers:
        await workers.join()
        update = await workers.weights.update(tensors("w"))
        await is_over(workers.weights)
        assert (update.state, update.error) == (UpdateState.COMPLETED, None)
        await workers.back("w")
        assert [share.stage for share in update.shares.values()] == ["serving", "serving"]


@pytest.mark.parametrize("phase", ["start", "receive", "finish"])
async def test_an_engine_whose_own_transfer_fails_is_killed(tmp_path: Path, phase: str) -> None:
    """VLLM's transfer writes straight into the weights: half-changed weights are loaded again."""
    async with two(tmp_path, Backend.NCCL) as workers:
        await workers.join()
        update = await fail_in(workers, tensors("w"), phase, "fail")
        await wait_until(lambda: workers.bad.now.incarnation == 2, "it is started again")
        if update.state is UpdateState.FAILED:
            await workers.back("launched")
        else:  # the sent weights were not kept: it waits for the next update
            await wait_until(lambda: workers.bad.now.state is WorkerState.DRAINING, "it answers")
            assert "no copy of them was kept" in workers.weights.catch_up.waits_for(workers.bad)
            assert (await workers.weights.update(workers.request("two"))).version == 2
            await workers.back("two")


async def test_updates_come_one_at_a_time_and_versions_only_rise(tmp_path: Path) -> None:
    """The error distinguishes an update in the way from an impossible one."""
    async with two(tmp_path) as workers:
        weights = workers.weights
        update = await weights.update(workers.request("one", version=7))
        with pytest.raises(UpdateRunning):
            await weights.update(workers.request("two"))
        with pytest.raises(UpdateRunning):
            await workers.join()
        await is_over(weights)
        assert (update.state, weights.current.version) == (UpdateState.COMPLETED, 7)
        await workers.back("one")
        with pytest.raises(VersionNotNewer):
            await weights.update(workers.request("two", version=7))
        with pytest.raises(GroupMissing):
            await weights.update(tensors("w"))
        assert (await weights.update(workers.request("two"))).version == 8
        await is_over(weights)
        await workers.back("two")
        for worker in workers.fleet:
            await worker.end_engine("a test")
        with pytest.raises(NoWorkerReady):
            await weights.update(workers.request("one"))


async def test_a_group_that_does_not_form_names_the_missing_member(tmp_path: Path) -> None:
    """Within its limit; the engines go on, and the next group starts from scratch."""
    async with two(tmp_path) as workers:
        workers.misbehave("join", "wait")
        request = GroupRequest(backend=Backend.GLOO, address="127.0.0.1", port=1, timeout_s=1.0)
        group = await workers.weights.init(request)
        await wait_until(lambda: group.state is GroupState.BROKEN, "it is given up", 3.0)
        assert group.error == "not joined within 1 s: m-1, or the trainer"
        with pytest.raises(GroupMissing, match="m-1"):
            await workers.weights.update(tensors("w"))
        workers.fault.unlink()
        await workers.back("launched")
        await workers.join()
        await workers.weights.update(tensors("w"))
        await is_over(workers.weights)
        await workers.back("w")
        assert [worker.now.incarnation for worker in workers.fleet] == [1, 1]


@pytest.mark.system
async def test_engines_wait_for_weights_that_cannot_be_saved(tmp_path: Path) -> None:
    """Turns go on; an engine that starts later takes no traffic before the trainer's next update, and says so."""
    async with two(tmp_path, limits=limits_of("keep")) as workers:
        weights = workers.weights
        await workers.join()
        workers.misbehave("keep", "wait", both=True)
        await weights.update(tensors("w"))
        await is_over(weights)
        assert weights.catch_up.is_keeping
        await weights.catch_up.wait_kept()
        assert (weights.current.version, weights.current.checkpoint) == (1, None)
        workers.fault.unlink()
        await workers.back("w")
        workers.bad.restart_nowait("a test")
        await wait_until(lambda: workers.bad.now.incarnation == 2 and workers.bad.now.is_serving, "another answers")
        assert workers.bad.now.state is WorkerState.DRAINING
        assert "no copy of them was kept" in weights.catch_up.waits_for(workers.bad)
        assert (await ask(workers.good))[1] == "w"
        await workers.join()
        await weights.update(tensors("w"))
        await wait_until(lambda: weights.current.checkpoint, "it is kept")
        assert weights.current.version == 2
        await workers.back("w")


async def test_engines_without_control_endpoints_keep_their_weights(tmp_path: Path) -> None:
    """An older vLLM, or one started without them: the update reports it, and no engine is killed."""
    async with two(tmp_path) as workers:
        workers.misbehave("pause", "absent", both=True)
        update = await workers.weights.update(workers.request("one"))
        await is_over(workers.weights)
        assert update.state is UpdateState.FAILED
        assert "m-0: pause: " in (update.error or "")
        assert "404" in (update.error or "")
        await workers.back("launched")
        assert [worker.now.incarnation for worker in workers.fleet] == [1, 1]


async def test_an_engine_that_was_starting_gets_the_version(tmp_path: Path) -> None:
    """It began before the update and is not part of it: it takes no traffic with the weights it was started with."""
    async with two(tmp_path) as workers:
        workers.misbehave("begin", "stall")
        pid = workers.bad.snapshot().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: workers.bad.now.incarnation == 2 and workers.bad.snapshot().pid, "another begins")
        update = await workers.weights.update(workers.request("one"))
        await is_over(workers.weights)
        assert (update.state, list(update.shares)) == (UpdateState.COMPLETED, ["m-0"])
        workers.fault.unlink()
        await workers.back("one")
        assert workers.bad.now.incarnation == 2


async def test_a_drain_survives_an_update(tmp_path: Path) -> None:
    """An update includes drained workers too, and leaves them drained."""
    async with two(tmp_path) as workers:
        workers.bad.drain_nowait("a test")
        assert (await workers.weights.update(workers.request("one"))).version == 1
        await is_over(workers.weights)
        assert (workers.good.now.state, workers.bad.now.state) == (WorkerState.READY, WorkerState.DRAINING)
        workers.bad.resume_nowait("a test")
        await workers.back("one")

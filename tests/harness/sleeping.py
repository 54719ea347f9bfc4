"""Models that sleep on lanes: scripted vLLMs, their requests, and lanes of workers for them."""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from tests.faults.test_worker import ask
from tests.harness.ports import find_ports
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document
from tests.harness.waiting import LIMIT_S, wait_until
from tests.harness.working import QUICK
from workers import EngineKind, WorkerSpec, WorkerTimeouts
from workers.devices.device import Gpu
from workers.devices.device_health import DeviceHealth
from workers.devices.layout import LayoutPolicy
from workers.devices.layout import lanes_of as lay_out
from workers.fleet import Fleet
from workers.lanes.lane_spec import on_lane
from workers.policy.placement import Waiting
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

COMMAND = (sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py"))


SLEEP, WAKE, BEGIN, END = "/sleep?level=1", "/wake_up", "begin", "SIGTERM"


SWAPS = {SLEEP, WAKE, BEGIN, END}


Asked = list[tuple[str, str]]  # each is a model and the request to its engine


class Told:
    """The requests to scripted engines in order, and the files that make them misbehave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "asked.jsonl"

    def args(self, model: str, **flags: object) -> Document:
        return {"record": str(self.file), "fault-file": str(self.folder / f"{model}.fault"), **flags}

    def checkpoint(self, name: str) -> Path:
        """Return the folder of a checkpoint of one MiB, by its files."""
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        folder = self.folder / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
        return folder

    def misbehave(self, model: str, phase: str, do: str) -> None:
        half = self.folder / f"{model}.half"
        half.write_text(json.dumps([{"port": 0, "phase": phase, "do": do}]))
        half.replace(self.folder / f"{model}.fault")

    def behave(self, model: str) -> None:
        (self.folder / f"{model}.fault").unlink()

    def all(self, *models: str) -> list[Document]:
        lines = map(json.loads, self.file.read_text().splitlines()) if self.file.exists() else ()
        return [line for line in lines if line["model"] in models or not models]

    def swaps(self, *models: str) -> Asked:
        """Return the starts, sleeps, wakes and ends of engines."""
        return [(line["model"], line["asked"]) for line in self.all(*models) if line["asked"] in SWAPS]

    def pids(self, model: str) -> list[int]:
        """Return the processes that were a model's engine, in order."""
        return list(dict.fromkeys(line["pid"] for line in self.all(model)))

    def check_sleepers(self, *models: str) -> None:
        """Check that no engine got a request while it slept except to wake."""
        assert {line["asked"] for line in self.all(*models) if line["asleep"]} <= {WAKE, END}


class Lanes(Told):
    """A fleet with models on lanes, and turns that want them."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        super().__init__(folder)
        self.fleet = fleet
        self.lane, *_ = self.all_lanes = list(fleet.lanes)
        self.workers = self.lane.workers
        self._turns = 0

    def note(self, model: str) -> None:
        """Make a turn wait for a model."""
        self._turns += 1
        self.fleet.lane_pool.note_waiting({model: Waiting(count=1, first=(self._turns,))})

    async def want(self, model: str) -> SupervisedWorker:
        """Return a model's worker once a turn that waits for it could start."""
        self.note(model)

        def ready() -> list[SupervisedWorker]:
            workers = [lane.workers[model] for lane in self.all_lanes]
            return [worker for worker in workers if worker.now.state is WorkerState.READY]

        await wait_until(ready, f"{model} takes turns")
        self.fleet.lane_pool.note_waiting({})
        return ready()[0]

    async def say(self, model: str) -> str:
        return (await ask(await self.want(model)))[1]

    async def wait_asked(self, model: str, asked: str) -> None:
        await wait_until(lambda: (self.swaps(model) or [("", "")])[-1] == (model, asked), f"{model} is asked: {asked}")

    async def wait_asleep(self, model: str) -> None:
        worker = self.workers[model]
        await wait_until(lambda: worker.now.holds == {Hold.ASLEEP}, f"{model} sleeps")


@asynccontextmanager
async def lanes(
    tmp_path: Path,
    models: str = "ab",
    *,
    count: int = 1,
    gpu: Gpu | None = None,
    health: DeviceHealth | None = None,
    listens: bool = True,
    **changes: object,
) -> AsyncIterator[Lanes]:
    """Run models on the lanes of one device; ``listens`` says whether on sockets."""
    told = Told(tmp_path)
    port = find_ports(count)
    policy = LayoutPolicy(max_agents_per_gpu=count, ports=(port, port + count - 1))
    specs = [
        WorkerSpec(
            engine=EngineKind.VLLM,
            name=name,
            model=str(told.checkpoint(f"weights-{name}")),
            command=COMMAND,
            timeouts=WorkerTimeouts(start_s=LIMIT_S, stop_grace_s=LIMIT_S),
            **{"args": told.args(name, **{"enable-sleep-mode": True}), "restart": QUICK, **changes},  # type: ignore[arg-type]
        )
        for name in models
    ]
    on_lanes = [
        on_lane(spec, lane, tmp_path / f"{lane.id}{spec.name}.sock" if listens else None)
        for lane in lay_out([gpu] if gpu is not None else [], policy, host_memory_mib=1000)
        for spec in specs
    ]
    fleet = Fleet(on_lanes, os.environ, tmp_path / "state", health=health)
    with anyio.fail_after(3 * LIMIT_S):
        async with fleet.running():
            yield Lanes(tmp_path, fleet)

"""The measured memory of engines on lanes: it corrects the estimate from their files."""

from collections.abc import Iterable
from typing import Final

import anyio.to_thread

from workers.devices.device_health import DeviceHealth
from workers.health.probes import KernelView, look_at_tree
from workers.lanes.lane_workers import LaneWorkers
from workers.spec import EngineKind, WorkerSpec
from workers.states import WorkerState

MIB: Final = 1024 * 1024


class MemoryUse:
    """The largest measured use of each model's engines, in MiB; written by ``refresh``."""

    def __init__(self, health: DeviceHealth) -> None:
        self._health = health
        self.most_mib: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<MemoryUse {self.most_mib}>"

    def need_mib(self, spec: WorkerSpec) -> int | None:
        """Return a model's memory on a device: as measured, else by its files; None if neither is known.

        vLLM takes the part of the device that it is given, whatever the model. A configured need is the minimum.
        """
        if spec.engine is EngineKind.VLLM:
            return spec.need_mib
        if spec.memory_mib is not None:
            return max(spec.memory_mib, self.most_mib.get(spec.name, 0))
        return self.most_mib.get(spec.name, spec.need_mib)

    async def refresh(self, lanes: Iterable[LaneWorkers]) -> None:
        """Measure every ready engine once."""
        for lane in lanes:
            worker = lane.current
            root = worker.supervisor.root_pid
            if worker.now.state is WorkerState.READY and root is not None:
                seen = self._taken(lane, await anyio.to_thread.run_sync(look_at_tree, root))
                if seen is not None:
                    self.most_mib[worker.spec.name] = max(seen, self.most_mib.get(worker.spec.name, 0))

    def _taken(self, lane: LaneWorkers, tree: KernelView) -> int | None:
        """Return the memory of a process tree; None if the driver shows none of it, as in a container."""
        if lane.lane.device.is_cpu:
            return sum(process.rss_bytes for process in tree.processes) // MIB or None
        memory = self._health.memory.get(lane.lane.device.uuid)
        held = (memory.held if memory is not None else None) or {}
        return sum(held.get(process.pid, 0) for process in tree.processes) or None

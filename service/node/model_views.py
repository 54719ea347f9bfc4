"""The models of a node for the dashboard: engine, file, slots, and the memory of their engines."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import anyio.to_thread
import msgspec

from service.config.model import ModelConfig
from service.node.node import Node
from workers.devices.device import DeviceMemory
from workers.health.probes import KernelView, look_at_tree
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

MIB: Final = 1024 * 1024


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a model; memory is in MiB, None if unknown."""

    worker: str
    state: WorkerState
    because: str
    slots: int
    in_use: int
    host_mib: int | None
    device_mib: int | None


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """A model; ``file`` is the file that its engine loads, or its server's URL. Without an engine it is not loaded."""

    name: str
    engine: str
    file: str
    context: int | None
    slots: int
    replicas: int
    on_lanes: bool
    is_ours: bool
    engines: Sequence[EngineView]


class _NotConfigured(NamedTuple):
    """The settings of a model that the configuration has no more, while its workers leave."""

    engine: str = ""
    model: str | None = None
    context: int | None = None
    slots: int = 0
    replicas: int = 0


async def look_at_models(node: Node) -> list[ModelView]:
    """Return the models with the processes of their engines."""
    workers = [worker for worker in node.fleet if worker.supervisor.root_pid is not None]
    roots = {str(worker.spec.id): worker.supervisor.root_pid for worker in workers}
    trees = await anyio.to_thread.run_sync(_look, roots)
    return [_view(node, model, trees) for model in node.fleet.models()]


def _look(roots: Mapping[str, int | None]) -> dict[str, KernelView]:
    return {worker: look_at_tree(root) for worker, root in roots.items() if root is not None}


def _view(node: Node, model: str, trees: Mapping[str, KernelView]) -> ModelView:
    config: ModelConfig | _NotConfigured = node.live.config.models.get(model) or _NotConfigured()
    workers = node.fleet.workers_of(model)
    on_lanes = model in node.fleet.lanes.models
    loads = next((worker.spec.url or worker.spec.model for worker in workers), None)
    health = node.fleet.lanes.health
    memory = {} if health is None else health.memory
    is_ours = all(worker.owns_engine for worker in workers)
    return ModelView(
        name=model,
        engine=config.engine,
        file=loads or config.model or "",
        context=config.context if is_ours else None,
        slots=config.slots,
        replicas=len(workers) if on_lanes else config.replicas or len(workers),
        on_lanes=on_lanes,
        is_ours=is_ours,
        engines=[_engine(worker, trees.get(worker.spec.id), memory) for worker in workers],
    )


def _engine(worker: SupervisedWorker, tree: KernelView | None, memory: Mapping[str, DeviceMemory]) -> EngineView:
    pids = [process.pid for process in tree.processes] if tree is not None else []
    held = [seen.held for seen in memory.values() if seen.held is not None]
    on_devices = sum(part.get(pid, 0) for part in held for pid in pids)
    host = sum(process.rss_bytes for process in tree.processes) // MIB if tree is not None else 0
    return EngineView(
        worker=worker.spec.id,
        state=worker.now.state,
        because=worker.supervisor.because,
        slots=worker.slots.total,
        in_use=worker.slots.in_use,
        host_mib=host or None,
        device_mib=on_devices or None,
    )

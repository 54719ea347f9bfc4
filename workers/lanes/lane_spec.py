"""From a model and a lane to the worker that may run it there, and the device memory that it needs. Pure.

Source: vLLM's documentation of ``--gpu-memory-utilization``, a part of a device's total memory for one instance;
NVIDIA, "Multi-Instance GPU User Guide", for a process's view of a slice: one device, and its memory. NVML gives vLLM
the parent's memory, from which it would choose its batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from workers.devices.layout import Lane
from workers.engine.launch.flags import named
from workers.files.model_memory import model_memory
from workers.lanes.memory_flags import Estimate, estimate_of
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec

SLICE_BATCH: Final = 2048  # in tokens: vLLM's own choice would be for the whole GPU


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """MiB: ``least`` is the model's minimum, ``taken`` its engine's use; None is a whole lane's part."""

    least: int
    taken: int | None
    tokens: int  # tokens of context that both are for


def memory_need(spec: WorkerSpec, environment: Mapping[str, str], *, is_on_cpu: bool) -> MemoryNeed | None:
    """Return the memory need of a model: as configured, else by its files; None if neither gives it.

    ``environment`` is the service's, whose variables llama.cpp reads; ``is_on_cpu`` says whether the lanes are on the
    CPU.
    """
    # vLLM fills its part of the device, and needs at least one request's context.
    is_filling = spec.engine is EngineKind.VLLM
    tokens = spec.context if is_filling else spec.cache_tokens
    if spec.memory_mib is not None:
        return MemoryNeed(least=spec.memory_mib, taken=None if is_filling else spec.memory_mib, tokens=tokens)
    known = model_memory(spec.model) if spec.model else None
    worth = estimate_of(spec, environment, layers=known.layers if known else None, is_on_cpu=is_on_cpu)
    if known is None or worth is Estimate.WORTHLESS:
        return None
    need = known.need_mib(tokens)
    is_taken = not is_filling and worth is Estimate.RIGHT
    return MemoryNeed(least=need or known.weights_mib, taken=need if is_taken else None, tokens=tokens)


def most_room(lanes: Iterable[Lane]) -> int | None:
    """Return the MiB of the device with the most room; None if one reports none, since it may have any."""
    rooms = [lane.device.room_mib for lane in lanes]
    known = [room for room in rooms if room is not None]
    return max(known) if len(known) == len(rooms) else None


def on_lane(spec: WorkerSpec, lane: Lane, socket: Path | None) -> WorkerSpec:
    """Return the specification of a model's worker on a lane: its device, its part of the memory, its port."""
    return replace(
        spec,
        id=WorkerId(lane.id),
        port=lane.port,
        socket=socket,
        env={**spec.env, **lane.device.visible},
        args={**_flags(spec, lane), **spec.args},
        lane=lane,
    )


def _flags(spec: WorkerSpec, lane: Lane) -> Mapping[str, Flag]:
    """Return vLLM's flags for its part of a device, unless the configuration gives them."""
    device, given = lane.device, named(spec.args)
    if spec.engine is not EngineKind.VLLM or device.is_cpu:
        return {}
    flags: dict[str, Flag] = {}
    part = lane.percent
    if lane.memory_mib is not None and device.memory_mib is not None:
        part = lane.memory_mib * 100 // device.memory_mib
    flags["gpu_memory_utilization"] = part / 100
    if device.is_slice:  # the slots give it the number of concurrent requests
        flags["max_num_batched_tokens"] = max(SLICE_BATCH, spec.slots)
    return {name: value for name, value in flags.items() if name.replace("_", "-") not in given}

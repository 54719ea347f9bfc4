"""From a model and a lane to the worker that may run it there, and the memory that it needs of the device. Pure.

Source: vLLM's documentation of ``--gpu-memory-utilization``, a part of a device's total memory for one instance;
NVIDIA, "Multi-Instance GPU User Guide", for what a process sees of a slice: one device, and its memory. NVML tells vLLM
the parent's, by which it would choose its batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from workers.devices.layout import Lane
from workers.engine.launch.flags import named
from workers.files.model_memory import model_memory
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec

SLICE_BATCH: Final = 2048  # tokens: what vLLM chooses by itself would be for the whole GPU


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """MiB: ``least`` is what the model cannot do without, ``taken`` what its engine takes, None a whole lane's part."""

    least: int
    taken: int | None
    tokens: int  # of context that both are for


def memory_need(spec: WorkerSpec) -> MemoryNeed | None:
    """Read a model's memory need from the headers of its files; None if no file tells it."""
    known = model_memory(spec.model) if spec.model else None
    if known is None:
        return None
    # vLLM fills the part of the device that it is given, and wants one request's context at least.
    is_filling = spec.engine is EngineKind.VLLM
    tokens = spec.context if is_filling else spec.cache_tokens
    need = known.need_mib(tokens)
    return MemoryNeed(least=need or known.weights_mib, taken=None if is_filling else need, tokens=tokens)


def most_room(lanes: Iterable[Lane]) -> int | None:
    """Return the MiB of the device with the most room; None where one tells none, which may have any."""
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
    """Return vLLM's flags for its part of a device, where the author has not given them."""
    device, given = lane.device, named(spec.args)
    if spec.engine is not EngineKind.VLLM or device.is_cpu:
        return {}
    flags: dict[str, Flag] = {}
    if lane.memory_mib is not None and device.memory_mib is not None:
        flags["gpu_memory_utilization"] = lane.memory_mib * 100 // device.memory_mib / 100
    if device.is_slice:  # how many requests it takes at once is told it by the slots
        flags["max_num_batched_tokens"] = max(SLICE_BATCH, spec.slots)
    return {name: value for name, value in flags.items() if name.replace("_", "-") not in given}

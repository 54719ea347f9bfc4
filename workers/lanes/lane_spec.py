"""From a model and a lane to the specification of the worker that may run it there. Pure.

Source: vLLM's documentation of ``--gpu-memory-utilization``, a part of a device's total memory for one instance;
NVIDIA, "Multi-Instance GPU User Guide", for what a process sees of a slice: one device, and its memory. NVML tells vLLM
the parent's, by which it would choose its batch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.devices.layout import Lane
from workers.engine.launch.flags import named
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec

SLICE_BATCH: Final = 2048  # tokens: what vLLM chooses by itself would be for the whole GPU


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

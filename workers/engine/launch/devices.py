"""Whether an engine computes on the CPU, as far as its specification and the machine tell, and what follows from it."""

import functools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.engine.launch.flags import named
from workers.spec import EngineKind, WorkerSpec

BUSY_STALL_S: Final = 900.0  # a batch of 2,048 tokens at two a second
ASK_LIMIT_S: Final = 30.0
DEVICE_VARIABLES: Final = frozenset({"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
_LAYERS: Final = frozenset({"ngl", "gpu-layers", "n-gpu-layers"})


def has_gpu(root: Path = Path("/dev")) -> bool:
    """Whether the machine shows a device that an engine could compute on: NVIDIA's, AMD's or Intel's."""
    return (root / "nvidiactl").exists() or (root / "kfd").exists() or any(root.glob("dri/renderD*"))


@functools.cache
def embedded_has_gpu() -> bool:
    """Whether the llama.cpp of the wheel knows a device besides the CPU here; it is asked in a process of its own.

    Most wheels know none, whatever the machine has: an office computer shows a device too.
    """
    asked = "import xllamacpp as x; print(sum(each['type'].name.endswith('GPU') for each in x.get_device_info()))"
    try:
        counted = subprocess.run(
            [sys.executable, "-P", "-c", asked], capture_output=True, text=True, timeout=ASK_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return True
    return counted.stdout.strip() != "0"


def computes_on_cpu(spec: WorkerSpec, environment: Mapping[str, str], *, is_gpu_there: bool) -> bool:
    """Whether an engine computes on the CPU: no device is there, or it is told to use none."""
    if not spec.owns_engine:
        return False
    given = named(spec.args)
    if spec.engine is EngineKind.VLLM and given.get("device") == "cpu":
        return True
    is_hidden = any(spec.env.get(name, environment.get(name)) in {"", "-1"} for name in DEVICE_VARIABLES)
    has_no_layers = any(str(given.get(name)) == "0" for name in _LAYERS)
    return not is_gpu_there or is_hidden or has_no_layers


def placed(spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerSpec:
    """Return a specification that says where its engine computes, and for how long its CPU ticks may speak for it."""
    on_cpu = spec.on_cpu
    if on_cpu is None:
        is_gpu_there = has_gpu() and (spec.engine is not EngineKind.EMBEDDED or embedded_has_gpu())
        on_cpu = computes_on_cpu(spec, environment, is_gpu_there=is_gpu_there)
    timeouts = spec.timeouts
    if timeouts.busy_stall_s is None:
        # Of a server that is not ours it says for how long others' answers speak for a request.
        timeouts = replace(timeouts, busy_stall_s=BUSY_STALL_S if on_cpu or not spec.owns_engine else 0.0)
    return replace(spec, on_cpu=on_cpu, timeouts=timeouts)

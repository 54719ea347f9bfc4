"""Whether an engine computes on the CPU, judged by its specification and the machine, and its limits then."""

import functools
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.devices.visible import DEVICE_VARIABLES, names_none
from workers.engine.launch.flags import named
from workers.spec import LLAMA_CPP, EngineKind, WorkerSpec

BUSY_STALL_S: Final = 900.0  # a batch of 2,048 tokens at two per second
ASK_LIMIT_S: Final = 30.0
_LAYERS: Final = frozenset({"ngl", "gpu-layers", "n-gpu-layers"})
_DEVICES: Final = frozenset({"dev", "device"})


def has_gpu(root: Path = Path("/dev")) -> bool:
    """Whether the machine shows a device that an engine could compute on: NVIDIA's, AMD's or Intel's."""
    return (root / "nvidiactl").exists() or (root / "kfd").exists() or any(root.glob("dri/renderD*"))


@functools.cache
def embedded_has_gpu() -> bool:
    """Whether the wheel's llama.cpp knows a device besides the CPU here; found out in a separate process.

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
    """Whether an engine computes on the CPU: there is no device, or its settings use none."""
    if not spec.owns_engine:
        return False
    given = named(spec.args)
    if spec.engine is EngineKind.VLLM and given.get("device") == "cpu":
        return True
    said = [spec.env.get(name, environment.get(name)) for name in DEVICE_VARIABLES]
    values = [value for value in said if value is not None]
    is_hidden = bool(values) and all(map(names_none, values))
    has_no_layers = any(str(given.get(name)) == "0" for name in _LAYERS)
    has_no_device = spec.engine in LLAMA_CPP and any(str(given.get(name)) == "none" for name in _DEVICES)
    return not is_gpu_there or is_hidden or has_no_layers or has_no_device


def may_use_gpu(spec: WorkerSpec, environment: Mapping[str, str]) -> bool:
    """Whether an engine would compute on a GPU if the machine had one."""
    is_built_for_it = spec.engine is not EngineKind.EMBEDDED or bool(spec.command) or embedded_has_gpu()
    return spec.owns_engine and not computes_on_cpu(spec, environment, is_gpu_there=is_built_for_it)


def placed(spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerSpec:
    """Return a specification with the engine's place, and with the limit on CPU ticks as evidence."""
    on_cpu = spec.on_cpu
    if on_cpu is None:
        is_gpu_there = has_gpu() and (spec.engine is not EngineKind.EMBEDDED or embedded_has_gpu())
        on_cpu = computes_on_cpu(spec, environment, is_gpu_there=is_gpu_there)
    timeouts = spec.timeouts
    if timeouts.busy_stall_s is None:
        # For an attached server it bounds how long others' answers speak for a request.
        timeouts = replace(timeouts, busy_stall_s=BUSY_STALL_S if on_cpu or not spec.owns_engine else 0.0)
    return replace(spec, on_cpu=on_cpu, timeouts=timeouts)

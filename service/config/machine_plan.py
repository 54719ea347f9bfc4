"""The plan by which a configuration's engines share the machine: devices of fixed models, and cores of the CPU.

Source: specification, "Devices of replicas" and "Cores".
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from service.config.inventory import devices_of
from service.config.model import ModelConfig
from service.config.schema import Config
from service.errors import ConfigError
from workers.devices.discovery import usable_cores
from workers.devices.layout import Device, DeviceChoice, choose_devices, devices_in, named_devices
from workers.engine.launch.devices import DEVICE_VARIABLES, embedded_has_gpu, placed
from workers.engine.launch.flags import named
from workers.errors import InvalidLayout
from workers.spec import LLAMA_CPP, EngineKind, WorkerSpec

# Over how many devices vLLM puts a model.
SPLITS: Final = ("tensor-parallel-size", "pipeline-parallel-size", "tp", "pp")
# With one of these the author has placed the engine.
OF_AUTHORS: Final = frozenset(
    {"device", "dev", "main-gpu", "mg", "split-mode", "sm", "tensor-split", "ts", "data-parallel-size", "dp"}
)
THREADS: Final = frozenset({"threads", "t"})
VLLM_PERCENT: Final = 90  # of a device's memory, for all engines of vLLM on it: what one alone takes by default


def share_machine(specs: Sequence[WorkerSpec], config: Config, base: Path, tiny: Path) -> list[WorkerSpec]:
    """Return the specifications with what their engines may have of the machine; one core is enough for ``tiny``.

    Raises:
        ConfigError: a model names devices that are not there.
    """
    return _share_cores(_share_devices(specs, config, base), str(tiny))


def first_devices(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Return the specifications with the devices that their engines have when all are started, in their order."""
    engines_on = engines_on_lanes(specs)
    found: list[WorkerSpec] = []
    for spec in specs:
        if spec.device_choice is not None:
            spec = replace(spec, devices=choose_devices(spec.device_choice, engines_on))  # noqa: PLW2901
            engines_on.update(device.uuid for device in spec.devices)
        found.append(spec)
    return found


def engines_on_lanes(specs: Sequence[WorkerSpec]) -> Counter[str]:
    """Count the lanes on each device, by its UUID."""
    return Counter({spec.lane.id: spec.lane.device.uuid for spec in specs if spec.lane is not None}.values())


def _share_devices(specs: Sequence[WorkerSpec], config: Config, base: Path) -> list[WorkerSpec]:
    if not any(spec.lane is None and spec.owns_engine for spec in specs):
        return list(specs)
    devices = devices_in(devices_of(config.gpus.inventory, base))
    shared = [_with_devices(spec, config.models[spec.name], devices) for spec in specs]
    engines = sum(spec.device_choice is not None and spec.engine is EngineKind.VLLM for spec in shared)
    each = -(-engines // max(1, len(devices)))  # on one device
    return [_with_part(spec, each) if spec.device_choice is not None else spec for spec in shared]


def _with_devices(spec: WorkerSpec, model: ModelConfig, devices: Sequence[Device]) -> WorkerSpec:
    """Return the specification of a fixed engine with what it may compute on.

    One engine of llama.cpp spreads a model over all devices that it sees: it is left alone unless it is told.
    """
    if spec.lane is not None or not spec.owns_engine:
        return spec
    if model.devices is not None:
        return replace(spec, device_choice=_choice_of(spec, model, devices))
    if not devices or not _may_use_gpu(spec):
        return spec
    is_placed = not DEVICE_VARIABLES.isdisjoint(spec.env) or not OF_AUTHORS.isdisjoint(named(spec.args))
    if not is_placed and (spec.engine is EngineKind.VLLM or model.replicas > 1):
        return replace(spec, device_choice=_choice_of(spec, model, devices))
    return replace(spec, devices=_seen_by(spec, devices))


def _may_use_gpu(spec: WorkerSpec) -> bool:
    given = named(spec.args)
    is_told = any(str(given.get(name)) == "0" for name in ("ngl", "gpu-layers", "n-gpu-layers"))
    return not is_told and (spec.engine is not EngineKind.EMBEDDED or bool(spec.command) or embedded_has_gpu())


def _choice_of(spec: WorkerSpec, model: ModelConfig, devices: Sequence[Device]) -> DeviceChoice:
    try:
        allowed = tuple(devices) if model.devices is None else named_devices(model.devices, devices)
    except InvalidLayout as error:
        raise ConfigError(f"models.{spec.name}.devices: {error}") from error
    each = 1
    if spec.engine is EngineKind.VLLM:
        for flag, value in named(spec.args).items():
            each *= int(str(value)) if flag in SPLITS and str(value).isdecimal() else 1
    elif model.devices is not None:
        each = max(1, len(allowed) // model.replicas)  # llama.cpp spreads a model over what it sees
    if model.devices is not None and each > len(allowed):
        raise ConfigError(
            f"models.{spec.name}.devices: by its args an engine needs {each} devices, and {len(allowed)} are named"
        )
    return DeviceChoice(devices=allowed, each=max(1, each))  # where there are fewer, the engine says so


def _seen_by(spec: WorkerSpec, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices that an engine sees which its author, or nobody, has placed."""
    values = (spec.env.get(name, os.environ.get(name)) for name in sorted(DEVICE_VARIABLES))
    names = next((value.split(",") for value in values if value is not None), None)
    return tuple(device for device in devices if names is None or device.uuid in names or str(device.index) in names)


def _with_part(spec: WorkerSpec, engines: int) -> WorkerSpec:
    """Return the specification of an engine that shares its device with others of vLLM, which take memory by parts."""
    if spec.engine is not EngineKind.VLLM or engines < 2 or "gpu-memory-utilization" in named(spec.args):  # noqa: PLR2004
        return spec
    return replace(spec, args={**spec.args, "gpu_memory_utilization": VLLM_PERCENT // engines / 100})


def _share_cores(specs: Sequence[WorkerSpec], tiny: str) -> list[WorkerSpec]:
    """Give each engine of llama.cpp on the CPU its part of the cores, where its author has not.

    Each would take all of them, and spin: two made a job of 18 turns take 17 s, and 6 s with a thread each.
    """
    on_cpu = {spec.id for spec in specs if _is_on_cpu(spec)}  # of several models that come to a lane one is there
    part = max(1, usable_cores() // max(1, len(on_cpu)))
    return [
        replace(spec, threads=1 if spec.model == tiny else part)
        if _is_on_cpu(spec)
        and (len(on_cpu) > 1 or spec.model == tiny)
        and spec.engine in LLAMA_CPP
        and THREADS.isdisjoint(named(spec.args))
        else spec
        for spec in specs
    ]


def _is_on_cpu(spec: WorkerSpec) -> bool:
    has_device = spec.device_choice is not None or bool(spec.accelerators)
    return spec.owns_engine and not has_device and placed(spec, os.environ).on_cpu is True

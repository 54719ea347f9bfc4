"""Shares of the machine for a configuration's engines: devices of fixed models, and CPU cores.

Source: specification, "Devices of replicas" and "Cores".
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from service.config.inventory import check_none_lost, devices_of
from service.config.model import ModelConfig
from service.config.schema import Config
from service.errors import ConfigError
from workers.devices.device import Gpu, MigSlice
from workers.devices.discovery import usable_cores
from workers.devices.layout import Device, DeviceChoice, choose_devices, devices_in, named_devices
from workers.devices.visible import DEVICE_VARIABLES, bound
from workers.engine.launch.devices import may_use_gpu, placed
from workers.engine.launch.flags import named
from workers.errors import InvalidLayout
from workers.spec import LLAMA_CPP, EngineKind, WorkerSpec

# Their product is the number of devices that vLLM spreads a model over.
SPLITS: Final = ("tensor-parallel-size", "pipeline-parallel-size", "tp", "pp")
# Flags with which the author places the engine.
OF_AUTHORS: Final = frozenset(
    {"device", "dev", "main-gpu", "mg", "split-mode", "sm", "tensor-split", "ts", "data-parallel-size", "dp"}
)
THREADS: Final = frozenset({"threads", "t"})
MEMORY: Final = "gpu-memory-utilization"
VLLM_PERCENT: Final = 90  # share of a device's memory for all its vLLM engines: one alone takes this by default


def share_machine(specs: Sequence[WorkerSpec], config: Config, base: Path, tiny: Path) -> list[WorkerSpec]:
    """Return the specifications with their engines' shares of the machine; one core is enough for ``tiny``.

    Raises:
        ConfigError: a model names devices that are not there.
    """
    return _share_cores(_share_devices(specs, config, base), str(tiny))


def first_devices(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Return the specifications with the devices that their engines get if all start, in this order."""
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
    fixed = [spec for spec in specs if spec.lane is None and spec.owns_engine]
    chosen = [spec for spec in fixed if config.models[spec.name].devices is not None]
    free = [spec for spec in fixed if config.models[spec.name].devices is None and may_use_gpu(spec, os.environ)]
    if not chosen and not free:
        return list(specs)
    counts_on_all = any(map(_needs_gpu, free))
    gpus = devices_of(config.gpus.inventory, base, os.environ, is_needed=counts_on_all or bool(chosen))
    if counts_on_all:
        check_none_lost(gpus)
    return _share_memory([_with_devices(spec, config.models[spec.name], gpus) for spec in specs], len(devices_in(gpus)))


def _share_memory(specs: Sequence[WorkerSpec], devices: int) -> list[WorkerSpec]:
    """Give each vLLM engine its part of the memory that such engines share on its device."""
    sharing = {spec.id: spec for spec in specs if spec.device_choice is not None and spec.engine is EngineKind.VLLM}
    spares = sum({spec.name: spec.spares or 0 for spec in sharing.values()}.values())
    each = -(-(len(sharing) + spares) // max(1, devices))  # engines per device
    return [
        replace(spec, args={**spec.args, MEMORY: VLLM_PERCENT // each / 100})
        if each > 1 and spec.id in sharing and MEMORY not in named(spec.args)
        else spec
        for spec in specs
    ]


def _needs_gpu(spec: WorkerSpec) -> bool:
    """Whether an engine cannot run without a GPU that we choose; llama.cpp falls back to the CPU."""
    return spec.engine is EngineKind.VLLM and not _is_placed(spec)


def _is_placed(spec: WorkerSpec) -> bool:
    """Whether the author has said which devices an engine uses."""
    return not DEVICE_VARIABLES.isdisjoint(spec.env) or not OF_AUTHORS.isdisjoint(named(spec.args))


def _with_devices(spec: WorkerSpec, model: ModelConfig, gpus: Sequence[Gpu]) -> WorkerSpec:
    """Return the specification of a fixed engine with the devices that it may use.

    A single llama.cpp engine spreads a model over all devices that it sees; it stays so unless devices are named.
    """
    if spec.lane is not None or not spec.owns_engine:
        return spec
    if model.devices is not None:
        choice = _choice_of(spec, model, gpus)
        return replace(spec, device_choice=choice, listed_devices=choice.devices)
    if not may_use_gpu(spec, os.environ):
        return spec
    if not devices_in(gpus) and gpus and spec.engine in LLAMA_CPP and not _is_placed(spec):
        return replace(spec, on_cpu=True)  # no GPU may be used
    if devices_in(gpus) and not _is_placed(spec) and (spec.engine is EngineKind.VLLM or model.replicas > 1):
        return replace(spec, device_choice=_choice_of(spec, model, gpus))
    return replace(spec, devices=_seen_by(spec, gpus))


def _choice_of(spec: WorkerSpec, model: ModelConfig, gpus: Sequence[Gpu]) -> DeviceChoice:
    try:
        allowed = tuple(devices_in(gpus)) if model.devices is None else named_devices(model.devices, gpus)
    except InvalidLayout as error:
        raise ConfigError(f"models.{spec.name}.devices: {error}") from error
    each = 1
    if spec.engine is EngineKind.VLLM:
        for flag, value in named(spec.args).items():
            each *= int(str(value)) if flag in SPLITS and str(value).isdecimal() else 1
    elif model.devices is not None:
        each = max(1, len(allowed) // model.replicas)  # llama.cpp spreads a model over all visible devices
    if model.devices is not None and each > len(allowed):
        raise ConfigError(
            f"models.{spec.name}.devices: by its args an engine needs {each} devices, but {len(allowed)} are named"
        )
    return DeviceChoice(devices=allowed, each=max(1, each))  # the engine itself reports too few devices


def _seen_by(spec: WorkerSpec, gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return the devices that an engine sees if we do not place it.

    Raises:
        ConfigError: its author names a device that the service may not use.
    """
    there = devices_in(gpus)
    said = sorted(DEVICE_VARIABLES & spec.env.keys())
    if not said:
        return tuple(there)
    bare = [replace(gpu, hidden=None, mig=gpu.mig and _bare(gpu.mig)) for gpu in gpus]
    try:
        seen = devices_in(bound(bare, {**os.environ, **spec.env}))
    except InvalidLayout as error:
        raise ConfigError(f"models.{spec.name}.env: {error}") from error
    for device in seen:
        if device.uuid not in {each.uuid for each in there}:
            try:
                named_devices([device.uuid], gpus)
            except InvalidLayout as error:
                raise ConfigError(f"models.{spec.name}.env.{said[0]}: {error}") from error
    return tuple(seen)


def _bare(slices: Sequence[MigSlice]) -> tuple[MigSlice, ...]:
    return tuple(replace(each, hidden=None) for each in slices)


def _share_cores(specs: Sequence[WorkerSpec], tiny: str) -> list[WorkerSpec]:
    """Give each llama.cpp engine on the CPU its part of the cores, unless its author sets its threads.

    Each would take all of them and spin: with two engines a job of 18 turns took 17 s, with a thread each 6 s.
    """
    on_cpu = {spec.id for spec in specs if _is_on_cpu(spec)}  # models of one lane share its id: one runs at a time
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

"""The lanes of a configuration on its devices, planned before anything starts."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.config.inventory import devices_of, document_of, hidden_of, lanes_on
from service.config.load import load_config, naming_lines
from service.config.machine_plan import first_devices
from service.config.schema import Config
from service.config.workers import worker_specs
from workers.devices.device import Gpu
from workers.devices.layout import Lane
from workers.devices.visible import usable
from workers.policy.placement import AssignLane, LaneView, ModelDemand, Placement, SwapRule
from workers.spec import WorkerSpec


def with_mig(config: Config, *, enable_mig: bool) -> Config:
    """Return a configuration that uses MIG slices where ``enable_mig`` asks for them."""
    return config.model_copy(update={"gpus": replace(config.gpus, enable_mig=True)}) if enable_mig else config


def plan_of(path: Path | None, *, enable_mig: bool = False) -> dict[str, Any]:
    """Return the devices of this machine or of an inventory, and with a configuration its engines and lanes.

    Raises:
        ConfigError: the configuration, or its inventory, has faults.
        DevicesUnreadable: the machine's driver fails.
    """
    if path is None:
        return _devices_document(devices_of(None, Path(), os.environ))
    config = with_mig(load_config(path), enable_mig=enable_mig)
    with naming_lines(path):
        specs = worker_specs(config, path.parent, config.server.state_dir)
        gpus = devices_of(config.gpus.inventory, path.parent, os.environ, is_needed=False)
    lanes = lanes_on(gpus, config.gpus)
    first = first_residents(lanes, [spec for spec in specs if spec.lane is not None])
    return {
        **_devices_document(gpus),
        "engines": [_engine_document(spec) for spec in first_devices(specs) if spec.lane is None and spec.owns_engine],
        "lanes": [_lane_document(lane, first.get(lane.id)) for lane in lanes],
    }


def _devices_document(gpus: Sequence[Gpu]) -> dict[str, Any]:
    return {"devices": [document_of(gpu) for gpu in usable(gpus)], "hidden": hidden_of(gpus)}


def first_residents(lanes: Sequence[Lane], specs: Sequence[WorkerSpec]) -> dict[str, WorkerSpec]:
    """Return the model on each lane if every model is asked for once, in the configuration's order."""
    models = {spec.name: spec for spec in specs}
    demands = [
        ModelDemand(name=name, need_mib=spec.need_mib, is_pinned=spec.pin, waiting=1, first=(number,))
        for number, (name, spec) in enumerate(models.items())
    ]
    views = [LaneView(id=lane.id, device=lane.device.uuid, memory_mib=lane.memory_mib) for lane in lanes]
    rooms = {lane.device.uuid: lane.device.room_mib for lane in lanes}
    actions = Placement(rooms, SwapRule.FAIR).decide(views, demands, 0.0)
    return {action.lane: models[action.model] for action in actions if isinstance(action, AssignLane)}


def _engine_document(spec: WorkerSpec) -> dict[str, Any]:
    return {
        "worker": spec.id,
        "model": spec.name,
        "devices": [device.uuid for device in spec.devices],
        "threads": spec.threads,
    }


def _lane_document(lane: Lane, first: WorkerSpec | None) -> dict[str, Any]:
    need = None if first is None else lane.memory_mib if first.need_mib is None else first.need_mib
    return {
        "lane": lane.id,
        "device": lane.device.uuid,
        "layout": lane.layout.value,
        "memory_mib": lane.memory_mib,
        "port": lane.port,
        "resident": [] if first is None else [first.name],
        "need_mib": need,
        "room_mib": lane.device.room_mib,
    }

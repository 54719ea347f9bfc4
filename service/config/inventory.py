"""The devices for lanes: those of this machine, or those of a file, for tests and for planning."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from service.config.model import Uuid
from service.errors import ConfigError
from service.formats.documents import line_of, parse_document, read_text
from service.formats.faults import StrictModel, faults_of
from workers.devices.device import Gpu, MigSlice, check_devices
from workers.devices.discovery import find_gpus, host_memory_mib
from workers.devices.layout import Lane, LayoutPolicy, lanes_of
from workers.devices.visible import CUDA, bound
from workers.engine.launch.devices import may_use_gpu
from workers.errors import DevicesUnreadable, InvalidInventory, InvalidLayout
from workers.spec import WorkerSpec

MENDS: Final = (
    "reboot if the driver was updated, or list the devices in gpus.inventory; "
    f"{CUDA}= in the environment of the service makes all engines compute on the CPU"
)
logger = logging.getLogger(__name__)

Memory = Annotated[int, Field(gt=0, le=2**31)] | None


class SliceEntry(StrictModel):
    """A MIG slice in an inventory."""

    uuid: Uuid
    profile: Annotated[str, Field(max_length=64)]
    memory_mib: Memory = None


class GpuEntry(StrictModel):
    """A GPU in an inventory; ``mig`` is set in MIG mode."""

    index: Annotated[int, Field(ge=0)]
    uuid: Uuid
    name: Annotated[str, Field(max_length=256)]
    memory_mib: Memory = None
    mig: list[SliceEntry] | None = None


class Inventory(StrictModel):
    """All GPUs of a machine, in the form that ``roundhouse gpus --json`` prints."""

    devices: list[GpuEntry]
    hidden: list[object] = Field(default_factory=list, description="also printed by the command; ignored")
    engines: list[object] = Field(default_factory=list, description="the same")
    lanes: list[object] = Field(default_factory=list, description="the same")


def read_inventory(path: Path) -> list[Gpu]:
    """Return the GPUs that a YAML or JSON file lists.

    Raises:
        ConfigError: with every fault, each with its line.
    """
    document, lines = parse_document(read_text(path), str(path))
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: an inventory is a mapping with the key 'devices'")
    try:
        inventory = Inventory.model_validate(document)
    except ValidationError as error:
        places = [entry["loc"] for entry in error.errors(include_url=False)]
        faults = zip(places, faults_of(error, Inventory), strict=True)
        raise ConfigError("\n".join(f"{path}{line_of(lines, place)}: {fault}" for place, fault in faults)) from error
    gpus = [_gpu(entry) for entry in inventory.devices]
    try:
        check_devices(gpus)
    except InvalidInventory as error:
        raise ConfigError("\n".join(f"{path}: {fault}" for fault in str(error).splitlines())) from error
    return gpus


def devices_of(
    inventory: Path | None, base: Path, environment: Mapping[str, str], *, is_needed: bool = True
) -> list[Gpu]:
    """Return the GPUs of a configuration's inventory, or else of this machine; those that may not be used are marked.

    Where no engine needs a GPU, a driver that fails counts as a lost GPU, and the log says so.

    Raises:
        ConfigError: the inventory is not valid, or the environment's variables do not identify GPUs.
        DevicesUnreadable: the machine's driver fails, and a GPU is needed.
    """
    try:
        found = find_gpus() if inventory is None else read_inventory(base / inventory.expanduser())
    except DevicesUnreadable as error:
        if is_needed:
            raise DevicesUnreadable(f"{str(error).rstrip('.')}; {MENDS}") from error
        logger.warning("%s: no GPU is used; %s", error, MENDS)
        return [Gpu(index=0, uuid="GPU", name="", memory_mib=None, lost=str(error))]  # a failing driver implies a GPU
    try:
        return bound(found, environment)
    except InvalidLayout as error:
        raise ConfigError(str(error)) from error


def check_none_lost(gpus: Sequence[Gpu]) -> None:
    """Check that no usable GPU is lost: work that counts on all of them must not move elsewhere silently.

    Raises:
        DevicesUnreadable: one is; the message says which.
    """
    lost = next((gpu for gpu in gpus if gpu.lost is not None and gpu.hidden is None), None)
    if lost is not None:
        raise DevicesUnreadable(
            f"NVML: GPU {lost.index}: {lost.lost}; reset it or reboot, or exclude it with devices of the models, with "
            f"{CUDA} in the environment of the service, or with gpus.inventory"
        )


def lanes_for(
    specs: Sequence[WorkerSpec], inventory: Path | None, base: Path, policy: LayoutPolicy
) -> tuple[Lane, ...]:
    """Return the lanes for models of a configuration.

    Raises:
        ConfigError: there can be none.
        DevicesUnreadable: the driver fails, or a GPU is lost, and one of the models may use it.
    """
    is_needed = any(may_use_gpu(spec, os.environ) for spec in specs)
    gpus = devices_of(inventory, base, os.environ, is_needed=is_needed)
    if is_needed:
        check_none_lost(gpus)
    return lanes_on(gpus, policy)


def lanes_on(gpus: Sequence[Gpu], policy: LayoutPolicy) -> tuple[Lane, ...]:
    """Return the lanes of a configuration.

    Raises:
        ConfigError: there can be none.
    """
    try:
        return lanes_of(gpus, policy, host_memory_mib())
    except InvalidLayout as error:
        raise ConfigError(str(error)) from error


def hidden_of(gpus: Sequence[Gpu]) -> list[dict[str, object]]:
    """Return the devices that no engine of ours may use, each with the reason."""
    return [each for gpu in gpus for each in _hidden(gpu)]


def _hidden(gpu: Gpu) -> Iterator[dict[str, object]]:
    because = f"lost: {gpu.lost}" if gpu.lost is not None else gpu.hidden and f"hidden by {gpu.hidden}"
    if because:
        known = None if gpu.lost is not None or not gpu.name else gpu.uuid
        yield {"index": gpu.index, "uuid": known, "name": gpu.name or None, "because": because}
        return
    for each in gpu.mig or ():
        if each.hidden is not None:
            name = f"{gpu.name} MIG {each.profile}"
            yield {"index": gpu.index, "uuid": each.uuid, "name": name, "because": f"hidden by {each.hidden}"}


def document_of(gpu: Gpu) -> dict[str, object]:
    """Return a GPU as an entry of an inventory."""
    document: dict[str, object] = {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_mib": gpu.memory_mib,
    }
    if gpu.mig is not None:
        document["mig"] = [
            {"uuid": each.uuid, "profile": each.profile, "memory_mib": each.memory_mib} for each in gpu.mig
        ]
    return document


def _gpu(entry: GpuEntry) -> Gpu:
    slices = [MigSlice(uuid=each.uuid, profile=each.profile, memory_mib=each.memory_mib) for each in entry.mig or ()]
    return Gpu(
        index=entry.index,
        uuid=entry.uuid,
        name=entry.name,
        memory_mib=entry.memory_mib,
        mig=None if entry.mig is None else tuple(slices),
    )

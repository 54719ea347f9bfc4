"""The devices that lanes stand on: those of this machine, or those of a file, for tests and for planning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from service.config.model import Uuid
from service.errors import ConfigError
from service.formats.documents import line_of, parse_document, read_text
from service.formats.faults import StrictModel, faults_of
from workers.devices.device import Gpu, MigSlice, check_devices
from workers.devices.discovery import find_gpus, host_memory_mib
from workers.devices.layout import Lane, LayoutPolicy, lanes_of
from workers.errors import InvalidInventory, InvalidLayout

Memory = Annotated[int, Field(gt=0, le=2**31)] | None


class SliceEntry(StrictModel):
    """A MIG slice in an inventory."""

    uuid: Uuid
    profile: Annotated[str, Field(max_length=64)]
    memory_mib: Memory = None


class GpuEntry(StrictModel):
    """A GPU in an inventory; ``mig`` is there where it is in MIG mode."""

    index: Annotated[int, Field(ge=0)]
    uuid: Uuid
    name: Annotated[str, Field(max_length=256)]
    memory_mib: Memory = None
    mig: list[SliceEntry] | None = None


class Inventory(StrictModel):
    """All GPUs of a machine, in the form that ``roundhouse gpus --json`` prints."""

    devices: list[GpuEntry]
    lanes: list[object] = Field(default_factory=list, description="what the command prints beside them; passed over")


def read_inventory(path: Path) -> list[Gpu]:
    """Return the GPUs that a file tells of, YAML or JSON.

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


def devices_of(inventory: Path | None, base: Path) -> list[Gpu]:
    """Return the GPUs of a configuration: of its inventory, or else of this machine.

    Raises:
        ConfigError: the inventory makes no sense.
        DevicesUnreadable: the machine's driver fails.
    """
    return find_gpus() if inventory is None else read_inventory(base / inventory.expanduser())


def lanes_on(gpus: Sequence[Gpu], policy: LayoutPolicy) -> tuple[Lane, ...]:
    """Return the lanes of a configuration.

    Raises:
        ConfigError: there can be none.
    """
    try:
        return lanes_of(gpus, policy, host_memory_mib())
    except InvalidLayout as error:
        raise ConfigError(str(error)) from error


def document_of(gpu: Gpu) -> dict[str, object]:
    """Return a GPU as an inventory has it."""
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

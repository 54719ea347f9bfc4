"""GPUs and their MIG slices, and what cannot be true of a machine. Pure.

Source: specification, "Devices".
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from workers.errors import InvalidInventory

CPU: Final = "cpu"  # in place of a UUID, where lanes stand on no accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A MIG device of a GPU: ``profile`` is NVIDIA's name for its size (``3g.40gb``), the memory is in MiB."""

    uuid: str
    profile: str
    memory_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its number in the order of the PCI bus; its memory is in MiB, None where the driver tells none.

    ``mig`` are the slices of one in MIG mode, which computes nothing as a whole; None is one in no such mode.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    mig: tuple[MigSlice, ...] | None = None


def check_devices(gpus: Sequence[Gpu]) -> None:
    """Return if there can be a machine with these devices.

    Raises:
        InvalidInventory: there cannot; the message has a line for each fault: its place, its value and its mend.
    """
    faults = list(_faults(gpus))
    if faults:
        raise InvalidInventory("\n".join(faults))


def _faults(gpus: Sequence[Gpu]) -> Iterator[str]:
    uuids: dict[str, str] = {}
    indices: dict[int, str] = {}
    for place, gpu in enumerate(gpus):
        path = f"devices[{place}]"
        owner = indices.setdefault(gpu.index, path)
        if owner != path:
            yield f"{path}.index: {gpu.index} is that of {owner}; every GPU has a number of its own"
        for at, uuid in _uuids(path, gpu):
            owner = uuids.setdefault(uuid, at)
            if uuid == CPU:
                yield f"{at}.uuid: {uuid} stands for no device; nvidia-smi -L shows those that there are"
            elif not uuid:
                yield f"{at}.uuid: is empty; nvidia-smi -L shows it"
            elif owner != at:
                yield f"{at}.uuid: {uuid} is that of {owner}; every device has one of its own"
        yield from _memory_faults(path, gpu)


def _uuids(path: str, gpu: Gpu) -> Iterator[tuple[str, str]]:
    yield path, gpu.uuid
    for number, each in enumerate(gpu.mig or ()):
        yield f"{path}.mig[{number}]", each.uuid


def _memory_faults(path: str, gpu: Gpu) -> Iterator[str]:
    if gpu.memory_mib is None:
        return
    # Compute instances (1c.3g.20gb) share the memory of their slice, and each tells all of it.
    total = sum(_known(each.memory_mib for each in gpu.mig or () if "c." not in each.profile))
    if total > gpu.memory_mib:
        yield f"{path}.mig: its slices have {total} MiB together, and the GPU {gpu.memory_mib} MiB"


def _known(sizes: Iterable[int | None]) -> Iterator[int]:
    return (size for size in sizes if size is not None)

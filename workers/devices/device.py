"""GPUs, their MIG slices and their memory, and checks for impossible machines. Pure.

Source: specification, "Devices".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from workers.errors import InvalidInventory

SLACK_PERCENT: Final = 5  # share of a device's memory that contexts and drivers take and give back at will
BACK_S: Final = 30.0  # how long a driver may take to free a dead engine's memory
# Faults of programs, not of the device: killing an engine may cause them (NVIDIA, "XID Errors").
PROGRAMS_FAULTS: Final = frozenset({13, 31, 43, 45, 68, 69, 137})
AMD: Final = ("amd", "radeon", "instinct")
CPU: Final = "cpu"  # used instead of a UUID if lanes have no accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """MiB of one device; ``held`` is per process by pid, None if that is hidden."""

    total_mib: int
    used_mib: int
    held: Mapping[int, int] | None = None

    @property
    def unexplained_mib(self) -> int:
        """The memory that no visible process holds."""
        return max(0, self.used_mib - sum((self.held or {}).values()))


class MemoryFinding(StrEnum):
    """The finding of a look at a device before an engine starts there."""

    FREE = "free"
    COMING_BACK = "coming back"  # memory of an ended engine is still in use
    LOST = "lost"  # it has been for too long


def judge_memory(
    before: DeviceMemory | None, now: DeviceMemory | None, *, alone: bool, waited_s: float
) -> MemoryFinding:
    """Return whether an engine may start; ``before`` is the look before our last engine was started.

    Only memory without a process counts: other programs may use the device, and the rest may be enough. If no process
    is visible, only a device without engines of ours (``alone``) gives a finding.
    """
    if before is None or now is None:
        return MemoryFinding.FREE
    if (now.held is None or before.held is None) and not alone:
        return MemoryFinding.FREE
    lost = now.unexplained_mib - before.unexplained_mib
    if lost * 100 <= now.total_mib * SLACK_PERCENT:
        return MemoryFinding.FREE
    return MemoryFinding.LOST if waited_s >= BACK_S else MemoryFinding.COMING_BACK


def is_devices_fault(xid: int) -> bool:
    """Whether an Xid is a fault of the device and not of a program on it."""
    return xid not in PROGRAMS_FAULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class MigSlice:
    """A MIG device of a GPU: ``profile`` is NVIDIA's name for its size (``3g.40gb``), the memory is in MiB.

    ``hidden`` is the setting that keeps our engines from it, such as ``CUDA_VISIBLE_DEVICES=1``.
    """

    uuid: str
    profile: str
    memory_mib: int | None
    hidden: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its number in PCI bus order; its memory is in MiB, None if the driver does not report it.

    ``mig`` are the slices of one in MIG mode, which computes nothing as a whole; None without that mode. ``hidden`` is
    the setting that keeps our engines from it, as for a slice; ``lost`` is why the driver reports only its number.
    ``shown_as`` is its name for an engine if that differs from its number among its maker's.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int | None
    mig: tuple[MigSlice, ...] | None = None
    hidden: str | None = None
    lost: str | None = None
    shown_as: str | None = None


def is_amd(gpu: Gpu) -> bool:
    """Whether a GPU is AMD's, by its name."""
    return gpu.name.lower().startswith(AMD)


def number_of(gpu: Gpu, gpus: Sequence[Gpu]) -> int:
    """Return a GPU's number in its maker's library, which counts only its own cards."""
    return gpu.index - sum(each.index < gpu.index and is_amd(each) != is_amd(gpu) for each in gpus)


def check_devices(gpus: Sequence[Gpu]) -> None:
    """Check that a machine with these devices is possible.

    Raises:
        InvalidInventory: it is not; the message has a line for each fault: its place, its value and its mend.
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
    # Compute instances (1c.3g.20gb) share the memory of their slice, and each reports all of it.
    total = sum(_known(each.memory_mib for each in gpu.mig or () if "c." not in each.profile))
    if total > gpu.memory_mib:
        yield f"{path}.mig: its slices have {total} MiB together, and the GPU {gpu.memory_mib} MiB"


def _known(sizes: Iterable[int | None]) -> Iterator[int]:
    return (size for size in sizes if size is not None)

"""What a device's memory holds at one moment, and what of it that means. Pure.

Source: specification, "Sick devices".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SLACK_PERCENT: Final = 5  # of a device's memory: what contexts and drivers take and give back as they like
BACK_S: Final = 30.0  # within which memory of an engine that has ended comes back
# Faults of programs, which no device is to blame for: an engine that we kill may cause them (NVIDIA, "XID Errors").
PROGRAMS_FAULTS: Final = frozenset({13, 31, 43, 45, 68, 69, 137})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """MiB of one device; ``held`` is what each process has by its pid, None where that cannot be seen."""

    total_mib: int
    used_mib: int
    held: Mapping[int, int] | None = None

    @property
    def unexplained_mib(self) -> int:
        """What no process that can be seen has."""
        return max(0, self.used_mib - sum((self.held or {}).values()))


class MemoryFinding(StrEnum):
    """What a look at a device tells before an engine is started there."""

    FREE = "free"
    COMING_BACK = "coming back"  # something of an engine that has ended is still there
    LOST = "lost"  # and has been for too long


def judge_memory(
    before: DeviceMemory | None, now: DeviceMemory | None, *, alone: bool, waited_s: float
) -> MemoryFinding:
    """Return whether an engine may start; ``before`` is the look before the last one of ours was started.

    Only what stands there for no process counts: other programs may use the device, and what is left may be enough.
    Where no process can be seen, only a device without engines of ours (``alone``) tells anything.
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
    """Whether an Xid tells of the device, and not of a program on it."""
    return xid not in PROGRAMS_FAULTS

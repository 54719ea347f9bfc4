"""The devices of this machine, by whoever can tell them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from workers.devices.device import Gpu
from workers.devices.nvidia_smi import read_nvidia_smi
from workers.devices.nvml import read_nvml

MIB: Final = 1024 * 1024
CGROUP: Final = Path("/sys/fs/cgroup/memory.max")
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
READERS: Final[tuple[Callable[[], list[Gpu] | None], ...]] = (read_nvml, read_nvidia_smi)


def find_gpus() -> list[Gpu]:
    """Return the GPUs of this machine; none where no driver is.

    Raises:
        DevicesUnreadable: there is a driver, and it fails.
    """
    for read in READERS:
        gpus = read()
        if gpus is not None:
            return gpus
    return []


def usable_cores(quota: Path = QUOTA) -> int:
    """Return how many cores processes of this machine, or of this container, may have; a part of one counts as one."""
    cores = len(os.sched_getaffinity(0))
    try:
        most, period = quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return min(cores, -(-int(most) // int(period))) if most.isdecimal() and int(period) > 0 else cores


def host_memory_mib(limit: Path = CGROUP) -> int:
    """Return the MiB of memory that processes of this machine, or of this container, may have."""
    total = psutil.virtual_memory().total
    try:
        bound = limit.read_text().strip()
    except OSError:
        bound = "max"
    return min(total, int(bound) if bound.isdecimal() else total) // MIB

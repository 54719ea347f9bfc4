"""This machine's means for engines: GPUs, cores and memory."""

import os
from pathlib import Path
from typing import Final

import psutil

from workers.devices.device import Gpu
from workers.devices.nvml import open_nvml

MIB: Final = 1024 * 1024
CGROUP: Final = Path("/sys/fs/cgroup/memory.max")
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def find_gpus() -> list[Gpu]:
    """Return the GPUs of this machine in the driver's order; none where no driver is.

    Raises:
        DevicesUnreadable: there is a driver, and it fails.
    """
    session = open_nvml()
    if session is None:
        return []
    try:
        return session.gpus()
    finally:
        session.close()


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

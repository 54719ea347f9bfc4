"""This machine's resources for engines: GPUs, cores and memory."""

import math
import os
from pathlib import Path
from typing import Final

import psutil

from workers.devices.cgroups import ROOT, cores_limit, memory_limits
from workers.devices.device import Gpu
from workers.devices.nvml import open_nvml

MIB: Final = 1024 * 1024


def find_gpus() -> list[Gpu]:
    """Return the GPUs of this machine in the driver's order; none without a driver.

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


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores processes of this machine, container or unit may use; a part of a core counts as one."""
    cores, most = len(os.sched_getaffinity(0)), cores_limit(root)
    return cores if most is None else min(cores, math.ceil(most))


def host_memory_mib(root: Path = ROOT) -> int:
    """Return the MiB of memory that processes of this machine, container or unit may use."""
    return min([psutil.virtual_memory().total, *(each.limit for each in memory_limits(root))]) // MIB


def host_free_mib(root: Path = ROOT) -> int:
    """Return the MiB that are left: the least of the machine's and of each control group's."""
    left = [psutil.virtual_memory().available, *(each.limit - each.used for each in memory_limits(root))]
    return max(0, min(left)) // MIB

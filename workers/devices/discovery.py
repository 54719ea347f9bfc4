"""The devices of this machine, by whoever can tell them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from workers.devices.device import Gpu
from workers.devices.nvidia_smi import read_nvidia_smi
from workers.devices.nvml import read_nvml

MIB: Final = 1024 * 1024
CGROUP: Final = Path("/sys/fs/cgroup/memory.max")
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


def host_memory_mib(limit: Path = CGROUP) -> int:
    """Return the MiB of memory that processes of this machine, or of this container, may have."""
    total = psutil.virtual_memory().total
    try:
        bound = limit.read_text().strip()
    except OSError:
        bound = "max"
    return min(total, int(bound) if bound.isdecimal() else total) // MIB

"""Readers of devices: the used memory of each, and the faults that the driver reports."""

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from workers.devices.device import CPU, DeviceMemory
from workers.devices.discovery import host_free_mib, host_memory_mib
from workers.devices.nvml import NvmlSession, open_nvml
from workers.errors import DevicesUnreadable

KERNEL_LOG: Final = Path("/dev/kmsg")
RECORD: Final = 8192  # bytes of the log's longest record
_XID: Final = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)[^)]*\): (?P<number>\d+)")  # a slice has "GPU-I:05"
logger = logging.getLogger(__name__)


class DeviceReader(Protocol):
    """Reports devices by UUID; it may block, so it runs in a thread."""

    def memory(self) -> Mapping[str, DeviceMemory]:
        """Return the present memory of each device; devices that the driver does not report are left out."""

    def faults(self) -> Iterable[tuple[str, int]]:
        """Return the Xids since the last call, each with its device."""

    def close(self) -> None:
        """Release the driver."""


class MachineReader:
    """Reads this machine: its GPUs through NVML and the kernel's log, and the host's own memory."""

    def __init__(self, kernel_log: Path = KERNEL_LOG) -> None:
        self._nvml: NvmlSession | None = None
        self._is_open = False
        self._log = _tail(kernel_log)
        self._uuids: dict[str, str] = {}  # UUIDs of GPUs, by their PCI bus

    def __repr__(self) -> str:
        return f"<MachineReader {self._nvml!r}>"

    def memory(self) -> Mapping[str, DeviceMemory]:
        """Return the present memory of each device; only the host's if the driver is absent or fails."""
        total = host_memory_mib()
        known = {CPU: DeviceMemory(total_mib=total, used_mib=total - min(total, host_free_mib()))}
        try:
            session = self._session()
            if session is None:
                return known
            gpus = session.memory()
            self._uuids |= session.buses()  # a lost GPU stays known by its bus
        except DevicesUnreadable as error:
            logger.warning("devices cannot be looked at: %s", error)
            return known
        return {**known, **gpus}

    def faults(self) -> Iterable[tuple[str, int]]:
        """Return the faults that the driver reports, and those in the kernel's log if it is readable."""
        faults: set[tuple[str, int]] = set()
        with suppress(DevicesUnreadable):  # the look at the memory has logged it
            session = self._session()
            faults.update(session.faults() if session else ())
        return faults | set(self._logged())

    def close(self) -> None:
        """Release the driver."""
        if self._nvml is not None:
            self._nvml.close()
        if self._log is not None:
            os.close(self._log)

    def _session(self) -> NvmlSession | None:
        if not self._is_open:  # a driver that failed is asked again: it may be reloaded meanwhile
            self._nvml = open_nvml()
            self._is_open = True
        return self._nvml

    def _logged(self) -> Iterable[tuple[str, int]]:
        for line in _records(self._log):
            found = _XID.search(line)
            if found is not None:
                bus = found["bus"].lower().split(".")[0]
                uuid = next((uuid for known, uuid in self._uuids.items() if known.endswith(bus)), None)
                if uuid is not None:
                    yield uuid, int(found["number"])


def _tail(path: Path) -> int | None:
    """Return a descriptor at the end of the kernel's log; None if it is not readable, as in most containers."""
    with suppress(OSError):
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(log, 0, os.SEEK_END)
        return log
    return None


def _records(log: int | None) -> Iterable[str]:
    while log is not None:
        try:
            record = os.read(log, RECORD)
        except BrokenPipeError:  # older records were overwritten
            continue
        except OSError:
            return
        if not record:
            return
        yield record.decode("utf-8", "replace")

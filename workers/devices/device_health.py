"""Whether devices are well: memory is watched, and failing devices are marked and get no engines.

A device is marked if memory does not come back after an engine of ours has ended there, until it does; and for an Xid
of the device, until an operator resumes a lane on it.

Source: specification, "Sick devices".
"""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from workers.devices.device import CPU, DeviceMemory, MemoryFinding, is_devices_fault, judge_memory
from workers.devices.layout import Device
from workers.devices.readers import DeviceReader
from workers.errors import DeviceSick, SpawnFailed

LIMIT_S: Final = 60.0  # a driver that wakes up takes seconds
TOLERANCE_PERCENT: Final = 10  # share of a slice that the driver keeps for itself
MIB: Final = 1024 * 1024
ABSENT: Final = 3  # the library is missing: nothing of CUDA's would run either
PROGRAM: Final = f"""
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit({ABSENT})
def ask(name, *args):
    result = getattr(cuda, name)(*args)
    if result:
        sys.exit(f"{{name}}: error {{result}}")
count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
ask("cuInit", 0)
ask("cuDeviceGetCount", ctypes.byref(count))
if count.value != 1:
    sys.exit(f"{{count.value}} devices")
ask("cuDeviceGet", ctypes.byref(device), 0)
ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
print(size.value)
"""
LOOK_S: Final = 5.0  # between two looks
POLL_S: Final = 0.5  # while memory comes back
logger = logging.getLogger(__name__)


def check_view(device: Device) -> None:
    """Check that a program which is shown a slice sees its memory; blocks as long as the driver takes.

    Raises:
        SpawnFailed: it sees another device, or none.
    """
    command = [sys.executable, "-I", "-c", PROGRAM]
    shown = ", ".join(f"{name}={value}" for name, value in device.visible.items())
    try:
        done = subprocess.run(
            command, env={**os.environ, **device.visible}, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpawnFailed(f"slice {device.uuid} cannot be looked at: {error}") from error
    if done.returncode == ABSENT:
        return
    if done.returncode or not done.stdout.strip().isdecimal():
        said = (done.stderr or done.stdout).strip()[-300:]
        raise SpawnFailed(f"slice {device.uuid} is not what an engine would see with {shown}: {said}")
    seen = int(done.stdout) // MIB
    if device.memory_mib is not None and abs(seen - device.memory_mib) * 100 > device.memory_mib * TOLERANCE_PERCENT:
        raise SpawnFailed(
            f"slice {device.uuid} has {device.memory_mib} MiB, and an engine would see {seen} MiB with {shown}"
        )


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """Why a device gets no engines; a mark for memory goes when the memory is back."""

    because: str
    is_memory: bool


class DeviceHealth:
    """The one owner of marks; ``run`` looks until cancelled, and every change calls ``on_mark``."""

    def __init__(self, reader: DeviceReader, on_mark: Callable[[], None] = lambda: None) -> None:
        self._reader = reader
        self.on_mark = on_mark
        self.marks: dict[str, Mark] = {}
        self.memory: dict[str, DeviceMemory] = {}  # at the last look
        self._before: dict[str, DeviceMemory] = {}  # taken at the start of our last engine there
        self._engines: Counter[str] = Counter()
        self._seen_right: set[str] = set()  # slices

    def __repr__(self) -> str:
        return f"<DeviceHealth marks={self.marks}>"

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                await self.refresh()
                await anyio.sleep(LOOK_S)
        finally:
            self._reader.close()

    async def refresh(self) -> None:
        """Look once; without a free descriptor the last look stands."""
        try:
            self.memory, faults = await anyio.to_thread.run_sync(self._read)
        except OSError as error:
            logger.warning("devices cannot be looked at: %s", error)
            return
        for uuid, xid in faults:
            if is_devices_fault(xid):
                self._mark(uuid, Mark(because=f"the kernel has logged Xid {xid} of it", is_memory=False))
            else:
                logger.warning("device %s: Xid %d, of a program on it", uuid, xid)
        for uuid in [each for each in self.marks if each in self.memory]:  # unreported devices keep their mark
            if self.marks[uuid].is_memory and self._find(uuid, waited_s=0.0) is MemoryFinding.FREE:
                del self.marks[uuid]
                logger.info("device %s: its memory is back", uuid)
                self.on_mark()

    def _read(self) -> tuple[dict[str, DeviceMemory], list[tuple[str, int]]]:
        return dict(self._reader.memory()), list(self._reader.faults())

    def mark_of(self, device: Device) -> Mark | None:
        """Return the mark of a device; a slice also has its GPU's."""
        return self.marks.get(device.uuid) or self.marks.get(device.parent or "")

    async def wait_free(self, device: Device) -> None:
        """Return when an engine may start on a device.

        Raises:
            DeviceSick: it is marked; the text says why.
        """
        uuid, began_at, finding = device.uuid, time.monotonic(), MemoryFinding.FREE
        while self.mark_of(device) is None:
            await self.refresh()
            finding = self._find(uuid, waited_s=time.monotonic() - began_at)
            if finding is not MemoryFinding.COMING_BACK:
                break
            await anyio.sleep(POLL_S)
        if finding is MemoryFinding.LOST:
            now, before = self.memory[uuid], self._before[uuid]
            lost = now.unexplained_mib - before.unexplained_mib
            because = f"{lost} MiB of an engine that has ended have not come back, and no process has them"
            self._mark(uuid, Mark(because=because, is_memory=True))
        mark = self.mark_of(device)
        if mark is not None:
            raise DeviceSick(uuid, mark.because)

    async def check_slice(self, device: Device) -> None:
        """Check that an engine which is shown a slice sees it; each slice is checked until it passes.

        Raises:
            SpawnFailed: it would not.
        """
        if device.is_slice and device.uuid not in self._seen_right:
            await anyio.to_thread.run_sync(check_view, device, abandon_on_cancel=True)
            self._seen_right.add(device.uuid)

    @contextmanager
    def engine_on(self, uuid: str) -> Iterator[None]:
        """Count an engine of ours on a device for a block, which lasts until its processes are gone."""
        if not self._engines[uuid] and uuid in self.memory:
            self._before[uuid] = self.memory[uuid]
        self._engines[uuid] += 1
        try:
            yield
        finally:
            self._engines[uuid] -= 1

    def forgive(self, device: Device) -> None:
        """Remove a device's mark: an operator has dealt with it."""
        self._before.pop(device.uuid, None)
        for uuid in (device.uuid, device.parent or ""):
            if self.marks.pop(uuid, None) is not None:
                logger.info("device %s: an operator wants it used again", uuid)
                self.on_mark()

    def _find(self, uuid: str, *, waited_s: float) -> MemoryFinding:
        if uuid == CPU:  # all programs share the host's memory
            return MemoryFinding.FREE
        is_alone = not self._engines[uuid]
        return judge_memory(self._before.get(uuid), self.memory.get(uuid), alone=is_alone, waited_s=waited_s)

    def _mark(self, uuid: str, mark: Mark) -> None:
        known = self.marks.get(uuid)
        if known is None or (known.is_memory and not mark.is_memory):
            self.marks[uuid] = mark
            logger.error("device %s is left alone: %s", uuid, mark.because)
            self.on_mark()

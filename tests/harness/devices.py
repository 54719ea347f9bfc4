"""A machine with two GPUs that nobody here has: a real ``nvidia-smi`` tells of them, and a file is the kernel's log."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.waiting import wait_until
from workers.devices.device import Gpu
from workers.devices.nvidia_smi import read_nvidia_smi
from workers.devices.readers import MachineReader

TOTAL_MIB: Final = 10_000
FIRST, SECOND = "GPU-0", "GPU-1"
GPUS: Final = [Gpu(index=n, uuid=uuid, name="Tesla T4", memory_mib=TOTAL_MIB) for n, uuid in enumerate((FIRST, SECOND))]
LOOK_S: Final = 0.02
_PROGRAM: Final = """\
#!/bin/sh
echo "$1" >> "${0%/*}/asked"
case "$1" in
  --query-gpu=index,*) cat "${0%/*}/table" ;;
  --query-gpu=uuid,*) cat "${0%/*}/used" ;;
  --query-compute-apps=*) cat "${0%/*}/processes" ;;
  *) echo "this was not expected: $*"; exit 2 ;;
esac
"""


class Machine:
    """Its devices have what the test says; they are looked at often."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._folder = folder
        self._used: dict[str, tuple[int, Mapping[int, int]]] = {gpu.uuid: (100, {}) for gpu in GPUS}
        self.log = folder / "kmsg"
        self.log.touch()
        self._write("table", "".join(f"{gpu.index}, {gpu.uuid}, {gpu.name}, {TOTAL_MIB}, [N/A]\n" for gpu in GPUS))
        self.use(FIRST, 100)
        program = folder / "nvidia-smi"
        program.write_text(_PROGRAM)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        # This machine's own devices are left out, where it has some.
        monkeypatch.setattr("workers.devices.discovery.READERS", (read_nvidia_smi,))
        monkeypatch.setattr("workers.devices.readers.open_nvml", lambda: None)
        monkeypatch.setattr("service.inference.inference_engine.MachineReader", partial(MachineReader, self.log))
        monkeypatch.setattr("workers.devices.device_health.LOOK_S", LOOK_S)
        monkeypatch.setattr("workers.devices.device_health.POLL_S", LOOK_S)
        monkeypatch.setattr("workers.lanes.lane_pool.LOOK_S", LOOK_S)

    def use(self, uuid: str, mib: int, held: Mapping[int, int] | None = None) -> None:
        """Have so much of a device's memory used, of which processes have their parts."""
        self._used[uuid] = mib, held or {}
        rows = [(uuid, pid, part) for uuid, (_, parts) in self._used.items() for pid, part in parts.items()]
        self._write("processes", "".join(f"{uuid}, {pid}, {part}\n" for uuid, pid, part in rows))
        buses = {gpu.uuid: f"00000000:{gpu.index:02X}:00.0" for gpu in GPUS}
        self._write("used", "".join(f"{u}, {buses[u]}, {TOTAL_MIB}, {mib}\n" for u, (mib, _) in self._used.items()))

    async def show(self, uuid: str, mib: int, held: Mapping[int, int] | None = None) -> None:
        """Do the same, and return when it was looked at."""
        self.use(uuid, mib, held)
        await self.wait_looks(2)  # one may have begun before

    async def wait_looks(self, looks: int) -> None:
        """Return when its devices were looked at so many times more."""
        until = len(self._asked()) + looks * len(("memory", "processes"))
        await wait_until(lambda: len(self._asked()) > until, "its devices were looked at")

    def fail(self, uuid: str, xid: int) -> None:
        """Have the kernel log an Xid of a device."""
        (index,) = (gpu.index for gpu in GPUS if gpu.uuid == uuid)
        with self.log.open("a") as log:
            log.write(f"4,1707,812345678,-;NVRM: Xid (PCI:0000:{index:02x}:00): {xid}, pid=1, name=a, b\n")

    def _asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()

    def engines(self, uuid: str) -> list[int]:
        """Return the engines that run on a device."""
        (index,) = (gpu.index for gpu in GPUS if gpu.uuid == uuid)
        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if _is_engine_on(child, str(index))]

    def _write(self, name: str, text: str) -> None:
        half = self._folder / f"{name}.half"
        half.write_text(text)
        half.replace(self._folder / name)  # a look never sees half of it


def _is_engine_on(child: psutil.Process, index: str) -> bool:
    try:
        is_engine = child.cmdline()[3:4] == [str(ENGINE_PROGRAM)]  # a guardian has it further behind
        return is_engine and child.environ().get("CUDA_VISIBLE_DEVICES") == index
    except psutil.Error:
        return False

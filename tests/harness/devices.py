"""A machine with two invented GPUs: a stand-in for NVML reads files, and one file is the kernel's log."""

import ctypes
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.conftest import ENGINE_PROGRAM
from tests.harness.stand_ins import NVML, NVML_LIBRARY, compiled, take_nvml
from tests.harness.waiting import wait_until
from workers.devices.device import Gpu
from workers.devices.readers import MachineReader

# The two T4s of nvml_stand_in.c.
TOTAL_MIB: Final = 10_000
FIRST, SECOND = "GPU-0", "GPU-1"
GPUS: Final = [Gpu(index=n, uuid=uuid, name="Tesla T4", memory_mib=TOTAL_MIB) for n, uuid in enumerate((FIRST, SECOND))]
LOOK_S: Final = 0.02


class Machine:
    """Its devices have what the test sets; they are read often."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self._file = folder / "used"
        self._used: dict[str, tuple[int, Mapping[int, int]]] = {gpu.uuid: (100, {}) for gpu in GPUS}
        self.log = folder / "kmsg"
        self.log.touch()
        self.use(FIRST, 100)
        monkeypatch.setenv("STAND_IN_USED", str(self._file))
        library = take_nvml(compiled(NVML, folder / NVML_LIBRARY), monkeypatch)
        self._looks = ctypes.c_uint.in_dll(library, "looks")
        monkeypatch.setattr("roundhouse.inference.inference_engine.MachineReader", partial(MachineReader, self.log))
        monkeypatch.setattr("workers.devices.device_health.LOOK_S", LOOK_S)
        monkeypatch.setattr("workers.devices.device_health.POLL_S", LOOK_S)
        monkeypatch.setattr("workers.lanes.lane_pool.LOOK_S", LOOK_S)

    def use(self, uuid: str, mib: int, held: Mapping[int, int] | None = None) -> None:
        """Set a device's used memory, and the processes' parts of it."""
        self._used[uuid] = mib, held or {}
        rows = [
            " ".join([name, str(used), *(f"{pid}:{part}" for pid, part in parts.items())])
            for name, (used, parts) in self._used.items()
        ]
        half = self._file.with_suffix(".half")
        half.write_text("".join(f"{row}\n" for row in rows))
        half.replace(self._file)  # a look never sees half of it

    async def show(self, uuid: str, mib: int, held: Mapping[int, int] | None = None) -> None:
        """Do the same, and return when it was read."""
        self.use(uuid, mib, held)
        await self.wait_looks(2)  # one may have begun before

    async def wait_looks(self, looks: int) -> None:
        """Wait until this process has read its devices this many more times."""
        until = self._looks.value + looks * len(GPUS)
        await wait_until(lambda: self._looks.value > until, "its devices were looked at")

    def fail(self, uuid: str, xid: int) -> None:
        """Have the kernel log an Xid of a device."""
        (index,) = (gpu.index for gpu in GPUS if gpu.uuid == uuid)
        with self.log.open("a") as log:
            log.write(f"4,1707,812345678,-;NVRM: Xid (PCI:0000:{index:02x}:00): {xid}, pid=1, name=a, b\n")

    def engines(self, uuid: str) -> list[int]:
        """Return the engines that run on a device."""
        (index,) = (gpu.index for gpu in GPUS if gpu.uuid == uuid)
        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if _is_engine_on(child, str(index))]


def _is_engine_on(child: psutil.Process, index: str) -> bool:
    try:
        is_engine = child.cmdline()[3:4] == [str(ENGINE_PROGRAM)]  # a guardian has it further behind
        return is_engine and child.environ().get("CUDA_VISIBLE_DEVICES") == index
    except psutil.Error:
        return False

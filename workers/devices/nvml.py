"""The devices of NVIDIA's driver, read through NVML.

Source: NVIDIA, "NVML API Reference Guide". The binding is ``nvidia-ml-py``, which loads the driver's own library
``libnvidia-ml.so.1``; CUDA's variables hide nothing from it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from workers.devices.device import DeviceMemory, Gpu, MigSlice
from workers.errors import DevicesUnreadable

MIB = 1024 * 1024


def open_nvml() -> "NvmlSession | None":
    """Return a session with the driver; None without a driver.

    Raises:
        DevicesUnreadable: there is a driver, and it fails.
    """
    import pynvml  # noqa: PLC0415 - its 8,000 lines take 10 ms of a start, and most commands need no driver

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise DevicesUnreadable(f"NVML: {error}") from error
    return NvmlSession(pynvml)


class NvmlSession:
    """The driver's library, initialised; ``close`` releases it."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._events: Any = None  # a handle of C's: the Xids of all GPUs
        self._uuids: dict[int, str] = {}  # by handle: one that has fallen off its bus no longer reports its own

    def __repr__(self) -> str:
        return "<NvmlSession>"

    def close(self) -> None:
        """Release the driver."""
        self._nvml.nvmlShutdown()

    def gpus(self) -> list[Gpu]:
        """Return the GPUs in the driver's order; one that the driver cannot read is marked lost or hidden.

        Raises:
            DevicesUnreadable: the driver fails.
        """
        with self._readable():
            count = self._nvml.nvmlDeviceGetCount()
        gpus = [self._gpu(index) for index in range(count)]
        if all(gpu.lost is None and gpu.hidden is None for gpu in gpus):
            return gpus
        # CUDA does not count lost or forbidden GPUs, so the others' numbers may be lower.
        return [replace(gpu, shown_as=gpu.uuid) for gpu in gpus]

    def _gpu(self, index: int) -> Gpu:
        nvml = self._nvml
        try:
            return _gpu(nvml, index)
        except nvml.NVMLError_NoPermission:
            hidden = "the container or its control group, which gives no permission for it"
            return Gpu(index=index, uuid=f"GPU {index}", name="", memory_mib=None, hidden=hidden)
        except nvml.NVMLError as error:
            return Gpu(index=index, uuid=f"GPU {index}", name="", memory_mib=None, lost=str(error))

    def memory(self) -> dict[str, DeviceMemory]:
        """Return the present memory of each GPU and each slice, without those that are lost.

        Raises:
            DevicesUnreadable: the driver fails.
        """
        with self._readable():
            handles = self._handles()
        found: dict[str, DeviceMemory | None] = {}
        for gpu in handles:
            with suppress(self._nvml.NVMLError):
                for handle in (gpu, *self._slices_of(gpu)):
                    found[_text(self._nvml.nvmlDeviceGetUUID(handle))] = _used(self._nvml, handle)
        return {uuid: memory for uuid, memory in found.items() if memory is not None}

    def buses(self) -> dict[str, str]:
        """Return the UUIDs of the GPUs by their places on the PCI bus.

        Raises:
            DevicesUnreadable: the driver fails.
        """
        buses: dict[str, str] = {}
        with self._readable():
            for gpu in self._handles():
                with suppress(self._nvml.NVMLError):
                    bus = _text(self._nvml.nvmlDeviceGetPciInfo(gpu).busId)
                    buses[bus.lower().split(".")[0]] = _text(self._nvml.nvmlDeviceGetUUID(gpu))
        return buses

    def faults(self) -> list[tuple[str, int]]:
        """Return the Xids since the last call, each with its GPU; empty if the driver reports none."""
        nvml, found = self._nvml, []
        with suppress(nvml.NVMLError):
            if self._events is None:
                self._uuids = {_number(gpu): _text(nvml.nvmlDeviceGetUUID(gpu)) for gpu in self._handles()}
                self._events = nvml.nvmlEventSetCreate()
                for gpu in self._handles():
                    with suppress(nvml.NVMLError):  # not all cards report them
                        nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._events)
            while True:
                event = nvml.nvmlEventSetWait(self._events, 0)
                uuid = self._uuids.get(_number(event.device))
                found.append((uuid or _text(nvml.nvmlDeviceGetUUID(event.device)), int(event.eventData)))
        return found

    def _handles(self) -> list[Any]:
        """Return the handles of the GPUs, without those that are lost or forbidden."""
        nvml, handles = self._nvml, []
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        return handles

    def _slices_of(self, gpu: Any) -> Iterator[Any]:  # noqa: ANN401 - a handle of C's
        places = 0
        with _may_be_absent(self._nvml):
            places = self._nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
        for number in range(places):
            with _may_be_absent(self._nvml):
                yield self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise DevicesUnreadable(f"NVML: {error}") from error


def _used(nvml: ModuleType, handle: Any) -> DeviceMemory | None:  # noqa: ANN401 - a handle of C's
    held: dict[int, int] | None = None
    with _may_be_absent(nvml):
        # The unnumbered call raises the binding's own error, no NVMLError, with drivers before R510.
        processes = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        if processes and all(each.usedGpuMemory is not None for each in processes):  # none visible: a container's view
            held = {int(each.pid): int(each.usedGpuMemory) // MIB for each in processes}
    with _may_be_absent(nvml):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        if not memory.total:  # GPUs that share the host's memory report 0, which means unknown
            return None
        return DeviceMemory(total_mib=int(memory.total) // MIB, used_mib=int(memory.used) // MIB, held=held)
    return None


def _gpu(nvml: ModuleType, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_mib=_memory_mib(nvml, handle),
        mig=_slices(nvml, handle),
    )


def _slices(nvml: ModuleType, gpu: Any) -> tuple[MigSlice, ...] | None:  # noqa: ANN401 - a handle of C's
    mode = nvml.NVML_DEVICE_MIG_DISABLE
    with _may_be_absent(nvml):
        mode, _pending = nvml.nvmlDeviceGetMigMode(gpu)
    if mode == nvml.NVML_DEVICE_MIG_DISABLE:
        return None
    slices = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        with _may_be_absent(nvml):  # it counts places, and some are empty
            slices.append(_slice(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)))
    return tuple(slices)


def _slice(nvml: ModuleType, handle: Any) -> MigSlice:  # noqa: ANN401 - a handle of C's
    profile = _text(nvml.nvmlDeviceGetName(handle)).rpartition(" MIG ")[2]  # "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    return MigSlice(uuid=_text(nvml.nvmlDeviceGetUUID(handle)), profile=profile, memory_mib=_memory_mib(nvml, handle))


def _memory_mib(nvml: ModuleType, handle: Any) -> int | None:  # noqa: ANN401 - a handle of C's
    with _may_be_absent(nvml):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB or None  # a Jetson reports 0
    return None


def _may_be_absent(nvml: ModuleType) -> suppress:
    """Ignore values that this device, this driver or this container does not report."""
    return suppress(
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
    )


def _number(handle: Any) -> int:  # noqa: ANN401 - a handle of C's
    return ctypes.addressof(handle.contents)


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name

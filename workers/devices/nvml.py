"""What NVIDIA's driver tells of its devices, through NVML.

Source: NVIDIA, "NVML API Reference Guide". The binding is ``nvidia-ml-py`` (the extra ``gpus``), which loads the
driver's own library; CUDA's variables hide nothing from it.
"""

from contextlib import suppress
from types import ModuleType
from typing import Any

from workers.devices.device import Gpu, MigSlice
from workers.errors import DevicesUnreadable

MIB = 1024 * 1024


def read_nvml() -> list[Gpu] | None:
    """Return the GPUs in the driver's order; None where there is no binding or no driver to ask.

    Raises:
        DevicesUnreadable: there is a driver, and it fails.
    """
    try:
        import pynvml  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise DevicesUnreadable(f"NVML: {error}") from error
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise DevicesUnreadable(f"NVML: {error}") from error
    finally:
        pynvml.nvmlShutdown()


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
        with _may_be_absent(nvml):  # it counts the places, of which some are empty
            slices.append(_slice(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)))
    return tuple(slices)


def _slice(nvml: ModuleType, handle: Any) -> MigSlice:  # noqa: ANN401 - a handle of C's
    profile = _text(nvml.nvmlDeviceGetName(handle)).rpartition(" MIG ")[2]  # "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    return MigSlice(uuid=_text(nvml.nvmlDeviceGetUUID(handle)), profile=profile, memory_mib=_memory_mib(nvml, handle))


def _memory_mib(nvml: ModuleType, handle: Any) -> int | None:  # noqa: ANN401 - a handle of C's
    with _may_be_absent(nvml):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB
    return None


def _may_be_absent(nvml: ModuleType) -> suppress:
    """Pass over what this device, this driver or this container does not tell."""
    return suppress(
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
    )


def _text(name: str | bytes) -> str:
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else name

"""What a program sees that is shown one MIG slice alone: an engine that sees the whole GPU would fill it.

Asked of CUDA's own library, in a process of its own with the engine's variables, since a process may ask once.

Source: NVIDIA, "CUDA Driver API" and "Multi-Instance GPU User Guide".
"""

import os
import subprocess
import sys
from typing import Final

from workers.devices.layout import Device
from workers.errors import SpawnFailed

LIMIT_S: Final = 60.0  # a driver that wakes up takes seconds
TOLERANCE_PERCENT: Final = 10  # of a slice, which the driver keeps for itself
MIB: Final = 1024 * 1024
ABSENT: Final = 3  # there is no such library: nothing of CUDA's would run either
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


def check_view(device: Device) -> None:
    """Return if a program that is shown a slice sees the slice's memory; blocks for as long as a driver takes.

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

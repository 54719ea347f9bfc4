"""The machine of the stand-in for NVML, and what programs read of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.harness.stand_ins import NVML, NVML_LIBRARY, compiled
from tests.harness.waiting import LIMIT_S
from workers.devices.device import DeviceMemory, Gpu, MigSlice

ROOT: Final = Path(__file__).parents[2]

# The machine of nvml_stand_in.c.
MACHINE: Final = [
    Gpu(
        index=0,
        uuid="GPU-00000000-aaaa-4aaa-8aaa-000000000000",
        name="NVIDIA H100 80GB HBM3",
        memory_mib=81559,
    ),
    Gpu(
        index=1,
        uuid="GPU-11111111-aaaa-4aaa-8aaa-000000000001",
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        mig=(
            MigSlice(uuid="MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000000", profile="3g.40gb", memory_mib=40192),
            MigSlice(uuid="MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000002", profile="1g.10gb+me", memory_mib=9728),
            MigSlice(uuid="MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000003", profile="1c.2g.20gb", memory_mib=None),
        ),
    ),
    Gpu(index=2, uuid="GPU-22222222-aaaa-4aaa-8aaa-000000000002", name="Tesla T4", memory_mib=15109),
    Gpu(index=3, uuid="GPU-33333333-aaaa-4aaa-8aaa-000000000003", name="NVIDIA GB10", memory_mib=None),
    Gpu(index=4, uuid="GPU-44444444-aaaa-4aaa-8aaa-000000000004", name="NVIDIA A30", memory_mib=24576, mig=()),
]

# Memory of that machine. One process of GPU 2 does not show its own.
H100, SLICED, T4, GB10, A30 = (gpu.uuid for gpu in MACHINE)
SLICES: Final = [each.uuid for each in MACHINE[1].mig or ()]
MEMORY: Final = {
    H100: DeviceMemory(total_mib=81559, used_mib=10194, held={4242: 9000, 4243: 1000}),
    SLICED: DeviceMemory(total_mib=81920, used_mib=10240),
    T4: DeviceMemory(total_mib=15109, used_mib=1888),
    A30: DeviceMemory(total_mib=24576, used_mib=3072),
}
SLICES_MEMORY: Final = {
    SLICES[0]: DeviceMemory(total_mib=40192, used_mib=5024, held={77: 2048}),
    SLICES[1]: DeviceMemory(total_mib=9728, used_mib=1216),
}
BUSES: Final = {
    "00000000:19:00": H100,
    "00000000:3b:00": SLICED,
    "00000000:5e:00": T4,
    "0000000f:01:00": GB10,
    "00000010:01:00": A30,
}


def built(folder: Path, *options: str) -> Path:
    compiled(NVML, folder / NVML_LIBRARY, *options)
    return folder


def said_with(libraries: Path, program: str, **environment: str) -> list[str]:
    """Return the lines that a program prints if the loader searches this folder first."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()

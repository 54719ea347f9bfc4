"""Stand-ins for the libraries of NVIDIA's driver: programs load them as they would load the driver's own."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.harness.waiting import LIMIT_S

NVML: Final = Path(__file__).with_name("nvml_stand_in.c")
NVML_LIBRARY: Final = "libnvidia-ml.so.1"


def compiled(source: Path, library: Path, *options: str) -> Path:
    """Return a library of a file in C, made here; a machine without a compiler skips the test."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the library that stands in for NVIDIA's")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, source], check=True, timeout=LIMIT_S)
    return library


def take_nvml(library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Make the binding use this library, here and in processes started from now on; return it.

    A process's loader reads its environment once, and the binding keeps the first library that it finds, on a machine
    with GPUs the driver's own. So here the stand-in replaces that one.
    """
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr("pynvml.nvmlLib", loaded)
    monkeypatch.setattr("pynvml._nvmlGetFunctionPointer_cache", {})
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent), prepend=os.pathsep)
    return loaded

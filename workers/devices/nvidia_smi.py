"""What the program ``nvidia-smi`` tells of its devices, where NVML cannot be asked.

NVIDIA does not promise the form of its output: what is read here was that of drivers from R450 to R580. The table tells
the GPUs, the list the UUIDs of MIG slices, and the XML their memory, which names no UUID: list and XML have the slices
of a GPU in one order.
"""

import csv
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET  # its own driver's output
from collections.abc import Mapping
from typing import Final

from workers.devices.device import Gpu, MigSlice
from workers.devices.memory import DeviceMemory
from workers.errors import DevicesUnreadable

PROGRAM: Final = "nvidia-smi"
LIMIT_S: Final = 20.0  # a driver that wakes up all of its GPUs first takes some seconds
WARNED: Final = 14  # the infoROM of a card is corrupted; the table is whole
TABLE: Final = ("--query-gpu=index,uuid,name,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
MEMORY: Final = ("--query-gpu=uuid,pci.bus_id,memory.total,memory.used", "--format=csv,noheader,nounits")
PROCESSES: Final = ("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_LISTED_GPU: Final = re.compile(r"^GPU (?P<index>\d+): .*\(UUID: (?P<uuid>[^)]+)\)")
_LISTED_SLICE: Final = re.compile(r"^\s+MIG (?P<profile>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")


def read_nvidia_smi() -> list[Gpu] | None:
    """Return the GPUs in the driver's order; None where there is no such program, or no driver behind it.

    Raises:
        DevicesUnreadable: it fails, or says what cannot be read.
    """
    table = _ask(*TABLE)
    if table is None:
        return None
    listing = details = ""
    if any(row[-1] == "Enabled" for row in _rows(table)):
        listing, details = _ask("-L") or "", _ask("-q", "-x") or ""
    return parse(table, listing, details)


def read_memory() -> tuple[dict[str, DeviceMemory], dict[str, str]]:
    """Return what each GPU's memory holds, by its UUID, and the UUIDs by their places on the PCI bus.

    Raises:
        DevicesUnreadable: it fails.
    """
    memory: dict[str, DeviceMemory] = {}
    buses: dict[str, str] = {}
    table = _rows(_ask(*MEMORY) or "")
    held: dict[str, dict[int, int]] = {}
    hidden: set[str] = set()  # of a process there it is not told what it has
    for row in _rows(_ask(*PROCESSES) or "") if table else ():
        if len(row) == len(("uuid", "pid", "memory")) and row[1].isdecimal() and row[2].isdecimal():
            held.setdefault(row[0], {})[int(row[1])] = int(row[2])
        else:
            hidden.add(row[0])
    for row in table:
        if len(row) == len(("uuid", "bus", "total", "used")):
            uuid, bus, total, used = row
            buses[bus.lower().split(".")[0]] = uuid
            if total.isdecimal() and used.isdecimal():
                seen = held.get(uuid) if uuid not in hidden else None
                memory[uuid] = DeviceMemory(total_mib=int(total), used_mib=int(used), held=seen)
    return memory, buses


def parse(table: str, listing: str = "", details: str = "") -> list[Gpu]:
    """Return the GPUs of the three outputs; ``listing`` and ``details`` are only of use where slices are.

    Raises:
        DevicesUnreadable: the table is none.
    """
    slices = _slices(listing, _slice_memory(details))
    gpus = []
    for row in _rows(table):
        try:
            index, uuid, name, memory, mig_mode = row
            number = int(index)
        except ValueError as error:
            raise DevicesUnreadable(f"{PROGRAM} has a line that cannot be read: {', '.join(row)!r}") from error
        gpus.append(
            Gpu(
                index=number,
                uuid=uuid,
                name=name,
                memory_mib=int(memory) if memory.isdecimal() else None,  # [N/A] where memory is shared with the host
                mig=tuple(slices.get(uuid, ())) if mig_mode == "Enabled" else None,
            )
        )
    return gpus


def _rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if not line.startswith("WARNING")]
    return [[cell.strip() for cell in row] for row in csv.reader(lines, skipinitialspace=True) if row]


def _slices(listing: str, memory: Mapping[str, list[int | None]]) -> dict[str, list[MigSlice]]:
    slices: dict[str, list[MigSlice]] = {}
    gpu = ""
    for line in listing.splitlines():
        if found := _LISTED_GPU.match(line):
            gpu = found["uuid"]
        elif found := _LISTED_SLICE.match(line):
            known, place = memory.get(gpu, []), len(slices.setdefault(gpu, []))
            size = known[place] if place < len(known) else None
            slices[gpu].append(MigSlice(uuid=found["uuid"], profile=found["profile"], memory_mib=size))
    return slices


def _slice_memory(details: str) -> dict[str, list[int | None]]:
    """Return the MiB of each slice, by the UUID of its GPU."""
    if not details.strip():
        return {}
    try:
        root = ET.fromstring(details)  # noqa: S314 - its own driver's output
    except ET.ParseError as error:
        raise DevicesUnreadable(f"{PROGRAM} -q -x is no XML: {error}") from error
    return {
        gpu.findtext("uuid", ""): [
            _mib(each.findtext("fb_memory_usage/total", "")) for each in gpu.iterfind("mig_devices/mig_device")
        ]
        for gpu in root.iterfind("gpu")
    }


def _mib(text: str) -> int | None:
    number = text.partition(" ")[0]
    return int(number) if number.isdecimal() else None


def _ask(*options: str) -> str | None:
    """Return what the program prints, None where it is not there or finds no driver.

    Raises:
        DevicesUnreadable: it fails.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        return None
    command = [program, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise DevicesUnreadable(f"{PROGRAM} has not answered within {LIMIT_S:g} s") from error
    except OSError as error:
        raise DevicesUnreadable(f"{PROGRAM}: {error.strerror}") from error
    if done.returncode in (0, WARNED):
        return done.stdout
    said = (done.stdout + done.stderr).strip()
    if "couldn't communicate with the NVIDIA driver" in said or "No devices were found" in said:
        return None
    raise DevicesUnreadable(f"{PROGRAM} ended with {done.returncode}: {said[:300]}")

"""What NVML reports about a machine: its devices, their memory and their faults."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.harness.nvml_machine import BUSES, H100, MACHINE, MEMORY, SLICES_MEMORY, T4, built, said_with
from tests.harness.stand_ins import NVML_LIBRARY
from workers.devices.device import DeviceMemory, Gpu

# The binding loads its library once for a process, so each reading has a process of its own.
FINDING: Final = """\
from workers.devices.discovery import find_gpus
from workers.errors import DevicesUnreadable
try:
    print(find_gpus())
except DevicesUnreadable as error:
    print("unreadable:", error)
"""


AFTERWARDS: Final = """\
import pynvml
try:
    print(pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError as error:
    print(error)
"""


def test_nvml_describes_a_machine(driver: Path) -> None:
    """MIG modes off, partly filled, empty or absent; unknown memory; profiles by name."""
    assert said_with(driver, FINDING) == [repr(MACHINE)]


def test_nvml_is_left_as_it_was_found(driver: Path) -> None:
    """Every start of NVML is followed by its end, even if a GPU fails in between."""
    assert said_with(driver, FINDING + AFTERWARDS)[1:] == ["Uninitialized"]
    assert said_with(driver, FINDING + AFTERWARDS, STAND_IN_LOST="2")[1:] == ["Uninitialized"]


def test_a_driver_from_before_mig_has_whole_gpus(tmp_path: Path) -> None:
    """Its library lacks the function, which is no failure."""
    whole = [replace(gpu, mig=None) for gpu in MACHINE]
    assert said_with(built(tmp_path, "-DWITHOUT_MIG"), FINDING) == [repr(whole)]


def test_a_lost_gpu_is_reported_by_its_number(driver: Path) -> None:
    """Work that needs it must not move silently. CUDA does not count a lost GPU, so the others are given by UUID."""
    lost = [replace(gpu, shown_as=gpu.uuid) for gpu in MACHINE]
    lost[2] = Gpu(index=2, uuid="GPU 2", name="", memory_mib=None, lost="GPU is lost", shown_as="GPU 2")
    assert said_with(driver, FINDING, STAND_IN_LOST="2") == [repr(lost)]


def test_a_gpu_that_we_may_not_use_is_hidden(driver: Path) -> None:
    """A Slurm job's control group may forbid it: that is no failure of the machine."""
    (found,) = said_with(driver, FINDING, STAND_IN_LOST="2", STAND_IN_LOST_AS="4")
    assert "hidden='the container or its control group, which gives no permission for it'" in found
    assert f"lost=None, shown_as='{H100}'" in found  # CUDA does not count it
    assert "is lost" not in found


def test_memory_reported_as_zero_is_unknown(driver: Path) -> None:
    """A Jetson shares the host's memory: NVML reports 0."""
    whole, (memory, *_) = said_with(driver, FINDING), said_with(driver, LOOKING, STAND_IN_TOTAL_0="2")
    assert said_with(driver, FINDING, STAND_IN_TOTAL_0="2") == [whole[0].replace("15109", "None")]
    assert T4 not in memory


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("9", "[]"),
        ("12", "[]"),
        ("18", "unreadable: NVML: RM has detected an NVML/RM version mismatch."),
        ("25", "unreadable: NVML: an error of the stand-in"),
    ],
    ids=["driver-not-loaded", "library-not-found", "version-mismatch", "unknown-to-the-binding"],
)
def test_a_missing_driver_is_not_a_failing_one(driver: Path, result: str, said: str) -> None:
    """The first means no GPUs, the second that they are unknown."""
    assert said_with(driver, FINDING, STAND_IN_INIT=result) == [said]


def test_a_machine_without_the_library_has_no_gpus(tmp_path: Path) -> None:
    """The binding is installed everywhere, with or without a driver. A file that cannot be loaded counts as none."""
    (tmp_path / NVML_LIBRARY).touch()
    assert said_with(tmp_path, FINDING) == ["[]"]


LOOKING: Final = """\
from workers.devices.nvml import open_nvml
from workers.errors import DevicesUnreadable
session = open_nvml()
for look in (session.memory, session.buses, session.faults, session.faults, session.memory):
    try:
        print(look())
    except DevicesUnreadable as error:
        print("unreadable:", error)
session.close()
"""


def test_nvml_reports_memory_and_buses(driver: Path) -> None:
    """The memory of devices and processes, and their place on the bus.

    A GPU without visible processes has none, as in a container, and so has one that hides a process's memory. A device
    that reports no memory is left out.
    """
    memory, buses, *_ = said_with(driver, LOOKING)
    assert eval(memory, {"DeviceMemory": DeviceMemory}) == {**MEMORY, **SLICES_MEMORY}  # noqa: S307 - printed by us
    assert buses == repr(BUSES)


def test_faults_are_reported_once_each_with_their_gpu(driver: Path) -> None:
    """All faults since the last look, in order."""
    faults, again = said_with(driver, LOOKING, STAND_IN_XIDS="2:31 0:48 2:94")[2:4]
    assert (faults, again) == (repr([(T4, 31), (H100, 48), (T4, 94)]), "[]")


def test_the_fault_of_a_gpu_that_has_fallen_off_its_bus_is_reported(driver: Path) -> None:
    """The driver reports nothing else about it any more, not even its UUID."""
    faults, again, memory = said_with(driver, LOOKING, STAND_IN_XIDS="2:79")[2:]
    assert (faults, again) == (repr([(T4, 79)]), "[]")
    assert T4 not in memory
    assert H100 in memory


def test_a_card_without_fault_events_hides_no_other_cards_faults(driver: Path) -> None:
    """Some cards have no events."""
    (faults,) = said_with(driver, LOOKING, STAND_IN_XIDS="0:48 2:94", STAND_IN_REGISTER="3")[2:3]
    assert faults == repr([(T4, 94)])


@pytest.mark.parametrize("result", ["3", "4", "999"], ids=["not-supported", "no-permission", "unknown"])
def test_a_driver_without_events_reports_the_rest(driver: Path, result: str) -> None:
    """As in many containers."""
    whole = said_with(driver, LOOKING)
    assert whole[2:4] == ["[]", "[]"]
    assert said_with(driver, LOOKING, STAND_IN_XIDS="0:48", STAND_IN_EVENTS=result) == whole


def test_a_driver_from_before_events_and_processes_reports_the_rest(tmp_path: Path) -> None:
    """Its library lacks both functions: the memory of processes is unknown."""
    memory, buses, *faults = said_with(built(tmp_path, "-DWITHOUT_EVENTS", "-DWITHOUT_MIG"), LOOKING)[:4]
    told = eval(memory, {"DeviceMemory": DeviceMemory})  # noqa: S307 - printed by us
    assert told == {uuid: replace(each, held=None) for uuid, each in MEMORY.items()}
    assert (buses, faults) == (repr(BUSES), ["[]", "[]"])


def test_a_lost_gpu_hides_no_other(driver: Path) -> None:
    """The others' memory, buses and faults are reported."""
    memory, buses, faults, *_ = said_with(driver, LOOKING, STAND_IN_LOST="2", STAND_IN_XIDS="0:48")
    told = eval(memory, {"DeviceMemory": DeviceMemory})  # noqa: S307 - printed by us
    assert told == {uuid: each for uuid, each in {**MEMORY, **SLICES_MEMORY}.items() if uuid != T4}
    assert buses == repr({bus: uuid for bus, uuid in BUSES.items() if uuid != T4})
    assert faults == repr([(H100, 48)])

"""A machine is read through NVML and the kernel's log, even if one of them fails."""

from pathlib import Path
from typing import Final

import pytest

from tests.harness.nvml_machine import GB10, H100, MEMORY, SLICED, SLICES_MEMORY, T4, said_with
from tests.harness.stand_ins import NVML_LIBRARY, take_nvml
from workers.devices.device import CPU
from workers.devices.readers import MachineReader


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    """Return a file in place of the kernel's log, with old records."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n")
    return log


@pytest.fixture
def told(driver: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have this process ask the stand-in, and return a function that sets its variables."""
    take_nvml(driver / NVML_LIBRARY, monkeypatch)
    return monkeypatch


def logged(log: Path, text: str) -> None:
    """Add a record to a kernel's log."""
    with log.open("a", errors="surrogateescape") as file:
        file.write(f"4,1707,812345678,-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:19:00.0\n")


def faults_after(reader: MachineReader, log: Path, text: str) -> set[tuple[str, int]]:
    """Return the faults that a reader finds in a record; the kernel gives one record per read."""
    logged(log, text)
    return set(reader.faults())


@pytest.mark.parametrize(
    ("record", "faults"),
    [
        (
            "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            {(H100, 79)},
        ),
        ("NVRM: Xid (PCI:0000:5e:00): 31, pid=4242, name=python3, Ch 00000008, intr 00000000. MMU Fault", {(T4, 31)}),
        ("NVRM: Xid (PCI:000f:01:00): 119, Timeout waiting for RPC from GSP!", {(GB10, 119)}),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
            {(SLICED, 94)},
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception",
            {(SLICED, 13)},
        ),
        ("NVRM: Xid (PCI:0000:99:00): 79, pid=1, GPU has fallen off the bus.", set()),
        ("NVRM: GPU at PCI:0000:19:00: GPU-00000000-aaaa-4aaa-8aaa-000000000000", set()),
        ("usb 1-1: new high-speed USB device number 79 using xhci_hcd", set()),
        ("\udcff\udcfe NVRM: Xid (PCI:0000:5e:00): 48, DBE", {(T4, 48)}),
    ],
    ids=["lost", "program", "domain", "slice", "compute-instance", "other-gpu", "no-xid", "other", "bytes"],
)
@pytest.mark.usefixtures("told")
def test_the_kernels_log_reports_faults(kernel_log: Path, record: str, faults: set[tuple[str, int]]) -> None:
    """By a GPU's place on the bus; for a GPU in MIG mode it may name the slice too."""
    reader = MachineReader(kernel_log)
    reader.memory()
    assert set(reader.faults()) == set()
    assert faults_after(reader, kernel_log, record) == faults
    assert set(reader.faults()) == set()
    reader.close()


def test_a_fault_is_reported_though_the_driver_fails_afterwards(kernel_log: Path, told: pytest.MonkeyPatch) -> None:
    """The buses seen before stay known; no memory of the GPU is reported."""
    reader = MachineReader(kernel_log)
    memory = reader.memory()
    assert {uuid: each for uuid, each in memory.items() if uuid != CPU} == {**MEMORY, **SLICES_MEMORY}
    assert 0 < memory[CPU].used_mib <= memory[CPU].total_mib
    told.setenv("STAND_IN_LOST", "0")
    assert reader.memory().keys() == memory.keys() - {H100}
    assert faults_after(reader, kernel_log, "NVRM: Xid (PCI:0000:19:00): 79, pid=1, name=a") == {(H100, 79)}
    reader.close()


@pytest.mark.usefixtures("told")
def test_a_machine_with_an_unreadable_log_has_its_memory(tmp_path: Path) -> None:
    """As in most containers."""
    reader = MachineReader(tmp_path / "nowhere")
    assert reader.memory().keys() == {*MEMORY, *SLICES_MEMORY, CPU}
    assert set(reader.faults()) == set()
    reader.close()


def test_a_machine_without_a_driver_has_the_hosts_memory(kernel_log: Path, told: pytest.MonkeyPatch) -> None:
    """The driver is looked for once."""
    told.setenv("STAND_IN_INIT", "9")
    reader = MachineReader(kernel_log)
    assert reader.memory().keys() == {CPU}
    assert faults_after(reader, kernel_log, "NVRM: Xid (PCI:0000:19:00): 79, pid=1, name=a") == set()
    told.delenv("STAND_IN_INIT")
    assert reader.memory().keys() == {CPU}
    reader.close()


def test_a_driver_that_fails_at_first_is_tried_again(
    kernel_log: Path, told: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be loaded again after an upgrade; each look until then gives the error."""
    told.setenv("STAND_IN_INIT", "18")
    reader = MachineReader(kernel_log)
    for _ in range(2):
        assert reader.memory().keys() == {CPU}
        assert set(reader.faults()) == set()
    assert [record.message for record in caplog.records] == [
        "devices cannot be looked at: NVML: RM has detected an NVML/RM version mismatch."
    ] * 2
    told.delenv("STAND_IN_INIT")
    assert reader.memory().keys() == {*MEMORY, *SLICES_MEMORY, CPU}
    reader.close()


MACHINE_READER: Final = """\
from pathlib import Path
from workers.devices.readers import MachineReader
log = Path({log!r})
reader = MachineReader(log)
print(sorted(reader.memory()))
with log.open("a") as file:
    file.write("4,1,1,-;NVRM: Xid (PCI:0000:19:00): 74, pid=1, name=a, NVLink\\n")
print(sorted(reader.faults()))
print(sorted(reader.faults()))
reader.close()
import pynvml
try:
    print(pynvml.nvmlDeviceGetCount())
except pynvml.NVMLError as error:
    print(error)
"""


def test_a_machine_is_read_through_nvml_and_its_kernels_log(driver: Path, tmp_path: Path) -> None:
    """Both are read, a fault in both counts once, and the driver is released."""
    (tmp_path / "kmsg").touch()
    program = MACHINE_READER.format(log=str(tmp_path / "kmsg"))
    assert said_with(driver, program, STAND_IN_XIDS="1:94 0:74") == [
        repr(sorted([*MEMORY, *SLICES_MEMORY, CPU])),
        repr([(H100, 74), (SLICED, 94)]),
        "[]",
        "Uninitialized",
    ]

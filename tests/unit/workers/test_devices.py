"""The devices of a machine, as NVML and an inventory tell of them, and which cannot be.

NVML is asked through its real binding, of a library that stands in for the driver's.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from service.config.inventory import document_of, read_inventory
from service.errors import ConfigError
from tests.harness.stand_ins import NVML, NVML_LIBRARY, compiled, take_nvml
from tests.harness.waiting import LIMIT_S
from workers.devices.device import CPU, DeviceMemory, Gpu, MigSlice, check_devices
from workers.devices.readers import MachineReader
from workers.errors import InvalidInventory

ROOT: Final = Path(__file__).parents[3]

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

# What is in the memory of that machine. One process of GPU 2 does not show its own.
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


def faults_of(*gpus: Gpu) -> list[str]:
    with pytest.raises(InvalidInventory) as caught:
        check_devices(gpus)
    return [part for line in str(caught.value).splitlines() for part in line.split("; ")]


def gpu_at(index: int, *, uuid: str | None = None, memory_mib: int | None = 81920, slices: Sequence[str] = ()) -> Gpu:
    """Return a GPU whose slices have these UUIDs; without any it is in no MIG mode."""
    mig = tuple(MigSlice(uuid=each, profile="1g.20gb", memory_mib=19968) for each in slices)
    name = "NVIDIA A100-SXM4-80GB"
    return Gpu(index=index, uuid=uuid or f"GPU-{index}", name=name, memory_mib=memory_mib, mig=mig or None)


def test_real_machines_have_no_faults() -> None:
    """What the driver tells can be; the slices of a GPU may take all of it, and its memory may be unknown."""
    check_devices([])
    check_devices(MACHINE)
    check_devices([gpu_at(0, memory_mib=4 * 19968, slices=["MIG-0", "MIG-1", "MIG-2", "MIG-3"])])
    check_devices([gpu_at(0, memory_mib=None, slices=["MIG-0"])])


@pytest.mark.parametrize(
    ("gpus", "fault"),
    [
        ((gpu_at(0), gpu_at(1, uuid="GPU-0")), "devices[1].uuid: GPU-0 is that of devices[0]"),
        ((gpu_at(0), gpu_at(1, slices=["GPU-0"])), "devices[1].mig[0].uuid: GPU-0 is that of devices[0]"),
        ((gpu_at(0, slices=["MIG-0", "MIG-0"]),), "devices[0].mig[1].uuid: MIG-0 is that of devices[0].mig[0]"),
        (
            (gpu_at(0, slices=["MIG-0"]), gpu_at(1, slices=["MIG-1", "MIG-0"])),
            "devices[1].mig[1].uuid: MIG-0 is that of devices[0].mig[0]",
        ),
    ],
    ids=["gpu-gpu", "gpu-slice", "slice-slice", "slice-slice-elsewhere"],
)
def test_no_two_devices_have_one_uuid(gpus: Sequence[Gpu], fault: str) -> None:
    """An engine is shown its device by it; the message says whose it is and what every device has."""
    assert faults_of(*gpus) == [fault, "every device has one of its own"]


def test_no_two_gpus_have_one_number() -> None:
    """A whole GPU is shown to an engine by its number."""
    assert faults_of(gpu_at(3), gpu_at(3, uuid="GPU-4")) == [
        "devices[1].index: 3 is that of devices[0]",
        "every GPU has a number of its own",
    ]


def test_a_device_without_a_uuid_is_told_where_to_find_it() -> None:
    """Of a GPU and of a slice alike, and two empty ones are no duplicate."""
    gpus = [replace(gpu_at(0), uuid=""), gpu_at(1, slices=["MIG-0", ""])]
    assert faults_of(*gpus) == [
        "devices[0].uuid: is empty",
        "nvidia-smi -L shows it",
        "devices[1].mig[1].uuid: is empty",
        "nvidia-smi -L shows it",
    ]


def test_slices_do_not_outgrow_their_gpu() -> None:
    """The message has both sizes."""
    assert faults_of(gpu_at(0), gpu_at(1, memory_mib=39935, slices=["MIG-0", "MIG-1"])) == [
        "devices[1].mig: its slices have 39936 MiB together, and the GPU 39935 MiB"
    ]


INVENTORY_YAML: Final = """\
# a machine that is planned for
devices:
  - index: 0
    uuid: GPU-0
    name: NVIDIA GB10
  - index: 1
    uuid: GPU-1
    name: NVIDIA A100-SXM4-80GB
    memory_mib: 81920
    mig:
      - {uuid: MIG-0, profile: 3g.40gb, memory_mib: 40192}
      - {uuid: MIG-1, profile: 1c.3g.40gb}
  - index: 2
    uuid: GPU-2
    name: NVIDIA A100-SXM4-80GB
    memory_mib: 81920
    mig: []
"""
INVENTORY: Final = [
    Gpu(index=0, uuid="GPU-0", name="NVIDIA GB10", memory_mib=None),
    Gpu(
        index=1,
        uuid="GPU-1",
        name="NVIDIA A100-SXM4-80GB",
        memory_mib=81920,
        mig=(
            MigSlice(uuid="MIG-0", profile="3g.40gb", memory_mib=40192),
            MigSlice(uuid="MIG-1", profile="1c.3g.40gb", memory_mib=None),
        ),
    ),
    Gpu(index=2, uuid="GPU-2", name="NVIDIA A100-SXM4-80GB", memory_mib=81920, mig=()),
]
INVENTORY_DOCUMENT: Final = {
    "devices": [
        {"index": 0, "uuid": "GPU-0", "name": "NVIDIA GB10", "memory_mib": None},
        {
            "index": 1,
            "uuid": "GPU-1",
            "name": "NVIDIA A100-SXM4-80GB",
            "memory_mib": 81920,
            "mig": [
                {"uuid": "MIG-0", "profile": "3g.40gb", "memory_mib": 40192},
                {"uuid": "MIG-1", "profile": "1c.3g.40gb", "memory_mib": None},
            ],
        },
        {"index": 2, "uuid": "GPU-2", "name": "NVIDIA A100-SXM4-80GB", "memory_mib": 81920, "mig": []},
    ],
    "lanes": [{"lane": "lane-0", "device": "GPU-0"}],
}


def inventory_at(path: Path, text: str) -> list[Gpu]:
    path.write_text(text)
    return read_inventory(path)


def faults_in(path: Path, text: str) -> list[str]:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_inventory(path)
    return str(caught.value).splitlines()


def test_an_inventory_says_the_same_in_yaml_and_in_json(tmp_path: Path) -> None:
    """What a person writes, and what the command prints, the lanes beside it passed over."""
    assert inventory_at(tmp_path / "machine.yaml", INVENTORY_YAML) == INVENTORY
    assert inventory_at(tmp_path / "machine.json", json.dumps(INVENTORY_DOCUMENT)) == INVENTORY


@pytest.mark.parametrize("machine", [INVENTORY, MACHINE, []], ids=["planned", "found", "none"])
def test_what_is_written_of_a_machine_is_read_again(tmp_path: Path, machine: list[Gpu]) -> None:
    """So one machine's devices can be planned for on another."""
    text = json.dumps({"devices": [document_of(gpu) for gpu in machine]})
    assert inventory_at(tmp_path / "machine.json", text) == machine


def test_a_gpu_is_written_as_an_inventory_has_it() -> None:
    """A GPU in no MIG mode has no such key; one in that mode without slices has it, and nothing in it."""
    assert [document_of(gpu) for gpu in INVENTORY] == INVENTORY_DOCUMENT["devices"]


@pytest.mark.parametrize(
    ("before", "after", "line", "fault"),
    [
        ("81920\n    mig:\n", "81920\n    memory: 1\n    mig:\n", 10, "devices[1].memory: unknown key 'memory'"),
        ("profile: 3g.40gb", "profil: 3g.40gb, profile: x", 11, "devices[1].mig[0].profil: unknown key 'profil'"),
        ("index: 0", "index: first", 3, "devices[0].index: must be an integer, not 'first'"),
        ("index: 0", "index: -1", 3, "devices[0].index: must be at least 0, not -1"),
        ("uuid: GPU-0", "uuid: 17", 4, "devices[0].uuid: must be text"),
        ("memory_mib: 40192", "memory_mib: 0", 11, "devices[1].mig[0].memory_mib: must be more than 0, not 0"),
        ("    mig: []", "    mig: 7", 17, "devices[2].mig: must be a list"),
        ("    name: NVIDIA GB10\n", "", 3, "devices[0].name: is required"),
    ],
    ids=["key", "key-of-slice", "type", "negative", "uuid", "no-memory", "no-list", "missing"],
)
def test_a_fault_in_an_inventory_has_its_file_its_line_and_its_place(
    tmp_path: Path, before: str, after: str, line: int, fault: str
) -> None:
    """One fault, one line to look at."""
    assert INVENTORY_YAML.count(before) == 1
    path = tmp_path / "machine.yaml"
    (found,) = faults_in(path, INVENTORY_YAML.replace(before, after))
    assert found.startswith(f"{path}:{line}: {fault}")


def test_all_faults_of_an_inventory_are_told_at_once(tmp_path: Path) -> None:
    """JSON has no lines to name, and has its file and its places all the same."""
    path = tmp_path / "machine.json"
    found = faults_in(path, json.dumps({"devices": [{"index": "a", "uuid": 1, "name": "T4"}], "device": []}))
    assert [fault.split(" ")[:2] for fault in found] == [
        [f"{path}:", "devices[0].index:"],
        [f"{path}:", "devices[0].uuid:"],
        [f"{path}:", "device:"],
    ]
    assert "did you mean 'devices'?" in found[-1]


def test_devices_that_cannot_be_together_are_a_fault_of_their_file(tmp_path: Path) -> None:
    """The file is read by the same rule as the machine."""
    path = tmp_path / "machine.yaml"
    found = faults_in(path, INVENTORY_YAML.replace("MIG-1", "GPU-0"))
    assert found == [f"{path}: devices[1].mig[1].uuid: GPU-0 is that of devices[0]; every device has one of its own"]


@pytest.mark.parametrize("text", ["", "- index: 0\n", "a machine"], ids=["empty", "list", "text"])
def test_what_is_no_mapping_is_no_inventory(tmp_path: Path, text: str) -> None:
    """The message says which key is looked for."""
    path = tmp_path / "machine.yaml"
    assert faults_in(path, text) == [f"{path}: an inventory is a mapping with the key 'devices'"]


def test_a_file_that_is_broken_or_not_there_is_named(tmp_path: Path) -> None:
    """Neither is a machine without GPUs."""
    broken = tmp_path / "machine.json"
    assert faults_in(broken, '{"devices": [')[0].startswith(f"{broken}: not JSON")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        read_inventory(tmp_path / "nowhere.yaml")


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


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library that stands in for the driver's."""
    return built(tmp_path_factory.mktemp("driver"))


def built(folder: Path, *options: str) -> Path:
    compiled(NVML, folder / NVML_LIBRARY, *options)
    return folder


def said_with(libraries: Path, program: str, **environment: str) -> list[str]:
    """Return the lines that a program prints where the loader looks for libraries in this folder first."""
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


def test_nvml_tells_of_a_machine(driver: Path) -> None:
    """No mode, a mode with empty places or without a slice, no such mode; no memory; profiles as they are named."""
    assert said_with(driver, FINDING) == [repr(MACHINE)]


def test_nvml_is_left_as_it_was_found(driver: Path) -> None:
    """Whoever begins it ends it, also where a GPU fails in between."""
    assert said_with(driver, FINDING + AFTERWARDS)[1:] == ["Uninitialized"]
    assert said_with(driver, FINDING + AFTERWARDS, STAND_IN_LOST="2")[1:] == ["Uninitialized"]


def test_a_driver_from_before_mig_has_whole_gpus(tmp_path: Path) -> None:
    """Its library has no function for it, and that is no failure."""
    whole = [replace(gpu, mig=None) for gpu in MACHINE]
    assert said_with(built(tmp_path, "-DWITHOUT_MIG"), FINDING) == [repr(whole)]


def test_a_gpu_that_is_lost_is_no_machine_without_it(driver: Path) -> None:
    """Work that counts on a GPU must not go elsewhere in silence."""
    assert said_with(driver, FINDING, STAND_IN_LOST="2") == ["unreadable: NVML: GPU is lost"]


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
def test_a_driver_that_is_not_there_is_told_from_one_that_fails(driver: Path, result: str, said: str) -> None:
    """The first has no GPUs, the second does not know."""
    assert said_with(driver, FINDING, STAND_IN_INIT=result) == [said]


def test_a_machine_without_the_library_has_no_gpus(tmp_path: Path) -> None:
    """The binding is installed everywhere, driver or not. A file that cannot be loaded stands for none at all."""
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


def test_nvml_tells_of_memory_and_of_buses(driver: Path) -> None:
    """What devices and their processes have, and where the kernel has them.

    A GPU without processes shows none, as a container does; one that hides what a process has shows none either. What
    tells no memory is left out.
    """
    memory, buses, *_ = said_with(driver, LOOKING)
    assert eval(memory, {"DeviceMemory": DeviceMemory}) == {**MEMORY, **SLICES_MEMORY}  # noqa: S307 - printed by us
    assert buses == repr(BUSES)


def test_faults_are_told_once_each_with_its_gpu(driver: Path) -> None:
    """All that came since the last look, in their order."""
    faults, again = said_with(driver, LOOKING, STAND_IN_XIDS="2:31 0:48 2:94")[2:4]
    assert (faults, again) == (repr([(T4, 31), (H100, 48), (T4, 94)]), "[]")


def test_the_fault_of_a_gpu_that_has_fallen_off_its_bus_is_told(driver: Path) -> None:
    """The driver says nothing else of it any more, its UUID neither."""
    faults, again, memory = said_with(driver, LOOKING, STAND_IN_XIDS="2:79")[2:]
    assert (faults, again, memory) == (repr([(T4, 79)]), "[]", "unreadable: NVML: GPU is lost")


def test_a_card_that_tells_no_faults_keeps_none_from_telling(driver: Path) -> None:
    """Some cards have no events."""
    (faults,) = said_with(driver, LOOKING, STAND_IN_XIDS="0:48 2:94", STAND_IN_REGISTER="3")[2:3]
    assert faults == repr([(T4, 94)])


@pytest.mark.parametrize("result", ["3", "4", "999"], ids=["not-supported", "no-permission", "unknown"])
def test_a_driver_without_events_tells_the_rest(driver: Path, result: str) -> None:
    """As in many containers."""
    whole = said_with(driver, LOOKING)
    assert whole[2:4] == ["[]", "[]"]
    assert said_with(driver, LOOKING, STAND_IN_XIDS="0:48", STAND_IN_EVENTS=result) == whole


def test_a_driver_from_before_events_and_processes_tells_the_rest(tmp_path: Path) -> None:
    """Its library has no function for either: what processes have is not seen."""
    memory, buses, *faults = said_with(built(tmp_path, "-DWITHOUT_EVENTS", "-DWITHOUT_MIG"), LOOKING)[:4]
    told = eval(memory, {"DeviceMemory": DeviceMemory})  # noqa: S307 - printed by us
    assert told == {uuid: replace(each, held=None) for uuid, each in MEMORY.items()}
    assert (buses, faults) == (repr(BUSES), ["[]", "[]"])


def test_a_gpu_that_is_lost_leaves_no_look_at_memory(driver: Path) -> None:
    """Half of a machine is no machine; its faults are no failure."""
    lost = "unreadable: NVML: GPU is lost"
    assert said_with(driver, LOOKING, STAND_IN_LOST="2") == [lost, lost, "[]", "[]", lost]


@pytest.fixture
def kernel_log(tmp_path: Path) -> Path:
    """Return a file in place of the kernel's log; what stands there is old."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n")
    return log


@pytest.fixture
def told(driver: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have this process ask the stand-in, and return what sets its variables."""
    take_nvml(driver / NVML_LIBRARY, monkeypatch)
    return monkeypatch


def logged(log: Path, text: str) -> None:
    """Add a record to a kernel's log."""
    with log.open("a", errors="surrogateescape") as file:
        file.write(f"4,1707,812345678,-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:19:00.0\n")


def faults_after(reader: MachineReader, log: Path, text: str) -> set[tuple[str, int]]:
    """Return what a record makes a reader tell; the kernel gives one with every read."""
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
def test_the_kernels_log_tells_of_faults(kernel_log: Path, record: str, faults: set[tuple[str, int]]) -> None:
    """By a GPU's place on the bus; of one in MIG mode it may name the slice too."""
    reader = MachineReader(kernel_log)
    reader.memory()
    assert set(reader.faults()) == set()
    assert faults_after(reader, kernel_log, record) == faults
    assert set(reader.faults()) == set()
    reader.close()


def test_a_fault_is_told_though_the_driver_fails_from_then_on(kernel_log: Path, told: pytest.MonkeyPatch) -> None:
    """What was known of the buses before stays known; of the memory nothing is told, but of the host's own."""
    reader = MachineReader(kernel_log)
    memory = reader.memory()
    assert {uuid: each for uuid, each in memory.items() if uuid != CPU} == {**MEMORY, **SLICES_MEMORY}
    assert 0 < memory[CPU].used_mib <= memory[CPU].total_mib
    told.setenv("STAND_IN_LOST", "0")
    assert reader.memory().keys() == {CPU}
    assert faults_after(reader, kernel_log, "NVRM: Xid (PCI:0000:19:00): 79, pid=1, name=a") == {(H100, 79)}
    reader.close()


@pytest.mark.usefixtures("told")
def test_a_machine_whose_log_may_not_be_read_has_its_memory(tmp_path: Path) -> None:
    """As in most containers."""
    reader = MachineReader(tmp_path / "nowhere")
    assert reader.memory().keys() == {*MEMORY, *SLICES_MEMORY, CPU}
    assert set(reader.faults()) == set()
    reader.close()


def test_a_machine_without_a_driver_has_the_hosts_memory(kernel_log: Path, told: pytest.MonkeyPatch) -> None:
    """It is asked for once."""
    told.setenv("STAND_IN_INIT", "9")
    reader = MachineReader(kernel_log)
    assert reader.memory().keys() == {CPU}
    assert faults_after(reader, kernel_log, "NVRM: Xid (PCI:0000:19:00): 79, pid=1, name=a") == set()
    told.delenv("STAND_IN_INIT")
    assert reader.memory().keys() == {CPU}
    reader.close()


def test_a_driver_that_fails_at_first_is_asked_again(
    kernel_log: Path, told: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is loaded anew after an upgrade, say; each look until then says what is wrong."""
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
    """Both are heard; a fault that both tell is one; the driver is let go of."""
    (tmp_path / "kmsg").touch()
    program = MACHINE_READER.format(log=str(tmp_path / "kmsg"))
    assert said_with(driver, program, STAND_IN_XIDS="1:94 0:74") == [
        repr(sorted([*MEMORY, *SLICES_MEMORY, CPU])),
        repr([(H100, 74), (SLICED, 94)]),
        "[]",
        "Uninitialized",
    ]

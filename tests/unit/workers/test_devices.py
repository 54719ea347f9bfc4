"""The devices of a machine, as NVML and an inventory describe them, and which are impossible.

NVML is called through its real binding, with a stand-in for the driver's library.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from service.config.inventory import document_of, read_inventory
from service.errors import ConfigError
from tests.harness.nvml_machine import MACHINE
from workers.devices.device import Gpu, MigSlice, check_devices
from workers.errors import InvalidInventory


def faults_of(*gpus: Gpu) -> list[str]:
    with pytest.raises(InvalidInventory) as caught:
        check_devices(gpus)
    return [part for line in str(caught.value).splitlines() for part in line.split("; ")]


def gpu_at(index: int, *, uuid: str | None = None, memory_mib: int | None = 81920, slices: Sequence[str] = ()) -> Gpu:
    """Return a GPU whose slices have these UUIDs; without any it has no MIG mode."""
    mig = tuple(MigSlice(uuid=each, profile="1g.20gb", memory_mib=19968) for each in slices)
    name = "NVIDIA A100-SXM4-80GB"
    return Gpu(index=index, uuid=uuid or f"GPU-{index}", name=name, memory_mib=memory_mib, mig=mig or None)


def test_real_machines_have_no_faults() -> None:
    """Everything a driver reports is possible: slices may take all of a GPU, and its memory may be unknown."""
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
    """Engines get their device by UUID; the message gives its owners and every device's UUID."""
    assert faults_of(*gpus) == [fault, "every device has one of its own"]


def test_no_two_gpus_have_one_number() -> None:
    """A whole GPU is given to an engine by its number."""
    assert faults_of(gpu_at(3), gpu_at(3, uuid="GPU-4")) == [
        "devices[1].index: 3 is that of devices[0]",
        "every GPU has a number of its own",
    ]


def test_a_device_without_a_uuid_is_refused_with_advice() -> None:
    """For GPUs and slices alike the message says where to find it; two empty ones are no duplicate."""
    gpus = [replace(gpu_at(0), uuid=""), gpu_at(1, slices=["MIG-0", ""])]
    assert faults_of(*gpus) == [
        "devices[0].uuid: is empty",
        "nvidia-smi -L shows it",
        "devices[1].mig[1].uuid: is empty",
        "nvidia-smi -L shows it",
    ]


def test_slices_are_not_larger_than_their_gpu() -> None:
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


def test_an_inventory_means_the_same_in_yaml_and_in_json(tmp_path: Path) -> None:
    """People write YAML, and the command prints JSON; lanes beside the devices are ignored."""
    assert inventory_at(tmp_path / "machine.yaml", INVENTORY_YAML) == INVENTORY
    assert inventory_at(tmp_path / "machine.json", json.dumps(INVENTORY_DOCUMENT)) == INVENTORY


@pytest.mark.parametrize("machine", [INVENTORY, MACHINE, []], ids=["planned", "found", "none"])
def test_a_written_inventory_reads_back_as_the_same_machine(tmp_path: Path, machine: list[Gpu]) -> None:
    """One machine's devices can thus be planned for on another."""
    text = json.dumps({"devices": [document_of(gpu) for gpu in machine]})
    assert inventory_at(tmp_path / "machine.json", text) == machine


def test_a_gpu_is_written_in_the_form_of_an_inventory() -> None:
    """A GPU without MIG has no such key; one in MIG mode without slices has it, and it is empty."""
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
    """Each fault names one line to look at."""
    assert INVENTORY_YAML.count(before) == 1
    path = tmp_path / "machine.yaml"
    (found,) = faults_in(path, INVENTORY_YAML.replace(before, after))
    assert found.startswith(f"{path}:{line}: {fault}")


def test_all_faults_of_an_inventory_are_reported_at_once(tmp_path: Path) -> None:
    """JSON has no lines to name, but file and place are given."""
    path = tmp_path / "machine.json"
    found = faults_in(path, json.dumps({"devices": [{"index": "a", "uuid": 1, "name": "T4"}], "device": []}))
    assert [fault.split(" ")[:2] for fault in found] == [
        [f"{path}:", "devices[0].index:"],
        [f"{path}:", "devices[0].uuid:"],
        [f"{path}:", "device:"],
    ]
    assert "did you mean 'devices'?" in found[-1]


def test_devices_that_conflict_are_a_fault_of_their_file(tmp_path: Path) -> None:
    """The file is read by the same rules as the machine."""
    path = tmp_path / "machine.yaml"
    found = faults_in(path, INVENTORY_YAML.replace("MIG-1", "GPU-0"))
    assert found == [f"{path}: devices[1].mig[1].uuid: GPU-0 is that of devices[0]; every device has one of its own"]


@pytest.mark.parametrize("text", ["", "- index: 0\n", "a machine"], ids=["empty", "list", "text"])
def test_an_inventory_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the key that is expected."""
    path = tmp_path / "machine.yaml"
    assert faults_in(path, text) == [f"{path}: an inventory is a mapping with the key 'devices'"]


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    """Neither counts as a machine without GPUs."""
    broken = tmp_path / "machine.json"
    assert faults_in(broken, '{"devices": [')[0].startswith(f"{broken}: not JSON")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: there is no such file"):
        read_inventory(tmp_path / "nowhere.yaml")

"""The devices of a machine, as NVML, ``nvidia-smi`` and an inventory tell of them, and which cannot be.

NVML is asked through its real binding, of a library that stands in for the driver's; ``nvidia-smi`` is a real program
that says what the driver's would.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from service.config.inventory import document_of, read_inventory
from service.errors import ConfigError
from tests.harness.waiting import LIMIT_S
from workers.devices.device import CPU, Gpu, MigSlice, check_devices
from workers.devices.memory import DeviceMemory
from workers.devices.nvidia_smi import parse, read_memory, read_nvidia_smi
from workers.devices.readers import MachineReader
from workers.errors import DevicesUnreadable, InvalidInventory

ROOT: Final = Path(__file__).parents[3]
STAND_IN: Final = Path(__file__).with_name("nvml_stand_in.c")

RTX_4090: Final = Gpu(
    index=0, uuid="GPU-40904090-aaaa-4aaa-8aaa-000000000000", name="NVIDIA GeForce RTX 4090", memory_mib=24564
)
A100: Final = Gpu(
    index=0, uuid="GPU-a1000000-aaaa-4aaa-8aaa-000000000000", name="NVIDIA A100-SXM4-80GB", memory_mib=81920, mig=()
)

# One machine in the three outputs of nvidia-smi. It is the one of nvml_stand_in.c.
TABLE: Final = """\
0, GPU-00000000-aaaa-4aaa-8aaa-000000000000, NVIDIA H100 80GB HBM3, 81559, Disabled
1, GPU-11111111-aaaa-4aaa-8aaa-000000000001, NVIDIA A100-SXM4-80GB, 81920, Enabled
2, GPU-22222222-aaaa-4aaa-8aaa-000000000002, Tesla T4, 15109, [N/A]
3, GPU-33333333-aaaa-4aaa-8aaa-000000000003, NVIDIA GB10, [N/A], [N/A]
"""
LISTING: Final = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-aaaa-4aaa-8aaa-000000000000)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-11111111-aaaa-4aaa-8aaa-000000000001)
  MIG 3g.40gb     Device  0: (UUID: MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000000)
  MIG 1g.10gb     Device  1: (UUID: MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000002)
GPU 2: Tesla T4 (UUID: GPU-22222222-aaaa-4aaa-8aaa-000000000002)
GPU 3: NVIDIA GB10 (UUID: GPU-33333333-aaaa-4aaa-8aaa-000000000003)
"""
DETAILS: Final = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <attached_gpus>4</attached_gpus>
  <gpu id="00000000:19:00.0">
    <mig_mode><current_mig>Disabled</current_mig></mig_mode>
    <mig_devices>None</mig_devices>
    <uuid>GPU-00000000-aaaa-4aaa-8aaa-000000000000</uuid>
    <fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage>
  </gpu>
  <gpu id="00000000:3B:00.0">
    <mig_mode><current_mig>Enabled</current_mig></mig_mode>
    <mig_devices>
      <mig_device>
        <index>0</index>
        <gpu_instance_id>2</gpu_instance_id>
        <fb_memory_usage><total>40192 MiB</total><used>37 MiB</used></fb_memory_usage>
      </mig_device>
      <mig_device>
        <index>1</index>
        <gpu_instance_id>9</gpu_instance_id>
        <fb_memory_usage><total>9728 MiB</total><used>12 MiB</used></fb_memory_usage>
      </mig_device>
    </mig_devices>
    <uuid>GPU-11111111-aaaa-4aaa-8aaa-000000000001</uuid>
    <fb_memory_usage><total>81920 MiB</total><used>49 MiB</used></fb_memory_usage>
  </gpu>
  <gpu id="00000000:5E:00.0">
    <mig_devices>None</mig_devices>
    <uuid>GPU-22222222-aaaa-4aaa-8aaa-000000000002</uuid>
    <fb_memory_usage><total>15109 MiB</total><used>0 MiB</used></fb_memory_usage>
  </gpu>
  <gpu id="0000000F:01:00.0">
    <mig_devices>N/A</mig_devices>
    <uuid>GPU-33333333-aaaa-4aaa-8aaa-000000000003</uuid>
    <fb_memory_usage><total>N/A</total></fb_memory_usage>
  </gpu>
</nvidia_smi_log>
"""
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
            MigSlice(uuid="MIG-5f3bcbb0-7f6c-5b0a-9f0e-000000000002", profile="1g.10gb", memory_mib=9728),
        ),
    ),
    Gpu(index=2, uuid="GPU-22222222-aaaa-4aaa-8aaa-000000000002", name="Tesla T4", memory_mib=15109),
    Gpu(index=3, uuid="GPU-33333333-aaaa-4aaa-8aaa-000000000003", name="NVIDIA GB10", memory_mib=None),
]

# What is in the memory of that machine, in the two outputs of nvidia-smi. One process of GPU 2 does not show its own.
USED: Final = """\
GPU-00000000-aaaa-4aaa-8aaa-000000000000, 00000000:19:00.0, 81559, 10194
GPU-11111111-aaaa-4aaa-8aaa-000000000001, 00000000:3B:00.0, 81920, 10240
GPU-22222222-aaaa-4aaa-8aaa-000000000002, 00000000:5E:00.0, 15109, 1888
GPU-33333333-aaaa-4aaa-8aaa-000000000003, 0000000F:01:00.0, [N/A], [N/A]
"""
PROCESSES: Final = """\
GPU-00000000-aaaa-4aaa-8aaa-000000000000, 4242, 9000
GPU-00000000-aaaa-4aaa-8aaa-000000000000, 4243, 1000
GPU-22222222-aaaa-4aaa-8aaa-000000000002, 5000, 500
GPU-22222222-aaaa-4aaa-8aaa-000000000002, 5001, [N/A]
"""
H100, SLICED, T4, GB10 = (gpu.uuid for gpu in MACHINE)
SLICES: Final = [each.uuid for each in MACHINE[1].mig or ()]
MEMORY: Final = {
    H100: DeviceMemory(total_mib=81559, used_mib=10194, held={4242: 9000, 4243: 1000}),
    SLICED: DeviceMemory(total_mib=81920, used_mib=10240),
    T4: DeviceMemory(total_mib=15109, used_mib=1888),
}
SLICES_MEMORY: Final = {
    SLICES[0]: DeviceMemory(total_mib=40192, used_mib=5024, held={77: 2048}),
    SLICES[1]: DeviceMemory(total_mib=9728, used_mib=1216),
}
BUSES: Final = {"00000000:19:00": H100, "00000000:3b:00": SLICED, "00000000:5e:00": T4, "0000000f:01:00": GB10}


def row(gpu: Gpu, mode: str = "[N/A]") -> str:
    """Return the line of the table that tells of a GPU."""
    return f"{gpu.index}, {gpu.uuid}, {gpu.name}, {gpu.memory_mib}, {mode}\n"


def listed(gpu: Gpu, *slices: str) -> str:
    """Return the list of a GPU and its slices; ``slices`` are the lines under it."""
    return "\n".join([f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})", *slices, ""])


def detailed(gpu: Gpu, *sizes: str) -> str:
    """Return the XML of a GPU whose slices have so much memory, each as the program writes it."""
    devices = "".join(
        f"<mig_device><index>{number}</index><fb_memory_usage><total>{size}</total></fb_memory_usage></mig_device>"
        for number, size in enumerate(sizes)
    )
    return (
        f'<?xml version="1.0" ?>\n<nvidia_smi_log><gpu id="00000000:3B:00.0"><mig_devices>{devices}</mig_devices>'
        f"<uuid>{gpu.uuid}</uuid><fb_memory_usage><total>{gpu.memory_mib} MiB</total></fb_memory_usage></gpu>"
        "</nvidia_smi_log>\n"
    )


def test_a_gpu_for_players_is_read_from_the_table_alone() -> None:
    """It knows no MIG mode, and its driver says so with [N/A]."""
    assert parse(row(RTX_4090)) == [RTX_4090]


def test_eight_gpus_stay_in_the_order_of_the_table() -> None:
    """Each has its own number, UUID and memory; MIG mode is off, which is no mode with no slices."""
    gpus = [
        Gpu(index=number, uuid=f"GPU-{number:08}-bbbb", name="NVIDIA H100 80GB HBM3", memory_mib=81559)
        for number in range(8)
    ]
    assert parse("".join(row(gpu, "Disabled") for gpu in gpus)) == gpus


@pytest.mark.parametrize("said", ["[N/A]", "[Not Supported]"])
def test_memory_that_is_shared_with_the_host_is_not_known(said: str) -> None:
    """A GB10 has none of its own, and zero would be another thing."""
    assert parse(f"0, GPU-10101010-aaaa, NVIDIA GB10, {said}, [N/A]\n") == [
        Gpu(index=0, uuid="GPU-10101010-aaaa", name="NVIDIA GB10", memory_mib=None)
    ]


def test_a_machine_without_gpus_has_an_empty_table() -> None:
    """No line is no GPU, and an empty line none either."""
    assert parse("") == parse("\n") == []


def test_slices_have_their_uuids_from_the_list_and_their_memory_from_the_xml() -> None:
    """The XML names no UUID, the list no memory, and its columns are padded."""
    lines = [f"  MIG 1g.20gb     Device  {number}: (UUID: MIG-0000000{number}-cccc)" for number in range(4)]
    slices = tuple(MigSlice(uuid=f"MIG-0000000{n}-cccc", profile="1g.20gb", memory_mib=19968) for n in range(4))
    gpu = replace(A100, mig=slices)
    assert parse(row(A100, "Enabled"), listed(A100, *lines), detailed(A100, *["19968 MiB"] * 4)) == [gpu]


@pytest.mark.parametrize("profile", ["7g.80gb", "1g.10gb+me", "1c.3g.40gb", "1g.24gb-gfx"])
@pytest.mark.parametrize("width", [0, 16])
def test_a_profile_is_taken_as_it_is_named(profile: str, width: int) -> None:
    """Compute instances, media extensions and what comes after them are names, whatever their width."""
    line = f"  MIG {profile:{width}} Device  0: (UUID: MIG-00000000-cccc)"
    (gpu,) = parse(row(A100, "Enabled"), listed(A100, line), detailed(A100, "9728 MiB"))
    assert gpu.mig == (MigSlice(uuid="MIG-00000000-cccc", profile=profile, memory_mib=9728),)


def test_slices_of_old_drivers_are_named_by_their_gpu_and_their_instances() -> None:
    """The form before R470, which CUDA takes as it is."""
    uuids = [f"MIG-{A100.uuid}/{gi}/0" for gi in (1, 13)]
    lines = [f"  MIG 3g.40gb Device {number}: (UUID: {uuid})" for number, uuid in enumerate(uuids)]
    (gpu,) = parse(row(A100, "Enabled"), listed(A100, *lines), detailed(A100, "40192 MiB", "40192 MiB"))
    assert [each.uuid for each in gpu.mig or ()] == uuids


def test_slices_of_different_sizes_keep_their_own_memory() -> None:
    """The list and the XML have one order, and no memory goes to another slice."""
    lines = [f"  MIG {name} Device  {n}: (UUID: MIG-{n})" for n, name in enumerate(["3g.40gb", "2g.20gb", "1g.10gb"])]
    (gpu,) = parse(row(A100, "Enabled"), listed(A100, *lines), detailed(A100, "40192 MiB", "N/A", "9728 MiB"))
    assert [(each.profile, each.memory_mib) for each in gpu.mig or ()] == [
        ("3g.40gb", 40192),
        ("2g.20gb", None),
        ("1g.10gb", 9728),
    ]


def test_slices_are_known_without_the_xml() -> None:
    """Their memory is not known then; that they are there is."""
    (gpu,) = parse(row(A100, "Enabled"), listed(A100, "  MIG 1g.20gb     Device  0: (UUID: MIG-0)"))
    assert gpu.mig == (MigSlice(uuid="MIG-0", profile="1g.20gb", memory_mib=None),)


def test_a_gpu_in_mig_mode_without_slices_is_still_in_that_mode() -> None:
    """It computes nothing, so it must not look like a whole one."""
    assert parse(row(A100, "Enabled"), listed(A100), detailed(A100)) == [A100]


def test_the_slices_of_one_gpu_are_not_those_of_its_neighbours() -> None:
    """One GPU of several is in MIG mode; its slices stay with it."""
    assert parse(TABLE, LISTING, DETAILS) == MACHINE


@pytest.mark.parametrize(
    "line",
    [
        '0,GPU-a,"Card, with a comma",8192,[N/A]',
        '0, GPU-a, "Card, with a comma", 8192, [N/A]',
    ],
    ids=["no-blanks", "blanks"],
)
def test_a_comma_in_a_quoted_name_parts_no_cells(line: str) -> None:
    """Names are the makers' own."""
    assert parse(line) == [Gpu(index=0, uuid="GPU-a", name="Card, with a comma", memory_mib=8192)]


@pytest.mark.parametrize(
    "line",
    [
        "No devices could be asked",
        "0, GPU-a, Tesla T4, 15109",
        "zero, GPU-a, Tesla T4, 15109, [N/A]",
        "0, a, b, 1, 2, 3",
    ],
    ids=["prose", "too-few", "no-number", "too-many"],
)
def test_a_line_that_cannot_be_read_is_named(line: str) -> None:
    """A GPU that is passed over in silence would be missed much later."""
    with pytest.raises(DevicesUnreadable, match="a line that cannot be read") as caught:
        parse(row(RTX_4090) + line)
    assert line in str(caught.value)


def test_broken_xml_is_named() -> None:
    """Half an output is no answer."""
    with pytest.raises(DevicesUnreadable, match="nvidia-smi -q -x is no XML"):
        parse(TABLE, LISTING, DETAILS[: len(DETAILS) // 2])


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
    """What the readers tell can be; the slices of a GPU may take all of it, and its memory may be unknown."""
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


ANSWERING: Final = """\
#!/bin/sh
echo "$*" >> "${0%/*}/asked"
case "$*" in
  "--query-gpu=index,uuid,name,memory.total,mig.mode.current --format=csv,noheader,nounits") cat "${0%/*}/table" ;;
  "-L") cat "${0%/*}/listing" ;;
  "-q -x") cat "${0%/*}/details" ;;
  "--query-gpu=uuid,pci.bus_id,memory.total,memory.used --format=csv,noheader,nounits") cat "${0%/*}/used" ;;
  "--query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits") cat "${0%/*}/processes" ;;
  *) echo "this was not expected: $*"; exit 2 ;;
esac
"""


def install(folder: Path, script: str, **answers: str) -> None:
    """Make an ``nvidia-smi`` there, with files of what it says."""
    for name, text in answers.items():
        (folder / name).write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose programs go before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_the_program_is_asked_for_its_table_its_list_and_its_xml(programs: Path) -> None:
    """A machine with slices takes three questions."""
    install(programs, ANSWERING, table=TABLE, listing=LISTING, details=DETAILS)
    assert read_nvidia_smi() == MACHINE
    assert [line.split(" ")[0] for line in (programs / "asked").read_text().splitlines()][1:] == ["-L", "-q"]


def test_the_program_is_asked_once_where_no_gpu_is_in_mig_mode(programs: Path) -> None:
    """Each call wakes every GPU up."""
    install(programs, ANSWERING, table=row(RTX_4090), listing="", details="")
    assert read_nvidia_smi() == [RTX_4090]
    assert len((programs / "asked").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Is it running?", 9),
        ("No devices were found", 6),
    ],
    ids=["no-driver", "no-device"],
)
def test_a_program_without_a_driver_has_no_say(programs: Path, said: str, status: int) -> None:
    """It is left behind on machines whose GPU is gone; such a machine has its lanes on the CPU."""
    install(programs, f'#!/bin/sh\necho "{said}"\nexit {status}\n')
    assert read_nvidia_smi() is None


@pytest.mark.parametrize("stream", ["1", "2"], ids=["stdout", "stderr"])
def test_a_program_that_fails_is_quoted(programs: Path, stream: str) -> None:
    """A driver that is there and broken is no machine without GPUs."""
    install(
        programs, f'#!/bin/sh\necho "Failed to initialize NVML: Driver/library version mismatch" >&{stream}\nexit 1\n'
    )
    with pytest.raises(DevicesUnreadable, match="nvidia-smi ended with 1: Failed to initialize NVML"):
        read_nvidia_smi()


def test_a_failure_at_the_second_question_is_no_machine_without_slices(programs: Path) -> None:
    """The table came, the list did not: half of an answer is none."""
    install(programs, ANSWERING.replace('cat "${0%/*}/listing"', "exit 15"), table=TABLE, details=DETAILS)
    with pytest.raises(DevicesUnreadable, match="nvidia-smi ended with 15"):
        read_nvidia_smi()


def test_a_machine_without_the_program_has_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to install a driver for a machine without GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_nvidia_smi() is None


def test_a_file_that_may_not_be_run_is_no_program(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one in a folder that may not be searched: a machine without GPUs has no such thing to say."""
    install(programs, ANSWERING)
    (programs / "nvidia-smi").chmod(0o644)
    monkeypatch.setenv("PATH", str(programs))
    assert read_nvidia_smi() is None


# The binding loads its library once for a process, so each reading has a process of its own.
READING: Final = """\
from workers.devices.{module} import {reader}
from workers.errors import DevicesUnreadable
try:
    print({reader}())
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
NVML: Final = READING.format(module="nvml", reader="read_nvml")
ANY_READER: Final = READING.format(module="discovery", reader="find_gpus")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the library that stands in for the driver's."""
    return built(tmp_path_factory.mktemp("driver"))


def built(folder: Path, *options: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the library that stands in for NVIDIA's")
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", library, str(STAND_IN)], check=True, timeout=LIMIT_S)
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


def test_the_readers_agree(driver: Path) -> None:
    """NVML and nvidia-smi tell one machine alike: no mode, a mode with an empty place, no such mode, no memory."""
    assert said_with(driver, NVML) == [repr(parse(TABLE, LISTING, DETAILS))] == [repr(MACHINE)]


def test_nvml_is_left_as_it_was_found(driver: Path) -> None:
    """Whoever begins it ends it, also where a GPU fails in between."""
    assert said_with(driver, NVML + AFTERWARDS)[1:] == ["Uninitialized"]
    assert said_with(driver, NVML + AFTERWARDS, STAND_IN_LOST="2")[1:] == ["Uninitialized"]


def test_a_driver_from_before_mig_has_whole_gpus(tmp_path: Path) -> None:
    """Its library has no function for it, and that is no failure."""
    whole = [replace(gpu, mig=None) for gpu in MACHINE]
    assert said_with(built(tmp_path, "-DWITHOUT_MIG"), NVML) == [repr(whole)]


def test_a_gpu_that_is_lost_is_no_machine_without_it(driver: Path) -> None:
    """Work that counts on a GPU must not go elsewhere in silence."""
    assert said_with(driver, NVML, STAND_IN_LOST="2") == ["unreadable: NVML: GPU is lost"]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("9", "None"),
        ("12", "None"),
        ("18", "unreadable: NVML: RM has detected an NVML/RM version mismatch."),
        ("25", "unreadable: NVML: an error of the stand-in"),
    ],
    ids=["driver-not-loaded", "library-not-found", "version-mismatch", "unknown-to-the-binding"],
)
def test_a_driver_that_is_not_there_is_told_from_one_that_fails(driver: Path, result: str, said: str) -> None:
    """The first has no GPUs, the second does not know."""
    assert said_with(driver, NVML, STAND_IN_INIT=result) == [said]


def test_without_the_library_nvml_has_no_say(tmp_path: Path) -> None:
    """The binding is installed with the extra, driver or not. A file that cannot be loaded stands for none at all."""
    (tmp_path / "libnvidia-ml.so.1").touch()
    assert said_with(tmp_path, NVML) == ["None"]


def test_nvml_is_asked_before_the_program(driver: Path, programs: Path) -> None:
    """It tells the same and starts nothing; the program is asked where there is no library to load."""
    install(programs, ANSWERING, table=row(RTX_4090), listing="", details="")
    assert said_with(driver, ANY_READER) == [repr(MACHINE)]
    assert not (programs / "asked").exists()
    assert said_with(driver, ANY_READER, STAND_IN_INIT="9") == [repr([RTX_4090])]


def test_a_machine_that_nobody_can_tell_of_has_no_gpus(driver: Path, tmp_path: Path) -> None:
    """No driver and no program: its lanes are on the CPU."""
    assert said_with(driver, ANY_READER, STAND_IN_INIT="9", PATH=str(tmp_path)) == ["[]"]


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


def test_the_readers_agree_on_memory_and_on_buses(driver: Path, programs: Path) -> None:
    """What devices and their processes have, and where the kernel has them; slices are told by NVML alone.

    A GPU without processes shows none, as a container does; one that hides what a process has shows none either.
    """
    install(programs, ANSWERING, used=USED, processes=PROCESSES)
    memory, buses, *_ = said_with(driver, LOOKING)
    assert read_memory() == (MEMORY, BUSES)
    assert eval(memory, {"DeviceMemory": DeviceMemory}) == {**MEMORY, **SLICES_MEMORY}  # noqa: S307 - printed by us
    assert buses == repr(BUSES)


def test_the_program_is_asked_of_no_process_where_there_is_no_gpu(programs: Path) -> None:
    """And what is no line of its table tells nothing."""
    install(programs, ANSWERING, used="\n", processes=PROCESSES)
    assert read_memory() == ({}, {})
    assert len((programs / "asked").read_text().splitlines()) == 1
    install(programs, ANSWERING, used="a, b, 1\n" + USED, processes="")
    assert read_memory()[0] == {**MEMORY, H100: replace(MEMORY[H100], held=None)}


def test_a_program_that_fails_over_memory_is_quoted(programs: Path) -> None:
    """Also where the table came and the processes did not: their memory would look like nobody's."""
    install(programs, ANSWERING.replace('cat "${0%/*}/processes"', "exit 15"), used=USED)
    with pytest.raises(DevicesUnreadable, match="nvidia-smi ended with 15"):
        read_memory()


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
def kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file in place of the kernel's log, on a machine without NVML; what stands there is old."""
    monkeypatch.setattr("workers.devices.readers.open_nvml", lambda: None)
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:19:00): 79, pid=1, GPU has fallen off the bus.\n")
    return log


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
def test_the_kernels_log_tells_of_faults(
    kernel_log: Path, programs: Path, record: str, faults: set[tuple[str, int]]
) -> None:
    """By a GPU's place on the bus; of one in MIG mode it may name the slice too."""
    install(programs, ANSWERING, used=USED, processes=PROCESSES)
    reader = MachineReader(kernel_log)
    reader.memory()
    assert set(reader.faults()) == set()
    assert faults_after(reader, kernel_log, record) == faults
    assert set(reader.faults()) == set()
    reader.close()


def test_a_fault_is_told_though_the_driver_fails_from_then_on(kernel_log: Path, programs: Path) -> None:
    """What was known of the buses before stays known; of the memory nothing is told, but of the host's own."""
    install(programs, ANSWERING, used=USED, processes=PROCESSES)
    reader = MachineReader(kernel_log)
    memory = reader.memory()
    assert {uuid: each for uuid, each in memory.items() if uuid != CPU} == MEMORY
    assert 0 < memory[CPU].used_mib <= memory[CPU].total_mib
    install(programs, "#!/bin/sh\necho 'GPU is lost'; exit 15\n")
    assert reader.memory().keys() == {CPU}
    assert faults_after(reader, kernel_log, "NVRM: Xid (PCI:0000:19:00): 79, pid=1, name=a") == {(H100, 79)}
    reader.close()


def test_a_machine_whose_log_may_not_be_read_has_its_memory(programs: Path, tmp_path: Path) -> None:
    """As in most containers; and one without a driver has the host's."""
    install(programs, "#!/bin/sh\necho 'No devices were found'; exit 6\n")
    reader = MachineReader(tmp_path / "nowhere")
    assert reader.memory().keys() == {CPU}
    assert set(reader.faults()) == set()
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


def test_a_machine_is_read_through_nvml_and_its_kernels_log(driver: Path, programs: Path, tmp_path: Path) -> None:
    """Both are heard; a fault that both tell is one; the driver is let go of."""
    install(programs, "#!/bin/sh\nexit 1\n")
    (tmp_path / "kmsg").touch()
    program = MACHINE_READER.format(log=str(tmp_path / "kmsg"))
    assert said_with(driver, program, STAND_IN_XIDS="1:94 0:74") == [
        repr(sorted([*MEMORY, *SLICES_MEMORY, CPU])),
        repr([(H100, 74), (SLICED, 94)]),
        "[]",
        "Uninitialized",
    ]

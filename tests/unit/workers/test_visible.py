"""The devices that the environment leaves to engines, read as CUDA and ROCm read their variables."""

from dataclasses import replace
from typing import Final

import pytest

from tests.harness.nvml_machine import A30, GB10, H100, MACHINE, SLICES, T4
from workers.devices.device import Gpu
from workers.devices.layout import LayoutPolicy, devices_in, lanes_of, named_devices
from workers.devices.visible import bound, names_none, usable
from workers.engine.launch import command_for
from workers.errors import InvalidLayout
from workers.spec import EngineKind, WorkerSpec

T4S: Final = [Gpu(index=n, uuid=f"GPU-{n}{n}{n}-a", name="Tesla T4", memory_mib=15_109) for n in range(4)]
ALL: Final = ["0", "1", "2", "3"]
RADEONS: Final = [Gpu(index=n, uuid=f"GPU-{n}", name="AMD Instinct MI300X", memory_mib=192_000) for n in range(4)]
MIXED: Final = [
    Gpu(index=0, uuid="GPU-n0", name="NVIDIA A40", memory_mib=46_068),
    Gpu(index=1, uuid="GPU-a1", name="AMD Instinct MI300X", memory_mib=192_000),
    Gpu(index=2, uuid="GPU-n2", name="NVIDIA A40", memory_mib=46_068),
]


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("1", ["1"]),
        ("0,2", ["0", "2"]),
        ("3,1", ["1", "3"]),  # an order is CUDA's own matter: lanes go by numbers
        (" 2 , 3 ", ["2", "3"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),  # Slurm's for none
        ("none", []),
        ("void", []),
        ("0,-1,1", ["0"]),
        ("0,9,1", ["0"]),
        ("0,,1", ["0"]),
        ("9", []),
        ("1,1", []),  # CUDA's driver has none then
        ("GPU-222-a", ["2"]),
        ("GPU-222", ["2"]),
        ("GPU-3,GPU-1", ["1", "3"]),
        ("GPU-", []),  # it may be any GPU
        ("GPU-777,GPU-222", []),
        ("GPU-222,GPU-222-a", []),
        ("gpu-222", []),
        ("1,GPU-333", ["1", "3"]),
        ("2gpu", ["2"]),  # as strtoul reads it
    ],
)
def test_cudas_variable_bounds_the_gpus(value: str, left: list[str]) -> None:
    """It has numbers, UUIDs and their beginnings, up to the first unknown entry."""
    gpus = bound(T4S, {"CUDA_VISIBLE_DEVICES": value})
    assert [str(gpu.index) for gpu in usable(gpus)] == left
    assert {gpu.hidden for gpu in gpus} <= {None, f"CUDA_VISIBLE_DEVICES={value}"}


@pytest.mark.parametrize("environment", [{}, {"NVIDIA_VISIBLE_DEVICES": "void"}, {"HIP_VISIBLE_DEVICES": ""}])
def test_other_variables_hide_nothing(environment: dict[str, str]) -> None:
    """A container's own variable is for its runtime, and AMD's variables concern AMD's cards."""
    assert bound(T4S, environment) == T4S


@pytest.mark.parametrize(("value", "left"), [("0", ["1"]), ("1", ["3"]), ("2", []), ("GPU-0", []), ("GPU-333", ["3"])])
def test_numbers_count_only_what_a_control_group_leaves(value: str, left: list[str]) -> None:
    """CUDA counts so in a Slurm job whose control group hides GPUs."""
    kept = [replace(gpu, hidden="the group") if gpu.index in {0, 2} else gpu for gpu in T4S]
    gpus = bound(kept, {"CUDA_VISIBLE_DEVICES": value})
    assert [str(gpu.index) for gpu in usable(gpus)] == left
    assert gpus[0].hidden == "the group"


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (SLICES[1], [SLICES[1]]),
        (f"{SLICES[2]},{SLICES[0]}", [SLICES[0], SLICES[2]]),
        ("1", SLICES),  # slices of a GPU in MIG mode
        ("GPU-1111", SLICES),
        (f"{SLICES[0]},{T4}", [SLICES[0], T4]),
        ("MIG-5f3bcbb0-7f6c-5b0a-9f0e-00000000000", []),  # the beginning of three
        ("MIG-00000000", []),
        ("4", []),  # in MIG mode, and without a slice
        ("MIG-GPU-11111111-aaaa-4aaa-8aaa-000000000001/0/0", []),
    ],
)
def test_slices_are_selected_by_their_uuids(value: str, left: list[str]) -> None:
    """The other slices of their GPU are excluded."""
    assert [device.uuid for device in devices_in(bound(MACHINE, {"CUDA_VISIBLE_DEVICES": value}))] == left


def test_an_engine_gets_the_machines_number_of_a_device() -> None:
    """It is not the place in the variable. A variable of another machine leaves only the CPU."""
    lanes = lanes_of(bound(T4S, {"CUDA_VISIBLE_DEVICES": "GPU-3,1"}), LayoutPolicy(max_agents_per_gpu=1), 1000)
    assert [lane.device.visible["CUDA_VISIBLE_DEVICES"] for lane in lanes] == ["1", "3"]
    (lane, _) = lanes_of(bound(T4S, {"CUDA_VISIBLE_DEVICES": "8"}), LayoutPolicy(), 1000)
    assert (lane.device.is_cpu, lane.device.visible) == (True, {})


def test_the_first_gpus_are_the_first_visible_ones() -> None:
    """``max_gpus`` counts no hidden GPU."""
    lanes = lanes_of(bound(T4S, {"CUDA_VISIBLE_DEVICES": "2,3"}), LayoutPolicy(max_gpus=1, max_agents_per_gpu=1), 1000)
    assert [lane.device.index for lane in lanes] == [2]


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, {"GPU-1": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "2"}, {"GPU-2": "2"}),  # HIP reads it where its own is not there
        ({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,3"}, {"GPU-0": "0", "GPU-3": "3"}),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, {"GPU-2": "0", "GPU-3": "1"}),  # HIP counts what ROCr has left
        ({"ROCR_VISIBLE_DEVICES": "GPU-3,1", "HIP_VISIBLE_DEVICES": "1"}, {"GPU-1": "1"}),
        ({"ROCR_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}, {"GPU-3": "0"}),  # Slurm sets both alike
        ({"HIP_VISIBLE_DEVICES": "-1"}, {}),
        ({"ROCR_VISIBLE_DEVICES": ""}, {}),
    ],
)
def test_rocms_variables_bound_amds_cards(environment: dict[str, str], shown: dict[str, str]) -> None:
    """An engine inherits the lower variable, and gets its card in the upper one."""
    devices = devices_in(bound(RADEONS, environment))
    assert {device.uuid: device.visible["HIP_VISIBLE_DEVICES"] for device in devices} == shown


def test_each_maker_has_its_own_variable_and_its_own_numbers() -> None:
    """A hidden card of the other maker does not count."""
    devices = devices_in(bound(MIXED, {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}))
    assert [(device.uuid, max(device.visible.items())) for device in devices] == [
        ("GPU-a1", ("HIP_VISIBLE_DEVICES", "0")),
        ("GPU-n2", ("CUDA_VISIBLE_DEVICES", "1")),
    ]


def test_numbers_by_speed_are_refused_where_speeds_differ() -> None:
    """Only CUDA knows which GPU is fastest. Equal GPUs stand in bus order, and UUIDs are unambiguous."""
    environment = {"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    with pytest.raises(InvalidLayout, match="does not say which GPU of several kinds is meant; give UUIDs"):
        bound(MACHINE, environment)
    assert [gpu.index for gpu in usable(bound(T4S, environment))] == [2]
    assert [gpu.uuid for gpu in usable(bound(MACHINE, {**environment, "CUDA_VISIBLE_DEVICES": T4}))] == [T4]
    assert [gpu.uuid for gpu in usable(bound(MACHINE, {**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))] == [T4]


@pytest.mark.parametrize(
    ("names", "because"),
    [
        (
            [H100],
            rf"{H100} is hidden from this service by CUDA_VISIBLE_DEVICES=2,3; those that may be used: 2 \({T4}\)",
        ),
        ([2, 0], "0 is hidden from this service by CUDA_VISIBLE_DEVICES=2,3"),
        ([SLICES[0]], f"{SLICES[0]} is hidden from this service"),
        ([9], "9 is no device; those that are there: 2"),
    ],
)
def test_hidden_devices_are_refused_with_the_reason(names: list[int | str], because: str) -> None:
    """The message names the variable that hides them, and the devices left."""
    gpus = bound(MACHINE, {"CUDA_VISIBLE_DEVICES": "2,3"})
    with pytest.raises(InvalidLayout, match=because):
        named_devices(names, gpus)
    assert [device.uuid for device in named_devices([GB10, 2], gpus)] == [GB10, T4]
    assert A30 not in {device.uuid for device in devices_in(gpus)}


@pytest.mark.parametrize(
    ("value", "is_none"), [("", True), ("-1,0", True), ("x", True), ("0", False), ("MIG-a", False)]
)
def test_some_values_hide_the_devices_of_any_machine(value: str, is_none: bool) -> None:
    """The driver need not be asked then."""
    assert names_none(value) is is_none


@pytest.mark.parametrize(
    ("environment", "env", "order"),
    [
        ({}, {}, None),  # it sees all, the fastest first
        ({"CUDA_VISIBLE_DEVICES": "1"}, {}, "PCI_BUS_ID"),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, "PCI_BUS_ID"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, {}, None),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {}, "FASTEST_FIRST"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST"),
    ],
)
def test_numbers_mean_the_same_to_an_engine_that_inherits_them(
    environment: dict[str, str], env: dict[str, str], order: str | None
) -> None:
    """The same as to an engine on a lane; an order that the user sets is kept."""
    spec = WorkerSpec(engine=EngineKind.LLAMA_SERVER, model="/m.gguf", env=env)
    assert command_for(spec, environment).env.get("CUDA_DEVICE_ORDER") == order

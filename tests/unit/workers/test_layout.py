"""Lanes on invented machines: where engines may run, how much of a device each has, and what cannot be divided."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import product
from typing import Final, NamedTuple

import pytest

from workers.devices.device import CPU, Gpu, MigSlice, check_devices
from workers.devices.layout import Device, Lane, Layout, LayoutPolicy, lanes_of
from workers.errors import InvalidLayout

HOST_MIB: Final = 64_000
MAX_GPUS: Final = 8
KEYS: Final = {field.name for field in fields(LayoutPolicy)}


class Machine(NamedTuple):
    """Its GPUs, and how many whole GPUs and slices at most eight of its GPUs have for engines."""

    gpus: Sequence[Gpu]
    whole: int
    slices: int


def whole(name: str, memory_mib: int | None, count: int = 1, first: int = 0) -> list[Gpu]:
    return [
        Gpu(index=number, uuid=f"GPU-{number}", name=name, memory_mib=memory_mib)
        for number in range(first, first + count)
    ]


def in_mig_mode(*slices: tuple[str, int | None], count: int = 1, first: int = 0) -> list[Gpu]:
    """Return GPUs in MIG mode, one for each of ``slices``, by profile and memory."""
    return [
        Gpu(
            index=number,
            uuid=f"GPU-{number}",
            name="NVIDIA A100-SXM4-80GB",
            memory_mib=81920,
            mig=tuple(
                MigSlice(uuid=f"MIG-{number}-{place}", profile=profile, memory_mib=memory_mib)
                for place, (profile, memory_mib) in enumerate(slices)
            ),
        )
        for number in range(first, first + count)
    ]


H100: Final = ("NVIDIA H100 80GB HBM3", 81559)
SMALL: Final = ("1g.10gb", 9728)
LARGE: Final = ("3g.40gb", 40192)
MACHINES: Final = {
    "no GPU": Machine([], 0, 0),
    "MX150": Machine(whole("NVIDIA GeForce MX150", 2002), 1, 0),
    "T4": Machine(whole("Tesla T4", 15109), 1, 0),
    "V100": Machine(whole("Tesla V100-PCIE-16GB", 16384), 1, 0),
    "4 V100": Machine(whole("Tesla V100-SXM2-32GB", 32768, 4), 4, 0),
    "4090": Machine(whole("NVIDIA GeForce RTX 4090", 24564), 1, 0),
    "8 3090": Machine(whole("NVIDIA GeForce RTX 3090", 24576, 8), 8, 0),
    "4 4090 and 4 4080": Machine(
        whole("NVIDIA GeForce RTX 4090", 24564, 4) + whole("NVIDIA GeForce RTX 4080", 16376, 4, first=4), 8, 0
    ),
    "2 L40S": Machine(whole("NVIDIA L40S", 46068, 2), 2, 0),
    "A100 40": Machine(whole("NVIDIA A100-SXM4-40GB", 40960), 1, 0),
    "A100 80": Machine(whole("NVIDIA A100-SXM4-80GB", 81920), 1, 0),
    "8 H100": Machine(whole(*H100, 8), 8, 0),
    "8 H200": Machine(whole("NVIDIA H200", 143771, 8), 8, 0),
    "8 B200": Machine(whole("NVIDIA B200", 183359, 8), 8, 0),
    "GB10": Machine(whole("NVIDIA GB10", None), 1, 0),
    "unknown memory beside known": Machine(whole("NVIDIA GB10", None) + whole(*H100, first=1), 2, 0),
    "7 slices": Machine(in_mig_mode(*[SMALL] * 7), 0, 7),
    "4 slices": Machine(in_mig_mode(*[("1g.20gb", 19968)] * 4), 0, 4),
    "unequal slices": Machine(in_mig_mode(LARGE, ("2g.20gb", 19968), ("1g.10gb+me", 9728)), 0, 3),
    "slices of unknown memory": Machine(in_mig_mode(("3g.40gb", None), LARGE), 0, 2),
    "all MIG": Machine(in_mig_mode(LARGE, LARGE, count=8), 0, 16),
    "MIG in part": Machine(in_mig_mode(LARGE, SMALL, SMALL) + whole(*H100, first=1), 1, 3),
    "MIG in half": Machine(whole(*H100, 4) + in_mig_mode(*[SMALL] * 7, count=4, first=4), 4, 28),
    "MIG mode without slices": Machine(in_mig_mode(), 0, 0),
    "MIG mode without slices beside a GPU": Machine(in_mig_mode() + whole(*H100, first=1), 1, 0),
    "MIG mode without slices beside slices": Machine(in_mig_mode(first=1) + in_mig_mode(LARGE), 0, 1),
    "8 MI300X": Machine(whole("AMD Instinct MI300X", 196592, 8), 8, 0),
    "Radeon": Machine(whole("Radeon RX 7900 XTX", 24560), 1, 0),
    "two makers": Machine(whole(*H100, 2) + whole("AMD Instinct MI210", 65520, first=2), 3, 0),
    "16 V100": Machine(whole("Tesla V100-SXM3-32GB", 32768, 16), 8, 0),
    "16 with slices on the last": Machine(whole(*H100, 8) + in_mig_mode(LARGE, count=8, first=8), 8, 0),
    "16 with slices on the first": Machine(in_mig_mode(LARGE, count=8) + whole(*H100, 8, first=8), 0, 8),
    "some of a box": Machine(whole(*H100, first=5) + whole(*H100, first=3), 2, 0),
}
POLICIES: Final = tuple(product((False, True), (1, 2, 3)))


def wanted_lanes(machine: Machine, policy: LayoutPolicy) -> int:
    """Return the number of lanes that the specification asks for."""
    on_slices = machine.slices if policy.enable_mig else 0
    on_whole = 0 if policy.layout is Layout.C else machine.whole or (0 if machine.gpus else 1)
    return on_slices + on_whole * (1 if policy.layout is Layout.A else policy.max_agents_per_gpu)


def by_device(lanes: Sequence[Lane]) -> Iterator[tuple[Device, list[Lane]]]:
    for uuid in dict.fromkeys(lane.device.uuid for lane in lanes):
        on_it = [lane for lane in lanes if lane.device.uuid == uuid]
        assert all(lane.device == on_it[0].device for lane in on_it)
        yield on_it[0].device, on_it


def check_places(lanes: Sequence[Lane], policy: LayoutPolicy) -> None:
    first, last = policy.ports
    assert [lane.id for lane in lanes] == [f"lane-{number}" for number in range(len(lanes))]
    assert len({lane.port for lane in lanes}) == len(lanes)
    assert all(first <= lane.port <= last for lane in lanes)
    assert {lane.layout for lane in lanes} == {policy.layout}


def check_shares(lanes: Sequence[Lane], policy: LayoutPolicy) -> None:
    for device, on_it in by_device(lanes):
        most = 1 if device.is_slice or policy.layout is Layout.A else policy.max_agents_per_gpu
        assert len(on_it) == most
        capacity = policy.max_agents_per_gpu if policy.layout is Layout.A else 1
        assert {lane.capacity for lane in on_it} == {capacity}
        if device.memory_mib is None:
            assert (device.room_mib, {lane.memory_mib for lane in on_it}) == (None, {None})
            continue
        parts = [lane.memory_mib for lane in on_it if lane.memory_mib is not None]
        assert (len(parts), len(set(parts))) == (len(on_it), 1)
        room = device.memory_mib * 95 / 100
        assert room - len(on_it) - 1 < sum(parts) <= room


def check_devices_of(lanes: Sequence[Lane], machine: Machine, policy: LayoutPolicy) -> None:
    by_uuid = {gpu.uuid: gpu for gpu in machine.gpus}
    slices = {each.uuid: (gpu, each) for gpu in machine.gpus for each in gpu.mig or ()}
    used = set()
    for device, _ in by_device(lanes):
        if device.is_slice:
            gpu, each = slices[device.uuid]
            assert policy.enable_mig
            assert device.memory_mib == each.memory_mib
            assert device.visible == {"CUDA_VISIBLE_DEVICES": each.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        else:
            gpu = by_uuid[device.uuid]
            assert policy.layout is not Layout.C
            assert (gpu.mig, device.memory_mib) == (None, gpu.memory_mib)
            assert device.visible == visible_for(gpu, machine.gpus)
        assert gpu.name in device.name
        used.add(gpu.index)
    assert len(used) <= MAX_GPUS
    assert used <= set(sorted(gpu.index for gpu in machine.gpus)[:MAX_GPUS])


def visible_for(gpu: Gpu, machine: Sequence[Gpu]) -> dict[str, str]:
    """Return the variables that show an engine this whole GPU: its number, and the order of the numbers."""

    def is_amd(each: Gpu) -> bool:
        return each.name.startswith(("AMD", "Radeon"))

    number = str(gpu.index - sum(is_amd(each) is not is_amd(gpu) for each in machine if each.index < gpu.index))
    if is_amd(gpu):
        return {"HIP_VISIBLE_DEVICES": number}
    return {"CUDA_VISIBLE_DEVICES": number, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_machine_has_its_lanes_or_the_reason_why_not(machine: Machine, layout: Layout) -> None:
    """All policies on all machines: a request is kept, and if there is no place a message names the key to change."""
    check_devices(machine.gpus)
    for enable_mig, agents in POLICIES:
        policy = LayoutPolicy(layout=layout, enable_mig=enable_mig, max_agents_per_gpu=agents)
        wanted = wanted_lanes(machine, policy)
        if not wanted:
            with pytest.raises(InvalidLayout) as caught:
                lanes_of(machine.gpus, policy, HOST_MIB)
            key, _, mend = str(caught.value).removeprefix("gpus.").partition(": ")
            assert str(caught.value).startswith("gpus.")
            assert key in KEYS
            assert mend
            continue
        lanes = lanes_of(machine.gpus, policy, HOST_MIB)
        assert len(lanes) == wanted, policy
        check_places(lanes, policy)
        check_shares(lanes, policy)
        if machine.gpus:
            check_devices_of(lanes, machine, policy)


@pytest.mark.parametrize("layout", [Layout.A, Layout.B])
def test_a_machine_without_a_gpu_has_its_lanes_on_the_cpu(layout: Layout) -> None:
    """The lanes have the memory of the machine, and no variable shows or hides a device."""
    lanes = lanes_of([], LayoutPolicy(layout=layout, max_agents_per_gpu=2), HOST_MIB)
    device = Device(uuid=CPU, name="CPU", memory_mib=HOST_MIB, room_mib=HOST_MIB * 95 // 100)
    assert {lane.device.uuid for lane in lanes} == {"cpu"}
    assert all(lane.device == device for lane in lanes)
    assert device.is_cpu


def test_two_engines_share_a_gpu_in_halves() -> None:
    """One whole plan is compared number by number."""
    (gpu,) = whole("NVIDIA GeForce RTX 4090", 24564)
    device = Device(
        uuid="GPU-0",
        name="NVIDIA GeForce RTX 4090",
        memory_mib=24564,
        room_mib=23335,
        index=0,
        visible={"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
    assert lanes_of([gpu], LayoutPolicy(), HOST_MIB) == (
        Lane(number=0, device=device, layout=Layout.B, memory_mib=11667, port=9300, percent=47),
        Lane(number=1, device=device, layout=Layout.B, memory_mib=11667, port=9301, percent=47),
    )
    assert not device.is_cpu


def test_a_slice_is_named_by_its_gpu_and_its_profile() -> None:
    """People see the name, and the engine sees the UUID."""
    lanes = lanes_of(in_mig_mode(LARGE, SMALL), LayoutPolicy(layout=Layout.C, enable_mig=True), HOST_MIB)
    assert [(lane.device.name, lane.device.visible["CUDA_VISIBLE_DEVICES"], lane.memory_mib) for lane in lanes] == [
        ("NVIDIA A100-SXM4-80GB 3g.40gb", "MIG-0-0", 40192 * 95 // 100),
        ("NVIDIA A100-SXM4-80GB 1g.10gb", "MIG-0-1", 9728 * 95 // 100),
    ]


def test_the_first_gpus_by_number_are_used() -> None:
    """Whatever order the driver lists them in."""
    gpus = list(reversed(whole(*H100, 8)))
    lanes = lanes_of(gpus, LayoutPolicy(max_gpus=2, max_agents_per_gpu=1), HOST_MIB)
    assert [lane.device.uuid for lane in lanes] == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize(
    ("gpus", "policy", "because"),
    [
        (
            [],
            LayoutPolicy(layout=Layout.C),
            "gpus.layout: C needs MIG slices, and this machine has no GPU; give layout: B",
        ),
        (
            whole(*H100, 2),
            LayoutPolicy(layout=Layout.C, enable_mig=True),
            "gpus.layout: C needs MIG slices, and no GPU is in MIG mode; give layout: B, or enable that mode",
        ),
        (
            in_mig_mode(LARGE, count=2),
            LayoutPolicy(),
            "gpus.enable_mig: false, and only MIG slices could be used; give enable_mig: true, or end MIG mode",
        ),
        (
            in_mig_mode(count=2),
            LayoutPolicy(layout=Layout.C, enable_mig=True),
            "gpus.enable_mig: no GPU that is used has a MIG slice; make some with nvidia-smi mig -cgi and -cci",
        ),
        (
            whole(*H100, 2) + in_mig_mode(LARGE, first=2),
            LayoutPolicy(layout=Layout.C, enable_mig=True, max_gpus=2),
            "gpus.max_gpus: 2 leaves out every GPU that could be used",
        ),
    ],
    ids=["no-gpu", "no-mode", "not-enabled", "no-slices", "left-out"],
)
def test_a_machine_without_a_place_is_refused_with_the_key_to_change(
    gpus: Sequence[Gpu], policy: LayoutPolicy, because: str
) -> None:
    """The message has the key, its value and the remedy."""
    with pytest.raises(InvalidLayout) as caught:
        lanes_of(gpus, policy, HOST_MIB)
    assert str(caught.value) == because


@pytest.mark.parametrize(
    "policy", [LayoutPolicy(max_gpus=1), LayoutPolicy(layout=Layout.C)], ids=["left-out", "layout-c"]
)
def test_a_gpu_without_mig_mode_is_not_said_to_have_it(policy: LayoutPolicy) -> None:
    """Beside a GPU in MIG mode, a whole one is excluded by another key."""
    with pytest.raises(InvalidLayout) as caught:
        lanes_of(in_mig_mode(LARGE) + whole(*H100, first=1), policy, HOST_MIB)
    assert "every GPU is in MIG mode" not in str(caught.value)


def test_as_many_ports_as_lanes_are_enough() -> None:
    """Up to the last port that exists."""
    lanes = lanes_of(whole(*H100, 8), LayoutPolicy(ports=(65520, 65535)), HOST_MIB)
    assert [lane.port for lane in lanes] == list(range(65520, 65536))


def test_too_few_ports_are_refused_with_the_range_needed() -> None:
    """One port is missing, and the range in the message is accepted."""
    with pytest.raises(InvalidLayout) as caught:
        lanes_of(whole(*H100, 8), LayoutPolicy(ports=(9300, 9314)), HOST_MIB)
    assert str(caught.value) == "gpus.ports: [9300, 9314] is too small: 16 lanes need [9300, 9315]"
    assert len(lanes_of(whole(*H100, 8), LayoutPolicy(ports=(9300, 9315)), HOST_MIB)) == 16


def test_the_range_in_the_message_has_existing_ports() -> None:
    """A remedy that cannot be applied is none."""
    with pytest.raises(InvalidLayout) as caught:
        lanes_of(whole(*H100, 8), LayoutPolicy(ports=(65530, 65535)), HOST_MIB)
    assert "65545" not in str(caught.value)


@pytest.mark.parametrize("ports", [(0, 99), (-1, 99), (9399, 9300), (65000, 65536)])
def test_an_invalid_range_of_ports_is_refused(ports: tuple[int, int]) -> None:
    """The message has a valid one."""
    with pytest.raises(InvalidLayout) as caught:
        lanes_of(whole(*H100), LayoutPolicy(ports=ports), HOST_MIB)
    first, last = ports
    assert str(caught.value) == f"gpus.ports: [{first}, {last}] is no range of ports; give [9300, 9399], say"

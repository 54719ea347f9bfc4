"""From devices to lanes: which places for an engine a machine has. Pure.

A lane is one engine's place on a device: one of several that share a GPU (layout B), a whole GPU whose engine holds
several checkpoints as adapters of one base (A), or a MIG slice (C). A machine without a GPU has its lanes on the CPU.

Source: specification, "Lanes".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Final

from annotated_types import Ge

from workers.devices.device import CPU, Gpu
from workers.errors import InvalidLayout
from workers.policy.limits import Configured

SHARED_PERCENT: Final = 95  # of a device: what several processes leave to their contexts on it
AMD: Final = ("amd", "radeon", "instinct")
LAST_PORT: Final = 65_535
ONE_VALUE: Final = frozenset({"CUDA_DEVICE_ORDER"})


class Layout(StrEnum):
    """The way in which engines share a GPU."""

    A = "A"  # one engine, which holds several checkpoints as adapters of one base
    B = "B"  # several engines
    C = "C"  # an engine on each MIG slice, and none elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPolicy(Configured):
    """The number of lanes, and their places.

    At most ``max_gpus`` GPUs are used, the first; on each ``max_agents_per_gpu`` checkpoints are resident at most.
    Slices are used with ``enable_mig`` alone. ``ports`` are the first and the last that lanes may listen on.
    """

    layout: Layout = Layout.B
    max_gpus: Annotated[int, Ge(1)] = 8
    max_agents_per_gpu: Annotated[int, Ge(1)] = 2
    enable_mig: bool = False
    ports: tuple[int, int] = (9300, 9399)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The ground of lanes: a whole GPU, a MIG slice, or the CPU with the machine's memory.

    ``visible`` are the variables that show an engine this device alone; ``room_mib`` is what its lanes may fill
    together, None where the driver tells no memory. ``parent`` is a slice's GPU, ``index`` the number of a whole one.
    """

    uuid: str
    name: str
    memory_mib: int | None
    room_mib: int | None
    is_slice: bool = False
    parent: str | None = None
    index: int | None = None
    visible: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_cpu(self) -> bool:
        """Whether it is no accelerator."""
        return self.uuid == CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One engine's place: its number, its device, its part of the device's memory in MiB, and its port."""

    number: int
    device: Device
    layout: Layout
    memory_mib: int | None
    port: int
    capacity: int = 1  # how many checkpoints its engine may hold

    @property
    def id(self) -> str:
        """The id of the worker there."""
        return f"lane-{self.number}"


def lanes_of(gpus: Sequence[Gpu], policy: LayoutPolicy, host_memory_mib: int) -> tuple[Lane, ...]:
    """Return the lanes of a machine, device by device.

    Raises:
        InvalidLayout: there are none, or too few ports; the message names the key, its value and the mend.
    """
    for name in ("max_gpus", "max_agents_per_gpu"):
        if getattr(policy, name) < 1:
            raise InvalidLayout(f"gpus.{name}: {getattr(policy, name)} leaves no lane; give 1 or more")
    devices = _devices(gpus, policy) if gpus else [_cpu(policy, host_memory_mib)]
    if not devices:
        raise InvalidLayout(_nowhere(gpus, policy))
    places = [(device, number) for device in devices for number in range(_engines_on(device, policy))]
    first, last = policy.ports
    if not 1 <= first <= last <= LAST_PORT:
        raise InvalidLayout(f"gpus.ports: [{first}, {last}] is no range of ports; give [9300, 9399], say")
    if len(places) > last - first + 1:
        begin = min(first, LAST_PORT - len(places) + 1)
        wanted = f"{len(places)} lanes need [{begin}, {begin + len(places) - 1}]"
        raise InvalidLayout(f"gpus.ports: [{first}, {last}] is too small: {wanted}")
    return tuple(
        Lane(
            number=number,
            device=device,
            layout=policy.layout,
            memory_mib=_part(device.room_mib, _engines_on(device, policy)),
            port=first + number,
            capacity=policy.max_agents_per_gpu if policy.layout is Layout.A else 1,
        )
        for number, (device, _) in enumerate(places)
    )


def devices_in(gpus: Sequence[Gpu]) -> list[Device]:
    """Return the devices of engines: each GPU, or the slices of one in MIG mode."""
    devices: list[Device] = []
    for gpu in sorted(gpus, key=lambda each: each.index):
        devices += [_whole(gpu, gpus)] if gpu.mig is None else _slices(gpu)
    return devices


def _devices(gpus: Sequence[Gpu], policy: LayoutPolicy) -> list[Device]:
    devices: list[Device] = []
    for gpu in sorted(gpus, key=lambda each: each.index)[: policy.max_gpus]:
        if gpu.mig is None and policy.layout is not Layout.C:
            devices.append(_whole(gpu, gpus))
        elif gpu.mig is not None and policy.enable_mig:
            devices += _slices(gpu)
    return devices


def _whole(gpu: Gpu, gpus: Sequence[Gpu]) -> Device:
    # A maker's library counts its own cards alone.
    others = sum(each.index < gpu.index and _is_amd(each) != _is_amd(gpu) for each in gpus)
    number = str(gpu.index - others)
    if _is_amd(gpu):
        visible = {"HIP_VISIBLE_DEVICES": number}
    else:
        # By number, which every engine understands: vLLM up to 0.23 fails on a UUID.
        visible = {"CUDA_VISIBLE_DEVICES": number, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return Device(
        uuid=gpu.uuid,
        name=gpu.name,
        memory_mib=gpu.memory_mib,
        room_mib=_room(gpu.memory_mib),
        index=gpu.index,
        visible=visible,
    )


def _is_amd(gpu: Gpu) -> bool:
    return gpu.name.lower().startswith(AMD)


def _slices(gpu: Gpu) -> Iterator[Device]:
    for each in gpu.mig or ():
        yield Device(
            uuid=each.uuid,
            name=f"{gpu.name} {each.profile}",
            memory_mib=each.memory_mib,
            room_mib=_room(each.memory_mib),
            is_slice=True,
            parent=gpu.uuid,
            visible={"CUDA_VISIBLE_DEVICES": each.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        )


def _cpu(policy: LayoutPolicy, memory_mib: int) -> Device:
    if policy.layout is Layout.C:
        raise InvalidLayout("gpus.layout: C needs MIG slices, and this machine has no GPU; give layout: B")
    return Device(uuid=CPU, name="CPU", memory_mib=memory_mib, room_mib=_room(memory_mib))


def _room(memory_mib: int | None) -> int | None:
    return None if memory_mib is None else memory_mib * SHARED_PERCENT // 100


def _part(room_mib: int | None, engines: int) -> int | None:
    return None if room_mib is None else room_mib // engines


def _engines_on(device: Device, policy: LayoutPolicy) -> int:
    return 1 if device.is_slice or policy.layout is Layout.A else policy.max_agents_per_gpu


def _nowhere(gpus: Sequence[Gpu], policy: LayoutPolicy) -> str:
    used = sorted(gpus, key=lambda each: each.index)[: policy.max_gpus]
    in_mode = [gpu for gpu in used if gpu.mig is not None]
    if len(used) < len(gpus) and _devices(gpus, replace(policy, max_gpus=len(gpus))):
        return f"gpus.max_gpus: {policy.max_gpus} leaves out every GPU that could be used"
    if not in_mode:
        return "gpus.layout: C needs MIG slices, and no GPU is in MIG mode; give layout: B, or enable that mode"
    if any(gpu.mig for gpu in in_mode):
        return "gpus.enable_mig: false, and only MIG slices could be used; give enable_mig: true, or end MIG mode"
    return "gpus.enable_mig: no GPU that is used has a MIG slice; make some with nvidia-smi mig -cgi and -cci"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The devices that the engines of a model may have, and of how many each computes on."""

    devices: tuple[Device, ...]
    each: int = 1


def choose_devices(choice: DeviceChoice, engines_on: Mapping[str, int]) -> tuple[Device, ...]:
    """Return the devices of one more engine; ``engines_on`` counts those that are there, by the device's UUID."""
    fewest = sorted(choice.devices, key=lambda device: engines_on.get(device.uuid, 0))[: choice.each]
    return tuple(device for device in choice.devices if device in fewest)


def named_devices(names: Sequence[int | str], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return devices by their indices or UUIDs.

    Raises:
        InvalidLayout: one is not there; the message says which are.
    """
    known = ", ".join(device.uuid if device.is_slice else f"{device.index} ({device.uuid})" for device in devices)
    found: list[Device] = []
    for name in dict.fromkeys(names):
        device = next((each for each in devices if name in (each.uuid, each.index)), None)
        if device is None:
            there = f"those that are there: {known}" if known else "this machine has none"
            raise InvalidLayout(f"{name} is no device; {there}")
        found.append(device)
    return tuple(found)


def variables_of(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that show an engine these devices alone."""
    values: dict[str, list[str]] = {}
    for device in devices:
        for name, value in device.visible.items():
            values.setdefault(name, []).append(value)
    return {name: each[0] if name in ONE_VALUE else ",".join(each) for name, each in values.items()}

"""From devices to lanes: the places for engines on a machine. Pure.

A lane is one engine's place on a device: one of several that share a GPU (layout B), a whole GPU whose engine holds
several checkpoints as adapters of one base (A), or a MIG slice (C). A machine without a GPU has its lanes on the CPU.

Source: specification, "Lanes".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Final

from annotated_types import Ge

from workers.devices.device import CPU, Gpu, is_amd, number_of
from workers.devices.visible import CUDA, HIP, ORDER, PCI_ORDER, usable
from workers.errors import InvalidLayout
from workers.policy.limits import Configured

SHARED_PERCENT: Final = 95  # share of a device: the rest is for the contexts of several processes
LAST_PORT: Final = 65_535
ONE_VALUE: Final = frozenset({ORDER})


class Layout(StrEnum):
    """The way engines share a GPU."""

    A = "A"  # one engine, which holds several checkpoints as adapters of one base
    B = "B"  # several engines
    C = "C"  # one engine per MIG slice, and none elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPolicy(Configured):
    """The number of lanes, and their places.

    The first ``max_gpus`` GPUs are used at most; each holds at most ``max_agents_per_gpu`` checkpoints. Slices are used
    only with ``enable_mig``. ``ports`` are the first and the last that lanes may listen on.
    """

    layout: Layout = Layout.B
    max_gpus: Annotated[int, Ge(1)] = 8
    max_agents_per_gpu: Annotated[int, Ge(1)] = 2
    enable_mig: bool = False
    ports: tuple[int, int] = (9300, 9399)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The hardware of lanes: a whole GPU, a MIG slice, or the CPU with the machine's memory.

    ``visible`` are the variables that show an engine only this device; ``room_mib`` is what its lanes may fill
    together, None if the driver reports no memory. ``parent`` is a slice's GPU, ``index`` the number of a whole one.
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
        """Whether it is the CPU, and no accelerator."""
        return self.uuid == CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One engine's place: its number, its device, its part of the device's memory in MiB, and its port.

    ``percent`` is the same part, used if the device's memory is unknown.
    """

    number: int
    device: Device
    layout: Layout
    memory_mib: int | None
    port: int
    capacity: int = 1  # how many checkpoints its engine may hold
    percent: int = SHARED_PERCENT

    @property
    def id(self) -> str:
        """The id of the lane's worker."""
        return f"lane-{self.number}"


def lanes_of(gpus: Sequence[Gpu], policy: LayoutPolicy, host_memory_mib: int) -> tuple[Lane, ...]:
    """Return the lanes of a machine, device by device; a hidden or lost device has none.

    Raises:
        InvalidLayout: there are none, or too few ports; the message names the key, its value and the remedy.
    """
    for name in ("max_gpus", "max_agents_per_gpu"):
        if getattr(policy, name) < 1:
            raise InvalidLayout(f"gpus.{name}: {getattr(policy, name)} leaves no lane; give 1 or more")
    devices = _devices(gpus, policy) if usable(gpus) else [_cpu(policy, host_memory_mib, gpus)]
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
            percent=SHARED_PERCENT // _engines_on(device, policy),
        )
        for number, (device, _) in enumerate(places)
    )


def devices_in(gpus: Sequence[Gpu]) -> list[Device]:
    """Return the devices for engines: each GPU, or the slices of one in MIG mode; none that is hidden or lost."""
    devices: list[Device] = []
    for gpu in usable(gpus):
        devices += [_whole(gpu, gpus)] if gpu.mig is None else _slices(gpu)
    return devices


def _devices(gpus: Sequence[Gpu], policy: LayoutPolicy) -> list[Device]:
    devices: list[Device] = []
    for gpu in usable(gpus)[: policy.max_gpus]:
        if gpu.mig is None and policy.layout is not Layout.C:
            devices.append(_whole(gpu, gpus))
        elif gpu.mig is not None and policy.enable_mig:
            devices += _slices(gpu)
    return devices


def _whole(gpu: Gpu, gpus: Sequence[Gpu]) -> Device:
    # By number, which every engine understands: vLLM up to 0.23 fails on a UUID.
    name = gpu.shown_as or str(number_of(gpu, gpus))
    visible = {HIP: name} if is_amd(gpu) else {CUDA: name, ORDER: PCI_ORDER}
    return Device(
        uuid=gpu.uuid,
        name=gpu.name,
        memory_mib=gpu.memory_mib,
        room_mib=_room(gpu.memory_mib),
        index=gpu.index,
        visible=visible,
    )


def _slices(gpu: Gpu) -> Iterator[Device]:
    for each in gpu.mig or ():
        yield Device(
            uuid=each.uuid,
            name=f"{gpu.name} {each.profile}",
            memory_mib=each.memory_mib,
            room_mib=_room(each.memory_mib),
            is_slice=True,
            parent=gpu.uuid,
            visible={CUDA: each.uuid, ORDER: PCI_ORDER},
        )


def _cpu(policy: LayoutPolicy, memory_mib: int, gpus: Sequence[Gpu]) -> Device:
    if policy.layout is Layout.C:
        lack = "none of this machine may be used" if gpus else "this machine has no GPU"
        raise InvalidLayout(f"gpus.layout: C needs MIG slices, and {lack}; give layout: B")
    return Device(uuid=CPU, name="CPU", memory_mib=memory_mib, room_mib=_room(memory_mib))


def _room(memory_mib: int | None) -> int | None:
    return None if memory_mib is None else memory_mib * SHARED_PERCENT // 100


def _part(room_mib: int | None, engines: int) -> int | None:
    return None if room_mib is None else room_mib // engines


def _engines_on(device: Device, policy: LayoutPolicy) -> int:
    return 1 if device.is_slice or policy.layout is Layout.A else policy.max_agents_per_gpu


def _nowhere(gpus: Sequence[Gpu], policy: LayoutPolicy) -> str:
    there = usable(gpus)
    used = there[: policy.max_gpus]
    in_mode = [gpu for gpu in used if gpu.mig is not None]
    if len(used) < len(there) and _devices(gpus, replace(policy, max_gpus=len(gpus))):
        return f"gpus.max_gpus: {policy.max_gpus} leaves out every GPU that could be used"
    if not in_mode:
        return "gpus.layout: C needs MIG slices, and no GPU is in MIG mode; give layout: B, or enable that mode"
    if any(gpu.mig for gpu in in_mode):
        return "gpus.enable_mig: false, and only MIG slices could be used; give enable_mig: true, or end MIG mode"
    return "gpus.enable_mig: no GPU that is used has a MIG slice; make some with nvidia-smi mig -cgi and -cci"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The devices that a model's engines may use, and how many each engine computes on."""

    devices: tuple[Device, ...]
    each: int = 1


def choose_devices(choice: DeviceChoice, engines_on: Mapping[str, int]) -> tuple[Device, ...]:
    """Return the devices for one more engine; ``engines_on`` counts the present engines, by the device's UUID."""
    fewest = sorted(choice.devices, key=lambda device: engines_on.get(device.uuid, 0))[: choice.each]
    return tuple(device for device in choice.devices if device in fewest)


def named_devices(names: Sequence[int | str], gpus: Sequence[Gpu]) -> tuple[Device, ...]:
    """Return devices of a machine by their indices or UUIDs.

    Raises:
        InvalidLayout: one is absent, lost, or hidden from our engines; the message says which may be used.
    """
    devices = devices_in(gpus)
    known = ", ".join(device.uuid if device.is_slice else f"{device.index} ({device.uuid})" for device in devices)
    found: list[Device] = []
    for name in dict.fromkeys(names):
        device = next((each for each in devices if name in (each.uuid, each.index)), None)
        if device is None:
            fault, left = _kept(name, gpus), f"those that are there: {known}" if known else "this machine has none"
            if fault is not None:
                left = f"those that may be used: {known}" if known else "none may be used"
            raise InvalidLayout(f"{name} is {fault or 'no device'}; {left}")
        found.append(device)
    return tuple(found)


def _kept(name: int | str, gpus: Sequence[Gpu]) -> str | None:
    """Return why our engines may not use a device; None if the machine has no device of that name."""
    for gpu in gpus:
        for uuid, hidden in ((gpu.uuid, gpu.hidden), *((each.uuid, each.hidden) for each in gpu.mig or ())):
            if name == uuid or (name == gpu.index and uuid == gpu.uuid):
                lost = None if gpu.lost is None else f"lost, as the driver says: {gpu.lost}"
                return lost or (None if hidden is None else f"hidden from this service by {hidden}")
    return None


def variables_of(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that show an engine only these devices."""
    values: dict[str, list[str]] = {}
    for device in devices:
        for name, value in device.visible.items():
            values.setdefault(name, []).append(value)
    return {name: each[0] if name in ONE_VALUE else ",".join(each) for name, each in values.items()}

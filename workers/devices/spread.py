"""Which devices an engine of a fixed model computes on: of those it may have, the ones with the fewest engines. Pure.

Source: specification, "Devices of replicas".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.devices.layout import Device
from workers.errors import InvalidLayout

ONE_VALUE: Final = frozenset({"CUDA_DEVICE_ORDER"})


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

"""The devices that the environment leaves to this program, as CUDA and ROCm read their variables. Pure.

Numbers count in PCI bus order, as NVML, schedulers and our engines count. As in CUDA's driver, entries after the first
invalid one are ignored, and a device that is named twice leaves none.

Source: NVIDIA, "CUDA C++ Programming Guide", environment variables, and "Multi-Instance GPU User Guide"; PyTorch,
``torch.cuda._parse_visible_devices``, for the driver's handling of faults; AMD, "GPU isolation techniques".
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from workers.devices.device import Gpu, is_amd, number_of
from workers.errors import InvalidLayout

MOST_DIGITS: Final = 10  # digits of a device's number
CUDA: Final = "CUDA_VISIBLE_DEVICES"
HIP: Final = "HIP_VISIBLE_DEVICES"
ROCR: Final = "ROCR_VISIBLE_DEVICES"
DEVICE_VARIABLES: Final = frozenset({CUDA, HIP, ROCR})
ORDER: Final = "CUDA_DEVICE_ORDER"
PCI_ORDER: Final = "PCI_BUS_ID"
OTHER_ORDER: Final = "FASTEST_FIRST"
_NUMBER: Final = re.compile(r"\+?\d+")
_UUID: Final = re.compile(r"(GPU|MIG)-.+")


def names_none(value: str) -> bool:
    """Whether a variable's value hides all devices of any machine: "", -1, NoDevFiles."""
    return not _entries(value)


def names_numbers(value: str) -> bool:
    """Whether a variable names devices by number, which depends on their order."""
    return any(_NUMBER.fullmatch(entry) for entry in _entries(value))


def bound(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs of a machine, with those marked that the environment hides.

    Raises:
        InvalidLayout: the environment uses numbers in an order that only CUDA knows.
    """
    amd, nvidia = ([gpu for gpu in gpus if is_amd(gpu) is flag] for flag in (True, False))
    marked = [*_bound_amd(amd, gpus, environment), *_bound_nvidia(nvidia, gpus, environment)]
    return sorted(marked, key=lambda gpu: gpu.index)


def usable(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the usable GPUs of a machine by number, each with its usable slices."""
    return [
        gpu if gpu.mig is None else replace(gpu, mig=tuple(each for each in gpu.mig if each.hidden is None))
        for gpu in sorted(gpus, key=lambda each: each.index)
        if gpu.hidden is None and gpu.lost is None
    ]


def _bound_nvidia(mine: list[Gpu], gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    value = environment.get(CUDA)
    if value is None:
        return mine
    if (
        environment.get(ORDER) == OTHER_ORDER
        and len({gpu.name for gpu in mine if gpu.lost is None}) > 1
        and names_numbers(value)
    ):
        raise InvalidLayout(
            f"{CUDA}={value} with {ORDER}={OTHER_ORDER} does not say which GPU of several kinds is meant; "
            f"give UUIDs (nvidia-smi -L), or {ORDER}={PCI_ORDER}"
        )
    numbers = {str(number_of(gpu, gpus)): gpu for gpu in mine}
    there = [gpu for gpu in mine if gpu.hidden is None]
    if len(there) < len(mine):  # a control group hides some, and its creator counts only the others
        numbers = {str(place): gpu for place, gpu in enumerate(there)}
    given = _found(value, there, numbers)
    return [_marked(gpu, given, f"{CUDA}={value}") for gpu in mine]


def _bound_amd(mine: list[Gpu], gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """Return AMD's cards as ROCr filters them, and then HIP, which counts those that ROCr has left."""
    lower = environment.get(ROCR)
    upper = environment.get(HIP, environment.get(CUDA) if lower is None else None)
    numbers = {str(number_of(gpu, gpus)): gpu for gpu in mine}
    if lower is not None:
        by_uuid = {gpu.uuid: gpu for gpu in mine}
        numbers = {str(place): by_uuid[uuid] for place, uuid in enumerate(_found(lower, mine, numbers))}
    places = {gpu.uuid: place for place, gpu in numbers.items()}
    given: Collection[str] = places
    if upper is not None:
        given = _found(upper, list(numbers.values()), numbers)
    because = ", ".join(f"{name}={environment[name]}" for name in (ROCR, HIP, CUDA) if name in environment)
    return [_marked(replace(gpu, shown_as=places.get(gpu.uuid, gpu.shown_as)), given, because) for gpu in mine]


def _marked(gpu: Gpu, given: Collection[str], because: str) -> Gpu:
    """Return a GPU marked with the setting that hides it; it may hide only some of its slices."""
    if gpu.uuid in given or gpu.hidden is not None:
        return gpu
    slices = tuple(replace(each, hidden=None if each.uuid in given else because) for each in gpu.mig or ())
    if any(each.hidden is None for each in slices):
        return replace(gpu, mig=slices)
    return replace(gpu, hidden=because, mig=None if gpu.mig is None else slices)


def _entries(value: str) -> list[str]:
    """Return the entries before the first that cannot name a device."""
    found = []
    for entry in value.split(","):
        name = entry.strip()
        if not (_NUMBER.match(name) or _UUID.fullmatch(name)):
            break
        found.append(name)
    return found


def _found(value: str, mine: Sequence[Gpu], numbers: Mapping[str, Gpu]) -> dict[str, None]:
    """Return the UUIDs of the devices that a value names, in its order."""
    found: dict[str, None] = {}
    for entry in _entries(value):
        number = _NUMBER.match(entry)
        if number is not None:
            gpu = numbers.get(str(int(number[0]))) if len(number[0]) < MOST_DIGITS else None
            uuid = None if gpu is None or gpu.lost is not None else gpu.uuid
        else:
            uuid = _by_uuid(entry, mine)
        if uuid is None:
            break
        if uuid in found:
            return {}
        found[uuid] = None
    return found


def _by_uuid(entry: str, mine: Sequence[Gpu]) -> str | None:
    """Return the UUID of the one device that a UUID or its beginning names."""
    known = [gpu.uuid for gpu in mine if gpu.lost is None] + [each.uuid for gpu in mine for each in gpu.mig or ()]
    if entry in known:
        return entry
    begun = [uuid for uuid in known if uuid.lower().startswith(entry.lower())]
    return begun[0] if len(begun) == 1 else None

"""Which workers of a model are its spares, and whether a spare is worth its memory. Pure.

A spare is a worker with a ready engine that takes no turns until another worker of its model is down. That worker is a
spare when it is back. A spare starts once as many workers as the model has replicas take turns.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

MOST_AUTO: Final = 1  # spares of a model whose configuration leaves the number to us
SHARED: Final = 0.85  # least part of the weights in memory that another process of the model would share
BEGIN_SHARE: Final = 0.1  # part of the machine's memory that must be free beside a new spare
KEEP_SHARE: Final = 0.05  # part that must be free beside a running one


class SpareView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a model that is not leaving.

    ``takes_turns`` says that it does so now, or will once its weights or adapters are changed. ``is_usable`` says that
    it would if it were no spare, ``is_wanted`` that it has an engine or another is coming.
    """

    number: int
    is_spare: bool = False
    takes_turns: bool = False
    is_usable: bool = False
    is_wanted: bool = False
    in_use: int = 0


class SpareChange(StrEnum):
    """A step of one worker."""

    TAKE = "takes turns"
    HOLD = "is a spare"
    START = "starts"
    STOP = "stops"


class SpareStep(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the worker with a number."""

    number: int
    change: SpareChange


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one running engine in MiB.

    ``own_mib`` is what another process of the model would need for itself; of ``weights_mib`` in files
    ``mapped_mib`` are in memory, and every process of the model shares them.
    """

    own_mib: int
    mapped_mib: int
    weights_mib: int


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's memory in MiB, or that of the control group, if it has less left."""

    free_mib: int
    total_mib: int


def decide_spares(workers: Sequence[SpareView], replicas: int, spares: int) -> list[SpareStep]:
    """Return the steps that can be taken now; call again after every change of a worker.

    ``spares`` is how many may have an engine.
    """
    serving = [each for each in workers if not each.is_spare]
    working = [each for each in serving if each.takes_turns]
    usable = sorted((each for each in workers if each.is_spare and each.is_usable), key=lambda each: each.number)
    taken = usable[: max(0, replicas - len(working))]
    # Fewer serve than shall, down or not: others are taken although they are not usable yet.
    others = sorted(
        (each for each in workers if each.is_spare and each not in taken), key=lambda each: not each.is_wanted
    )
    taken += others[: max(0, replicas - len(serving) - len(taken))]
    excess = max(0, len(serving) + len(taken) - replicas)
    order = sorted(serving, key=lambda each: (each.takes_turns, each.in_use, -each.number))
    moves = [
        *(SpareStep(number=each.number, change=SpareChange.TAKE) for each in taken),
        *(SpareStep(number=each.number, change=SpareChange.HOLD) for each in order[:excess]),
    ]
    if moves:
        return moves
    running = [each for each in workers if each.is_spare and each.is_wanted]
    if len(running) > spares:
        order = sorted(running, key=lambda each: (each.is_usable, -each.number))
        return [SpareStep(number=each.number, change=SpareChange.STOP) for each in order[: len(running) - spares]]
    idle = sorted(each.number for each in workers if each.is_spare and not each.is_wanted)
    missing = spares - len(running) if len(working) >= replicas else 0
    return [SpareStep(number=number, change=SpareChange.START) for number in idle[:missing]]


def auto_fault(engine: EngineMemory, host: HostMemory, *, is_running: bool) -> str | None:
    """Return why a model gets no spare unless its configuration asks for one; None if it gets one.

    ``is_running`` says that it has one, which needs no more memory. The engine computes on the CPU.
    """
    if engine.mapped_mib < SHARED * engine.weights_mib or not engine.weights_mib:
        return (
            f"of {engine.weights_mib} MiB of weights only {engine.mapped_mib} MiB would be shared with another process"
        )
    needed, share = (0, KEEP_SHARE) if is_running else (engine.own_mib, BEGIN_SHARE)
    floor = needed + round(share * host.total_mib)
    return f"{host.free_mib} MiB of memory are free, of {floor} MiB needed" if host.free_mib < floor else None

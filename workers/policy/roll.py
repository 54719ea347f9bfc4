"""Which workers leave and which join, from the present ones to the wanted ones. Pure.

A worker with changed settings leaves, and another takes its number. Workers of a model do so one at a time: the next
leaves when every other one takes requests again. So a setting that no engine starts with costs one worker.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec

Address = tuple[str, int]
REPLACED: Final = 3  # replacements by an equal one within REPLACED_S before a worker is left alone
REPLACED_S: Final = 60.0


class LeaveReason(StrEnum):
    """Why a worker leaves, as shown to people."""

    REMOVED = "its model was removed from the configuration"
    FEWER = "the configuration has fewer replicas of its model"
    CHANGED = "its settings were changed in the configuration"


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One present worker.

    ``is_current`` says that it has the wanted settings, ``is_ready`` that it takes requests or is drained by an
    operator; an ``is_spare`` is ready unless its engine is coming. ``is_left_alone`` says that it is not replaced,
    whatever settings are wanted. ``address`` is where it listens, None if no other could listen there.
    """

    model: str
    number: int
    is_current: bool = True
    is_leaving: bool = False
    is_ready: bool = True
    is_spare: bool = False
    is_left_alone: bool = False
    in_use: int = 0
    address: Address | None = None


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted number of a model's workers, ``spares`` included.

    ``first`` is the address of number 0, and the others follow.
    """

    model: str
    count: int
    spares: int = 0
    first: Address | None = None

    def address(self, number: int) -> Address | None:
        """Return the address of the worker with a number."""
        return None if self.first is None else (self.first[0], self.first[1] + number)


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """Give a worker no new requests, and end its engine when its last request has ended."""

    model: str
    number: int
    because: LeaveReason


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """Start a worker with the wanted settings."""

    model: str
    number: int


def decide(workers: Sequence[ReplicaView], wanted: Sequence[WantedModel]) -> list[Leave | Join]:
    """Return the steps that can be taken now; call again after every change of a worker."""
    claims = {
        address: each.model
        for each in wanted
        for number in range(each.count)
        if (address := each.address(number)) is not None
    }
    outdated = [each for each in workers if not each.is_left_alone and _is_outdated(each, claims)]
    old = [each for each in outdated if not each.is_leaving]
    counts = {each.model: each for each in wanted}
    taken = {worker.address for worker in workers if worker.address is not None}
    kept = {worker.address for worker in old}
    steps: list[Leave | Join] = []
    for model in dict.fromkeys([*counts, *(worker.model for worker in workers)]):
        here = [worker for worker in workers if worker.model == model]
        if model not in counts:
            steps += [_leave(worker, LeaveReason.REMOVED) for worker in here if not worker.is_leaving]
            continue
        of_model = counts[model]
        missing = _missing(here, of_model)
        # Missing workers whose address is still taken by one that has yet to leave are not waited for.
        is_waiting = any(of_model.address(number) not in kept for number in missing)
        steps += _leaves(here, of_model, [each for each in old if each.model == model], is_waiting=is_waiting)
        steps += [Join(model=model, number=number) for number in missing if of_model.address(number) not in taken]
    return steps


def steps_left(workers: Sequence[ReplicaView], wanted: Sequence[WantedModel]) -> list[str]:
    """Describe the steps left until the remaining workers are the wanted ones."""
    counts = {each.model: each.count - each.spares for each in wanted}
    staying = [worker for worker in workers if not worker.is_leaving]
    stale = [
        f"{worker.model}-{worker.number} waits for its turn to have other settings"
        for worker in staying
        if worker.model in counts and not worker.is_current
    ]
    coming = [f"{each.model}-{each.number} will be a spare" for each in staying if each.is_spare and not each.is_ready]
    ready = Counter(worker.model for worker in staying if worker.is_ready and not worker.is_spare)
    return [
        *stale,
        *coming,
        *(f"{model} has {ready[model]} of {count} replicas" for model, count in counts.items() if ready[model] < count),
    ]


def _is_outdated(worker: ReplicaView, claims: Mapping[Address, str]) -> bool:
    if worker.address is None:
        return not worker.is_current
    # A worker with a number beyond the count may hold another model's address.
    return not worker.is_current or claims.get(worker.address, worker.model) != worker.model


def _missing(here: Sequence[ReplicaView], wanted: WantedModel) -> list[int]:
    """Return the numbers of the workers to join."""
    numbers = {worker.number for worker in here}
    free = [number for number in range(wanted.count) if number not in numbers]
    return free[: max(0, wanted.count - len(here))]


def _leaves(
    here: Sequence[ReplicaView], wanted: WantedModel, old: Sequence[ReplicaView], *, is_waiting: bool
) -> list[Leave]:
    staying = [worker for worker in here if not worker.is_leaving]
    excess = len(staying) - wanted.count
    if excess > 0:
        order = sorted(
            staying,
            key=lambda each: (each not in old, each.is_ready, not each.is_spare, each.in_use, -each.number),
        )
        return [_leave(worker, LeaveReason.FEWER) for worker in order[:excess]]
    idle = [worker for worker in old if not worker.is_ready]
    if idle:  # they serve nothing that their leaving could cost
        return [_leave(worker, LeaveReason.CHANGED) for worker in idle]
    is_settled = not is_waiting and len(staying) == len(here) and all(worker.is_ready for worker in staying)
    emptiest = sorted(old, key=lambda each: (each.in_use, each.number))[:1] if is_settled else []
    return [_leave(worker, LeaveReason.CHANGED) for worker in emptiest]


def _leave(worker: ReplicaView, because: LeaveReason) -> Leave:
    return Leave(model=worker.model, number=worker.number, because=because)


class Replacements:
    """Records workers that are replaced although they have the wanted settings; too many are left alone.

    No configuration asks for that: it is a defect of ours, and must not cost an engine again and again.
    """

    def __init__(self) -> None:
        self._at: dict[str, deque[float]] = {}
        self._left_alone: dict[str, object] = {}

    def __repr__(self) -> str:
        return f"<Replacements left_alone={list(self._left_alone)}>"

    def note(self, worker: str, settings: object, now: float) -> None:
        """Record a worker that leaves, at ``now`` in monotonic seconds, for settings that it already has."""
        at = self._at.setdefault(worker, deque(maxlen=REPLACED))
        at.append(now)
        if len(at) == REPLACED and now - at[0] <= REPLACED_S:
            self._left_alone[worker] = settings

    def leaves_alone(self, worker: str, settings: object) -> bool:
        """Whether a worker with these settings is not replaced again."""
        return self._left_alone.get(worker) == settings

    def forgive(self, worker: str) -> None:
        """Let a worker be replaced again, on an operator's request."""
        self._at.pop(worker, None)
        self._left_alone.pop(worker, None)

"""The group in which a trainer broadcasts: the trainer has rank 0, the engines' processes have the others."""

from collections.abc import Mapping
from enum import StrEnum
from itertools import accumulate

import msgspec

from workers.errors import GroupMissing
from workers.policy.weights import Backend
from workers.spec import WorkerId
from workers.supervised import SupervisedWorker


class GroupState(StrEnum):
    """The state of a group."""

    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"  # a member is gone: the group must be made again


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The address of the trainer's store, and the seconds within which all must join."""

    backend: Backend
    address: str
    port: int
    timeout_s: float


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's place: its first rank, and its number of processes."""

    incarnation: int
    first_rank: int
    size: int


class Group:
    """A trainer and the engines of its group; written by the model's owner."""

    def __init__(self, number: int, request: GroupRequest) -> None:
        self.number = number
        self.request = request
        self.members: Mapping[WorkerId, Member] = {}
        self.state = GroupState.JOINING
        self.error: str | None = None

    def __repr__(self) -> str:
        return f"<Group {self.number} {self.state} {sorted(self.members)}>"

    @property
    def key(self) -> str:
        """The name of the group in the trainer's store."""
        return f"roundhouse-{self.number}"

    @property
    def world_size(self) -> int:
        """The number of ranks, the trainer's included."""
        return 1 + sum(member.size for member in self.members.values())

    def note_member(self, worker: WorkerId, incarnation: int | None, because: str) -> None:
        """Record a worker's serving incarnation, None without one; a group that lacks one breaks."""
        member = self.members.get(worker)
        if incarnation is None and member is not None:
            self.fail(f"{worker} is gone: {because}")
        elif incarnation is not None and self.state is GroupState.READY and not self.has(worker, incarnation):
            self.fail(f"{worker} is not in it")

    def has(self, worker: WorkerId, incarnation: int) -> bool:
        """Whether an engine of this incarnation is in it."""
        member = self.members.get(worker)
        return member is not None and member.incarnation == incarnation

    def fail(self, because: str) -> None:
        """Break the group; the first reason stands."""
        if self.state is not GroupState.BROKEN:
            self.state, self.error = GroupState.BROKEN, because


def whole_group(
    group: Group | None, number: int | None, model: str, workers: Mapping[WorkerId, SupervisedWorker]
) -> Group:
    """Return a model's group with all of its engines, if it is the one with ``number``, or with any for None.

    Raises:
        GroupMissing: it must be made again.
    """
    if group is not None and number not in (None, group.number):
        raise GroupMissing(f"model {model}: another trainer has made group {group.number} since; make it again")
    if group is None or group.state is not GroupState.READY:
        detail = "there is no group" if group is None else f"it is {group.state}: {group.error or 'not all are there'}"
        raise GroupMissing(f"model {model}: no group with a trainer ({detail}); make it with weights/init")
    for name in group.members:
        if not workers[name].now.is_serving:  # a sleeping engine reports no change of state
            group.fail(f"{name} sleeps")
            raise GroupMissing(f"model {model}: {name} sleeps, and is in the trainer's group; make it again")
    for name, worker in workers.items():
        if worker.now.is_serving and not group.has(name, worker.now.incarnation):
            group.fail(f"{name} is not in it")
            raise GroupMissing(f"model {model}: {name} is not in the trainer's group; make it again")
    return group


def place_members(engines: Mapping[WorkerId, tuple[int, int]]) -> dict[WorkerId, Member]:
    """Give ranks from 1 to engines, each with its incarnation and its number of processes."""
    sizes = [size for _, size in engines.values()]
    firsts = accumulate(sizes[:-1], initial=1)
    return {
        worker: Member(incarnation=incarnation, first_rank=first, size=size)
        for (worker, (incarnation, size)), first in zip(engines.items(), firsts, strict=True)
    }

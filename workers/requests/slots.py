"""Slots as leases: the block that took one gives it back, and giving it back twice is a defect."""

from types import TracebackType
from typing import Self

import msgspec

from workers.errors import NoSlot
from workers.notifier import Notifier


class SlotLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Fewer slots than the engine reports, and why."""

    slots: int
    because: str


class Slots:
    """Permission for ``total`` requests in flight on one worker."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.limit: SlotLimit | None = None  # until further notice
        self.is_trial = False  # the engine has yet to serve a turn: at most one is lent
        self._in_use = 0
        self._emptied = Notifier()

    def __repr__(self) -> str:
        return f"<Slots {self._in_use}/{self.total}>"

    @property
    def in_use(self) -> int:
        """The number of leased slots."""
        return self._in_use

    def offer(self, most: int) -> None:
        """Offer as many slots as the engine holds, if nothing limits them."""
        limited = most if self.limit is None else min(most, self.limit.slots)
        self.total = 1 if self.is_trial else limited

    def lease_nowait(self, count: int = 1) -> "Lease":
        """Take ``count`` slots, to be given back together.

        Raises:
            NoSlot: too many are taken.
        """
        if self._in_use + count > self.total:
            raise NoSlot(f"{self._in_use} of {self.total} slots are in use")
        self._in_use += count
        return Lease(self, count)

    def _give_back(self, count: int) -> None:
        self._in_use -= count
        if not self._in_use:
            self._emptied.notify()

    async def wait_empty(self) -> None:
        """Return when no slot is leased; the caller must prevent new leases.

        A lease counts before its request is in flight: its holder is about to ask.
        """
        await self._emptied.wait_until(lambda: not self._in_use)


class Lease:
    """One or more held slots; a context manager that gives them back."""

    def __init__(self, slots: Slots, count: int) -> None:
        self._slots: Slots | None = slots
        self._count = count

    def __enter__(self) -> Self:
        """Hold the slot for a block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the slot back."""
        self.release()

    def release(self) -> None:
        """Give the slot back; a second time is a RuntimeError."""
        if self._slots is None:
            raise RuntimeError("this slot was given back already")
        self._slots._give_back(self._count)  # noqa: SLF001 - a lease is the other half of Slots
        self._slots = None

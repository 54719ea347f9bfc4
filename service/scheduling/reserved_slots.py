"""The slots that are idle until a turn on several has all it needs, charged to the turn's key."""

from collections.abc import Callable, Mapping

from service.conversations.job.job import TurnKey
from service.conversations.record.measures import UsageCounts
from service.scheduling.core.events import SlotsReserved
from service.store.records import RequestUsed, UsageKey


class _Reserved:
    def __init__(self, whose: UsageKey) -> None:
        self.whose = whose
        self.slots = 0
        self.slot_s = 0.0


class ReservedSlots:
    """Adds up the time of reserved slots; ``whose`` returns the usage row of a waiting turn."""

    def __init__(self, whose: Callable[[TurnKey], UsageKey]) -> None:
        self._whose = whose
        self._reserved: dict[TurnKey, _Reserved] = {}
        self._over: list[SlotsReserved] = []
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<ReservedSlots {self._reserved}>"

    def settle(self, reserved: Mapping[TurnKey, int], now: float) -> list[RequestUsed]:
        """Set the reserved slots of each turn from ``now`` on; return the usage of reservations that ended."""
        if not (reserved or self._reserved):
            return []
        for each in self._reserved.values():
            each.slot_s += each.slots * (now - self._at)
        self._at = now
        over = [self._reserved.pop(key) for key in self._reserved.keys() - reserved.keys()]
        for key, slots in reserved.items():
            if key not in self._reserved:
                self._reserved[key] = _Reserved(whose=self._whose(key))
            self._reserved[key].slots = slots
        self._over += (
            SlotsReserved(owner=each.whose.key_name or None, model=each.whose.model, slot_s=each.slot_s)
            for each in over
        )
        return [RequestUsed(used=(each.whose, UsageCounts(slot_s=each.slot_s))) for each in over]

    def take_over(self) -> list[SlotsReserved]:
        """Take the reservations that ended since the last call, for the core."""
        over, self._over = self._over, []
        return over

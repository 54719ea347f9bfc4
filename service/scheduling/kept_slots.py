"""The slots that stand idle until a turn on several has as many as it needs, charged to the turn's key."""

from collections.abc import Callable, Mapping

from service.conversations.job import TurnKey
from service.conversations.measures import UsageCounts
from service.scheduling.core.events import SlotsKept
from service.store.records import RequestUsed, UsageKey


class _Keeping:
    def __init__(self, whose: UsageKey) -> None:
        self.whose = whose
        self.slots = 0
        self.slot_s = 0.0


class KeptSlots:
    """Adds up the seconds for which slots were kept; ``whose`` tells where a waiting turn's use is counted."""

    def __init__(self, whose: Callable[[TurnKey], UsageKey]) -> None:
        self._whose = whose
        self._keeping: dict[TurnKey, _Keeping] = {}
        self._over: list[SlotsKept] = []
        self._at = 0.0

    def __repr__(self) -> str:
        return f"<KeptSlots {self._keeping}>"

    def settle(self, kept: Mapping[TurnKey, int], now: float) -> list[RequestUsed]:
        """Set the slots that are kept from ``now`` on, by turn; return the usage of those kept no longer."""
        if not (kept or self._keeping):
            return []
        for keeping in self._keeping.values():
            keeping.slot_s += keeping.slots * (now - self._at)
        self._at = now
        over = [self._keeping.pop(key) for key in self._keeping.keys() - kept.keys()]
        for key, slots in kept.items():
            if key not in self._keeping:
                self._keeping[key] = _Keeping(whose=self._whose(key))
            self._keeping[key].slots = slots
        self._over += (
            SlotsKept(owner=each.whose.key_name or None, model=each.whose.model, slot_s=each.slot_s) for each in over
        )
        return [RequestUsed(used=(each.whose, UsageCounts(slot_s=each.slot_s))) for each in over]

    def take_over(self) -> list[SlotsKept]:
        """Take the kept slots since the last call, for the core."""
        over, self._over = self._over, []
        return over

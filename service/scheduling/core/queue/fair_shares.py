"""The next key at a model: start-time fair queueing over weighted tokens. Pure.

Each key has a virtual time: its usage divided by its share. The key with the least goes next. A turn is charged at its
start with the mean cost of its key's turns, and the charge is corrected at its end. The model's own virtual time is
that of the key that started last. A key that starts to wait begins there at the earliest, so time without waiting
neither gains nor costs anything.

Source: specification, "Fair shares".
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from service.conversations.job.job import TurnKey
from workers.policy.pace import Mean

Owner = str | None  # the name of a key
Shares = Mapping[Owner, float] | None  # the share of each key; None without keys
LEAST_WEIGHT: Final = 0.001  # least weight of a turn: a free start would let one key go first forever
UNKNOWN: Final = 1.0


class VirtualTimes:
    """The virtual times of all keys at one model."""

    def __init__(self, shares: Mapping[Owner, float]) -> None:
        self._shares = shares
        self._times: dict[Owner, float] = {}
        self._waiting: Counter[Owner] = Counter()  # number of queues in which each key waits
        self._now = 0.0
        self._weights: dict[Owner, Mean] = {}  # by key, of turns that have ended
        self._all_weights = Mean()

    def __repr__(self) -> str:
        return f"<VirtualTimes {self._now:.3g} {self._times}>"

    @property
    def waiting(self) -> Mapping[Owner, int]:
        """The keys that wait, with the number of their queues."""
        return dict(self._waiting)

    def time(self, owner: Owner) -> float:
        """Return the virtual time of a waiting key."""
        return self._times[owner]

    def arrive(self, owner: Owner) -> None:
        """Count one more queue in which a key waits."""
        if not self._waiting[owner]:
            self._times[owner] = max(self._times.get(owner, 0.0), self._now)
        self._waiting[owner] += 1

    def leave_queue(self, owner: Owner) -> None:
        """Count one queue less in which a key waits."""
        self._waiting[owner] -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]

    def cost(self, owner: Owner, weight: float) -> float:
        """Return the virtual time that a turn of a key adds."""
        return max(weight, LEAST_WEIGHT) / self._shares.get(owner, 1.0)

    def expected(self, owner: Owner) -> float:
        """Return the expected weight of a key's turn, in answer tokens."""
        known = self._weights.get(owner, self._all_weights)
        return known.value if known.count else UNKNOWN

    def start(self, owner: Owner) -> float:
        """Charge a key for a turn that starts; return the weight that was charged."""
        began = self._times.setdefault(owner, self._now)
        # A key that starts out of turn, on a slot held for it, must not move the others back.
        least = min((self._times[each] for each in self._waiting), default=began)
        self._now = max(self._now, min(began, least))
        weight = self.expected(owner)
        self._times[owner] = began + self.cost(owner, weight)
        return weight

    def charge(self, owner: Owner, weight: float) -> None:
        """Charge a key for usage outside its turns."""
        self._times[owner] = self._times.get(owner, self._now) + weight / self._shares.get(owner, 1.0)

    def settle(self, owner: Owner, charged: float, weight: float) -> None:
        """Correct a charge by the turn's real weight."""
        self._times[owner] += self.cost(owner, weight) - self.cost(owner, charged)
        self._weights.setdefault(owner, Mean()).add(weight)
        self._all_weights.add(weight)


class FairShares:
    """The virtual times at all models, and the charges of turns in flight.

    ``shares`` holds the share of each key by name; a key without an entry has 1.
    """

    def __init__(self, shares: Mapping[Owner, float]) -> None:
        self._shares = shares
        self._models: dict[str, VirtualTimes] = {}
        self._charged: dict[TurnKey, tuple[str, Owner, float]] = {}

    def __repr__(self) -> str:
        return f"<FairShares {self._models}>"

    @property
    def charged(self) -> frozenset[TurnKey]:
        """The turns whose charges are not settled yet."""
        return frozenset(self._charged)

    def times(self, model: str) -> VirtualTimes:
        """Return the virtual times at a model."""
        return self._models.setdefault(model, VirtualTimes(self._shares))

    def start(self, key: TurnKey, model: str, owner: Owner) -> None:
        """Charge the key of a turn that starts."""
        self._charged[key] = model, owner, self.times(model).start(owner)

    def model_of(self, key: TurnKey) -> str | None:
        """Return the model at which a turn's key is charged; None without an open charge."""
        charged = self._charged.get(key)
        return None if charged is None else charged[0]

    def settle(self, key: TurnKey, weight: float) -> None:
        """Settle the charge of a turn in flight by its real weight; a charge that is not settled stands."""
        model, owner, charged = self._charged.pop(key)
        self.times(model).settle(owner, charged, weight)

    def end_turn(self, key: TurnKey) -> None:
        """Forget the charge of a turn that is no longer in flight."""
        self._charged.pop(key, None)

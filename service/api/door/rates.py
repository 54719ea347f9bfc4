"""How often each key may submit: a bucket a key, which holds what it may do in a second and is filled at its rate.

Source: specification, "Rates and bounds of keys".
"""

from collections.abc import Callable
from typing import Final

from service.conversations.callers import Caller

BURST_S: Final = 1.0  # of its rate, and one request at least


class TokenBucket:
    """Holds at most what comes in ``BURST_S``; it begins full."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * BURST_S)
        self._level = self._most
        self._at = now

    def __repr__(self) -> str:
        return f"<TokenBucket {self._level:.1f} of {self._most:g}>"

    def take(self, now: float) -> float:
        """Take one and return 0, or take none and return after how many seconds there is one."""
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        if self._level < 1:
            return (1 - self._level) / self._per_s
        self._level -= 1
        return 0.0


class Rates:
    """The buckets of all keys that have a rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets: dict[str | None, TokenBucket] = {}

    def __repr__(self) -> str:
        return f"<Rates {self._buckets}>"

    def take(self, caller: Caller) -> float:
        """Count one submission of a caller and return 0, or none and return after how many seconds it may come."""
        if caller.requests_per_s is None:
            return 0.0
        now = self._clock()
        bucket = self._buckets.setdefault(caller.name, TokenBucket(caller.requests_per_s, now))
        return bucket.take(now)

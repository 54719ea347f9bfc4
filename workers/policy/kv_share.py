"""The share of a KV cache that is lent, and the request that gives way when it is full. Pure.

Source: D.-M. Chiu and R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer
networks" (1989); specification, "Capacity in tokens".
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

GROWTH: Final = 8  # tokens that a request may write before it can be ended
LEAST: Final = 0.3  # smallest share of the cache
SHRINK: Final = 0.8
GROW: Final = 0.01  # per look without a preemption
WHOLE: Final = 1.0


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One request's tokens in the cache; ``request`` is its number, in the order of arrival."""

    request: int
    tokens: int


def room_for(size: int, holdings: int, tokens_per_s: float, look_s: float) -> int:
    """Return how many of ``size`` tokens may be held now, so that the cache is not full before the look after next.

    ``tokens_per_s`` is the rate of all requests together.
    """
    return max(1, size - GROWTH * holdings - round(2 * look_s * tokens_per_s))


def youngest_without_room(holdings: Sequence[Holding], room: int) -> list[int]:
    """Return the requests that must end so that the others have room: the youngest, and never the oldest."""
    taken = sum(holding.tokens for holding in holdings)
    going: list[int] = []
    for holding in sorted(holdings, key=lambda each: each.request, reverse=True)[:-1]:
        if taken <= room:
            break
        taken -= holding.tokens
        going.append(holding.request)
    return going


class KvShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the cache that is lent, and the engine's preemptions at the last look."""

    part: float = WHOLE
    preemptions: int | None = None  # None before the first look

    def looked(self, preemptions: int) -> "KvShare":
        """Return the share after one more look; an engine whose count has restarted has had none."""
        before = preemptions if self.preemptions is None else self.preemptions
        if preemptions > before:
            return KvShare(part=max(LEAST, self.part * SHRINK), preemptions=preemptions)
        return replace(self, part=min(WHOLE, self.part + GROW), preemptions=preemptions)

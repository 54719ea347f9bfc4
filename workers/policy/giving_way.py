"""Who gives way when the KV cache that an engine's requests share runs out of room: the youngest. Pure.

llama.cpp ends every request when its cache is full, so somebody has to go before. The oldest never does, whatever comes
after it: so each request is the oldest some day, and ends.

Source: specification, "Capacity in tokens".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GROWTH: Final = 8  # tokens that a request may write before it can be ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one request holds of the cache, in tokens; ``request`` is its number, in the order in which they came."""

    request: int
    tokens: int


def room_for(size: int, holdings: int, tokens_per_s: float, look_s: float) -> int:
    """Return how much of a cache of ``size`` tokens may be held now, so that it is not full before the look after next.

    ``tokens_per_s`` is what all requests together write.
    """
    return max(1, size - GROWTH * holdings - round(2 * look_s * tokens_per_s))


def youngest_without_room(holdings: Sequence[Holding], room: int) -> list[int]:
    """Return the requests that have to end so that the others have room: the youngest, and never the oldest."""
    taken = sum(holding.tokens for holding in holdings)
    going: list[int] = []
    for holding in sorted(holdings, key=lambda each: each.request, reverse=True)[:-1]:
        if taken <= room:
            break
        taken -= holding.tokens
        going.append(holding.request)
    return going

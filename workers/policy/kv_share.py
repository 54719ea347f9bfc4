"""How much of a KV cache is lent: less after the engine had to preempt, and slowly more again. Pure.

Source: D.-M. Chiu and R. Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer
networks" (1989); specification, "Capacity in tokens".
"""

from dataclasses import dataclass, replace
from typing import Final

LEAST: Final = 0.3  # of the cache
SHRINK: Final = 0.8
GROW: Final = 0.01  # a look without a preemption
WHOLE: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShare:
    """The part of the cache that is lent, and how many preemptions the engine had told by then."""

    part: float = WHOLE
    preemptions: int | None = None  # None before the first look

    def looked(self, preemptions: int) -> "KvShare":
        """Return the share after one more look; an engine that counts from zero again has had none."""
        before = preemptions if self.preemptions is None else self.preemptions
        if preemptions > before:
            return KvShare(part=max(LEAST, self.part * SHRINK), preemptions=preemptions)
        return replace(self, part=min(WHOLE, self.part + GROW), preemptions=preemptions)

"""How often an engine dies for no turn's fault, and how many deaths alone convict a turn. Pure.

Source: the exact (Clopper-Pearson) bound of a binomial rate, C. J. Clopper and E. S. Pearson, Biometrika 26 (1934).
"""

import math
from dataclasses import dataclass
from typing import Final

DOUBT: Final = 0.001  # the chance that an innocent turn is convicted: that all of its deaths came by chance
UNSURE: Final = 0.05  # the rate is below its bound with 95 % certainty
LEAST_DEATHS: Final = 2
MOST_DEATHS: Final = 5
REMEMBERED: Final = 1000  # turns: what an engine did long ago says little of it
_HALVINGS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """What became of one model's turns: how many ended, and how many met a fault that was not theirs."""

    acquitted: float = 0
    unexplained: float = 0

    def with_acquitted(self) -> "TurnRecord":
        """Return the record after one more turn that ended."""
        return self._bounded(self.acquitted + 1, self.unexplained)

    def with_unexplained(self) -> "TurnRecord":
        """Return the record after one more fault that no turn explains."""
        return self._bounded(self.acquitted, self.unexplained + 1)

    @property
    def rate_bound(self) -> float:
        """The upper bound of the rate of unexplained faults a turn; 1 where nothing is known."""
        return upper_bound(self.unexplained, self.acquitted + self.unexplained)

    def faults_to_convict(self, least: int = LEAST_DEATHS, most: int = MOST_DEATHS) -> int:
        """Return the least k with rate_bound ** k <= DOUBT, between ``least`` and ``most``."""
        bound = self.rate_bound
        if bound >= 1.0:
            return most
        needed = math.ceil(math.log(DOUBT) / math.log(bound) - 1e-9) if bound > 0 else least
        return max(least, min(most, needed))

    def _bounded(self, acquitted: float, unexplained: float) -> "TurnRecord":
        share = 0.5 if acquitted + unexplained > REMEMBERED else 1.0
        return TurnRecord(acquitted=acquitted * share, unexplained=unexplained * share)


def upper_bound(faults: float, turns: float) -> float:
    """Return the rate that explains at most ``faults`` in ``turns`` with a chance of UNSURE; 1 without turns."""
    if turns <= faults:
        return 1.0
    if faults <= 0:
        return float(1.0 - UNSURE ** (1.0 / turns))
    low, high = faults / turns, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _chance_of_at_most(math.floor(faults), turns, middle) > UNSURE:
            low = middle
        else:
            high = middle
    return high


def _chance_of_at_most(faults: int, turns: float, rate: float) -> float:
    """Return the binomial distribution function; ``turns`` need not be whole, since old turns count for less."""
    logs = (
        math.lgamma(turns + 1)
        - math.lgamma(count + 1)
        - math.lgamma(turns - count + 1)
        + count * math.log(rate)
        + (turns - count) * math.log1p(-rate)
        for count in range(faults + 1)
    )
    return math.fsum(math.exp(each) for each in logs) if rate < 1.0 else 0.0

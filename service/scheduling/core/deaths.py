"""The rate of an engine's unexplained deaths, the deaths that convict a turn, and the retries of a turn. Pure.

Source: the exact (Clopper-Pearson) bound of a binomial rate, C. J. Clopper and E. S. Pearson, Biometrika 26 (1934).
"""

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from service.conversations.record.transcript import Charges
from workers.outcome import EngineFailed, FailureReason

DOUBT: Final = 0.001  # chance that an innocent turn is convicted because all its deaths were accidents
UNSURE: Final = 0.05  # chance that the rate is above its bound (95 % certainty)
LEAST_DEATHS: Final = 2
MOST_DEATHS: Final = 5
REMEMBERED: Final = 1000  # turns in a record; older ones say little about the engine
_HALVINGS: Final = 40
LEAST_REFUSALS: Final = 5  # refusals by engines that answered other turns meanwhile
MOST_REFUSALS: Final = 10
MOST_STALLS: Final = 5  # stalls while the engine answered a canary or another turn
PAUSE_S: Final = 30.0  # longest pause between two attempts that counts as time of refusals
STALLED: Final = frozenset({FailureReason.STALLED_PREFILL, FailureReason.STALLED_DECODE})


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one model's turns: the number that ended, and the number that met a fault with another cause."""

    acquitted: float = 0
    unexplained: float = 0

    def with_acquitted(self) -> "TurnRecord":
        """Return the record after one more turn that ended."""
        return self._bounded(self.acquitted + 1, self.unexplained)

    def with_unexplained(self) -> "TurnRecord":
        """Return the record after one more fault that no turn caused."""
        return self._bounded(self.acquitted, self.unexplained + 1)

    @property
    def rate_bound(self) -> float:
        """The upper bound of unexplained faults per turn; 1 without a record."""
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
    """Return the highest rate at which ``faults`` or fewer in ``turns`` have a chance of UNSURE; 1 without turns."""
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
    """Return the binomial distribution function; ``turns`` may be a fraction, since old turns count for less."""
    logs = (
        math.lgamma(turns + 1)
        - math.lgamma(count + 1)
        - math.lgamma(turns - count + 1)
        + count * math.log(rate)
        + (turns - count) * math.log1p(-rate)
        for count in range(faults + 1)
    )
    return math.fsum(math.exp(each) for each in logs) if rate < 1.0 else 0.0


def refuse(
    charges: Charges,
    failed: EngineFailed,
    now: float,
    *,
    asked_s: float,
    refusal_s: float | None,
    record: TurnRecord,
) -> tuple[Charges, FailureReason | None]:
    """Return the charges after one more refusal, and a reason to give up if it was the last one allowed.

    A refusal counts only if the engine answered another turn meanwhile. Otherwise the turn is retried until
    ``refusal_s`` seconds have passed since its first refusal. ``asked_s`` is the length of this attempt. ``record``
    counts the model's refusals: the more turns end well after refusals, the more refusals it takes. ``now`` is in
    seconds since the epoch.
    """
    if failed.reason is FailureReason.ENGINE_DIED:
        return charges, None  # killed because another turn stalled
    is_stall = failed.reason in STALLED
    refused = replace(
        charges,
        refused_at=now,
        refused_s=charges.refused_s + _refused_s(charges, now, asked_s),
        refusals=charges.refusals + (failed.is_proved and not is_stall),
        stalls=charges.stalls + (failed.is_proved and is_stall),
    )
    if refused.stalls >= MOST_STALLS or refused.refusals >= record.faults_to_convict(LEAST_REFUSALS, MOST_REFUSALS):
        return refused, failed.reason
    if refusal_s is not None and refused.refused_s >= refusal_s:
        return refused, failed.reason if is_stall else FailureReason.ENGINE_REJECTED
    return refused, None


def _refused_s(charges: Charges, now: float, asked_s: float) -> float:
    """Return the seconds that an attempt and the pause before it add to the time of refusals; 0 for the first."""
    if charges.refused_at is None:
        return 0.0
    return asked_s + min(max(0.0, now - asked_s - charges.refused_at), PAUSE_S)

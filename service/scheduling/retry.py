"""Whether a turn whose engine failed is tried again. Pure."""

from dataclasses import dataclass
from typing import Final

from workers.outcome import EngineFailed, FailureReason

POISONOUS_DEATHS: Final = 2  # incarnations that one turn may bring down (contract, section 5.5)
MAX_ENGINE_FAILURES: Final = 5  # failures that brought nothing down: an engine that refuses again and again


@dataclass(frozen=True, slots=True, kw_only=True)
class Strikes:
    """What a turn has been part of so far."""

    deaths: int = 0
    failures: int = 0


def strike(strikes: Strikes, failed: EngineFailed, *, has_other_suspect: bool) -> tuple[Strikes, FailureReason | None]:
    """Return the strikes after one more failure, and the reason to give up, if that was one too many.

    A death is charged to the suspect that was aboard, and to everybody only where there was none: so a poisonous turn
    is found out at its second death, and the neighbours that died with it are not.
    """
    if failed.brought_down and has_other_suspect:
        return strikes, None
    if failed.brought_down:
        deaths = strikes.deaths + 1
        reason = FailureReason.POISONED if deaths >= POISONOUS_DEATHS else None
        return Strikes(deaths=deaths, failures=strikes.failures), reason
    failures = strikes.failures + 1
    return Strikes(deaths=strikes.deaths, failures=failures), failed.reason if failures >= MAX_ENGINE_FAILURES else None

"""Whether a turn whose engine failed is tried again. Pure."""

from dataclasses import dataclass
from typing import Final

from service.conversations.job import TurnKey
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
    if failed.reason is FailureReason.ENGINE_DIED:
        return strikes, None  # it was killed for another's silence
    failures = strikes.failures + 1
    return Strikes(deaths=strikes.deaths, failures=failures), failed.reason if failures >= MAX_ENGINE_FAILURES else None


class Suspicion:
    """Which suspect flies in which incarnation; at most one does, since the core keeps them apart."""

    def __init__(self) -> None:
        self._aboard: dict[str, tuple[int, TurnKey]] = {}  # by worker: the incarnation, and the suspect

    def __repr__(self) -> str:
        """State who is suspected."""
        return f"<Suspicion {self._aboard}>"

    def board(self, worker: str, incarnation: int, key: TurnKey) -> None:
        """Note that a suspect is put on a slot."""
        self._aboard[worker] = (incarnation, key)

    def clear(self) -> None:
        """Suspect nobody."""
        self._aboard.clear()

    def leave(self, key: TurnKey) -> None:
        """Note that a turn has ended without a death."""
        self._aboard = {worker: aboard for worker, aboard in self._aboard.items() if aboard[1] != key}

    def falls_on_another(self, worker: str, incarnation: int, key: TurnKey) -> bool:
        """Whether a suspect other than ``key`` was aboard when that incarnation died."""
        aboard = self._aboard.get(worker)
        return aboard is not None and aboard[0] == incarnation and aboard[1] != key

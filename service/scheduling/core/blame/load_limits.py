"""How many turns at once a worker's engines bear, where they have died under load. Pure.

An engine whose every turn ends alone and that died with several on it dies of the load. Its worker gets fewer slots,
and one more again after so many ends at the limit; each death at a number makes the next try of it twice as late.
"""

from dataclasses import dataclass, replace
from typing import Final

KEPT_SHARE: Final = 0.75  # of the turns that were on the engine when it died
PROBATION: Final = 50  # ends with every slot in use, before one more is tried
PROBATION_MAX: Final = 1600


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLimit:
    """What one worker is lowered to, and how many ends there are still to be before one slot more is tried."""

    slots: int
    probation: int
    ends_left: int


class LoadLimits:
    """The workers that are lowered; written by the scheduler alone."""

    def __init__(self) -> None:
        self._limits: dict[str, LoadLimit] = {}

    def __repr__(self) -> str:
        return f"<LoadLimits {self._limits}>"

    def lower(self, worker: str, company: int) -> int:
        """Return how many slots a worker keeps whose engine died with ``company`` turns on it."""
        before = self._limits.get(worker)
        slots = max(1, min(company - 1, int(company * KEPT_SHARE)))
        if before is not None:
            slots = min(slots, before.slots)
        probation = min(PROBATION_MAX, 2 * before.probation) if before is not None else PROBATION
        self._limits[worker] = LoadLimit(slots=slots, probation=probation, ends_left=probation)
        return slots

    def note_end(self, worker: str, in_flight: int, full: int) -> int | None:
        """Take an end with ``in_flight`` turns on the worker, itself included; return the new number, if it is raised.

        ``full`` is how many slots the worker has without a limit.
        """
        limit = self._limits.get(worker)
        if limit is None or in_flight < limit.slots or limit.slots >= full:
            return None
        if limit.ends_left > 1:
            self._limits[worker] = replace(limit, ends_left=limit.ends_left - 1)
            return None
        self._limits[worker] = LoadLimit(slots=limit.slots + 1, probation=limit.probation, ends_left=limit.probation)
        return limit.slots + 1

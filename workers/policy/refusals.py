"""Whether one worker's refusals count against the refused turns or against the engine. Pure.

An answered canary of one token proves that an engine computes, not that it serves turns. While several different turns
are refused and none gets a token, nothing excuses the engine: it may fail in ways that a canary does not test. The
turns are not charged then. After ``SICK_S`` the engine is replaced, once: turns that the next one refuses as well,
before it has served any, are charged.
"""

from collections.abc import Hashable
from typing import Final

SICK_TURNS: Final = 3  # different ones, refused with no answer between
SICK_S: Final = 60.0


class Refusals:
    """The refusals since a turn of the worker was last served; times in monotonic seconds."""

    def __init__(self) -> None:
        self._turns: set[Hashable] = set()
        self._since = 0.0
        self._incarnation: int | None = None  # the first that refused

    def __repr__(self) -> str:
        return f"<Refusals of {len(self._turns)} turns by engine {self._incarnation}>"

    def add(self, turn: Hashable, incarnation: int, now: float) -> None:
        """Count a refused turn."""
        if self._incarnation is None:
            self._incarnation, self._since = incarnation, now
        if incarnation == self._incarnation:
            self._turns.add(turn)

    def clear(self) -> None:
        """Forget all refusals: a turn was served."""
        self._turns.clear()
        self._incarnation = None

    def speak_against_engine(self, incarnation: int) -> bool:
        """Whether an engine may be ill, so that its refusals charge no turn."""
        return incarnation == self._incarnation and len(self._turns) >= SICK_TURNS

    def are_too_many(self, incarnation: int, now: float) -> bool:
        """Whether an engine has refused for so long that it must be replaced."""
        return self.speak_against_engine(incarnation) and now - self._since >= SICK_S

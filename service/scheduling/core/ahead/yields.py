"""What reading beforehand was worth: tokens that turns found in the caches, and those that were read in vain. Pure."""

from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Final

LEAST: Final = 8  # prompts of an engine, before what they were worth tells anything
IN_VAIN: Final = 0.25  # of the tokens: beyond that an engine reads nothing beforehand any more


class ReadFor(StrEnum):
    """What became of a token that was read beforehand."""

    USED = "used"
    WASTED = "wasted"


class Yields:
    """By model for whoever looks, and of each worker's present engine for whether it goes on."""

    def __init__(self) -> None:
        self._by_model: Counter[tuple[str, ReadFor]] = Counter()
        self._by_worker: dict[str, tuple[int, int, int]] = {}

    def __repr__(self) -> str:
        return f"<Yields {dict(self._by_model)}>"

    @property
    def by_model(self) -> Mapping[tuple[str, ReadFor], int]:
        """Tokens since the start, by model and what became of them."""
        return self._by_model

    def forget(self, worker: str) -> None:
        """Note that an engine is gone: another one may keep what it reads."""
        self._by_worker.pop(worker, None)

    def pays(self, worker: str) -> bool:
        """Whether an engine keeps enough of what it reads beforehand, as far as is known."""
        count, used, wasted = self._by_worker.get(worker, (0, 0, 0))
        return count < LEAST or wasted <= IN_VAIN * (used + wasted)

    def add(self, model: str, worker: str, *, read: int, used: int) -> None:
        """Take one prompt: so many tokens of it were read, and so many found."""
        if not read:
            return
        before = self._by_worker.get(worker, (0, 0, 0))
        self._by_worker[worker] = before[0] + 1, before[1] + used, before[2] + read - used
        self._by_model[model, ReadFor.USED] += used
        self._by_model[model, ReadFor.WASTED] += read - used

"""A mean that forgets. Pure."""

from typing import Final

FORGETTING: Final = 1 / 50  # of the oldest knowledge with each turn: agents' answers grow with their conversations


class Mean:
    """A mean that is exact at first, and then forgets."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def __repr__(self) -> str:
        return f"<Mean {self.value:.3g} of {self.count}>"

    def add(self, value: float) -> None:
        """Take one more."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, FORGETTING)

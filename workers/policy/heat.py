"""How much each model is asked for: recency and frequency in one number. Pure.

Source: D. Lee et al., "LRFU: A spectrum of policies that subsumes the least recently used and least frequently used
policies" (2001). Measured with ``bench.swaps``: the fewest swaps with a half-life of 8 requests, over even, skewed and
bursty mixes.
"""

from typing import Final

HALF_LIFE: Final = 8.0  # in requests of all models


class Heat:
    """Counts requests of each model, of which those of long ago count less."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, int]] = {}  # its heat, and after how many requests of all that was so
        self._requests = 0

    def __repr__(self) -> str:
        return f"<Heat of {len(self._noted)} models>"

    def note(self, model: str) -> None:
        """Take a request."""
        self._requests += 1
        self._noted[model] = self.of_model(model) + 1.0, self._requests

    def of_model(self, model: str) -> float:
        """Return how much a model is asked for now."""
        heat, at = self._noted.get(model, (0.0, 0))
        return float(heat * 0.5 ** ((self._requests - at) / HALF_LIFE))

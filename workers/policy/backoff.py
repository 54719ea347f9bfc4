"""How long to wait before something is tried again. Pure."""

from dataclasses import dataclass

MOST_DOUBLINGS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that double from ``first_s`` to ``last_s``, in seconds."""

    first_s: float
    last_s: float

    def after(self, failures: int) -> float:
        """Return the pause after so many failures in a row; the first one's for none."""
        return min(self.last_s, self.first_s * 2.0 ** min(max(0, failures - 1), MOST_DOUBLINGS))

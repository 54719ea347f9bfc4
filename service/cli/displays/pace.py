"""The pace at which turns end, and the time left: shown only once enough turns have ended."""

import math
from collections import deque
from typing import Final

from service.cli.displays.console import part

WINDOW_S: Final = 60.0  # older counts say nothing about the present pace
LEAST_S: Final = 5.0
LEAST_TURNS: Final = 10
SOON: Final = 10
MINUTE: Final = 60
HOUR: Final = 3600


class Pace:
    """Takes counts of ended turns, with times of a monotonic clock."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def __repr__(self) -> str:
        return f"<Pace {self.turns_per_s}>"

    def note(self, at: float, ended: int) -> None:
        """Record the number of ended turns; a smaller one means that the service has restarted."""
        if self._seen and ended < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((at, ended))
        # One older count stays, as the start of the window.
        while len(self._seen) > 1 and self._seen[1][0] <= at - WINDOW_S:
            self._seen.popleft()

    @property
    def turns_per_s(self) -> float | None:
        """Turns per second over the last minute; None until ten turns have ended in five seconds or more."""
        if not self._seen:
            return None
        (began_at, before), (at, ended) = self._seen[0], self._seen[-1]
        if at - began_at < LEAST_S or ended - before < LEAST_TURNS:
            return None
        return (ended - before) / (at - began_at)

    def left_s(self, turns: int) -> float | None:
        """Return the seconds that ``turns`` will take at this pace; None while it is not known."""
        rate = self.turns_per_s
        return None if rate is None else turns / rate


def about(seconds: float) -> str:
    """Return an estimate, rounded as it deserves: ``about 40 s``, ``about 12 min``, ``about 3 h 20 min``."""
    minutes = round(seconds / MINUTE)
    hours, rest = divmod(round(minutes, -1), 60)
    forms = {
        SOON: f"less than {SOON} s",
        MINUTE: f"about {round(seconds, -1):.0f} s",
        HOUR: f"about {minutes} min",
        math.inf: f"about {hours} h{part(' {} min', rest)}",
    }
    return next(form for below, form in forms.items() if seconds < below)


def pace_text(pace: Pace, turns_left: int, tokens_per_s: float) -> str:
    """Return the rates and the estimated time left, as far as they are known."""
    parts = [f"{tokens_per_s:.0f} tokens/s"]
    if pace.turns_per_s is not None:
        parts.append(f"{pace.turns_per_s:.1f} turns/s")
    left = pace.left_s(turns_left)
    if left is not None and turns_left:
        parts.append(f"{about(left)} left")
    return " | ".join(parts)


def bar(done: float, total: float, width: int) -> str:
    """Return a bar of ``width`` characters; full only if all is done, empty only if nothing is."""
    if total <= 0:
        return "░" * width
    full = round(width * min(1.0, max(0.0, done / total)))
    if 0 < done < total and width > 1:
        full = min(width - 1, max(1, full))
    return "█" * full + "░" * (width - full)

"""When a broken engine is started again: exponential backoff with jitter, and its limit. Pure."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from annotated_types import Ge

from workers.policy.limits import Configured, Seconds

MOST_DOUBLINGS = 62
SPARE_S = 5.0


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses that double from ``first_s`` to ``last_s``, in seconds."""

    first_s: float
    last_s: float

    def after(self, failures: int) -> float:
        """Return the pause after ``failures`` in a row; none counts as one."""
        return min(self.last_s, self.first_s * 2.0 ** min(max(0, failures - 1), MOST_DOUBLINGS))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy(Configured):
    """Limits on restarts, in seconds.

    ``failures`` within ``window_s`` are too many, and the worker gives up; None never are. A death counts unless a turn
    or a signal from outside explains it. After ``retry_s`` it tries once more (a half-open breaker): a success takes it
    back, a failure gives up again at once; None leaves it to an operator.
    """

    initial_s: Seconds = 1.0
    max_s: Seconds = 60.0
    failures: Annotated[int, Ge(1)] | None = 5
    window_s: Seconds = 600.0
    retry_s: Seconds | None = 300.0

    def recent(self, failed_at: tuple[float, ...], now: float) -> tuple[float, ...]:
        """Return the failures that still count."""
        return tuple(at for at in failed_at if now - at < self.window_s)

    def are_too_many(self, failed_at: tuple[float, ...]) -> bool:
        """Whether the worker gives up after these recent failures."""
        return self.failures is not None and len(failed_at) >= self.failures

    def delay_s(self, failures: int, jitter: float) -> float:
        """Return the pause before the next start, after ``failures`` since the engine last answered.

        ``jitter`` in [0, 1) takes up to half of it away, so that replicas that died together do not load weights
        together.
        """
        return Backoff(first_s=self.initial_s, last_s=self.max_s).after(failures) * (1.0 - 0.5 * jitter)

    def spare_delay_s(self, failures: int, jitter: float) -> float:
        """Return the pause if a spare has taken the place: it reads its prompts before another engine loads."""
        return max(SPARE_S, self.delay_s(failures, jitter))

"""For how long a run is tried again when engines fail under it. Pure: the caller brings the time."""

from typing import Final

from workers.outcome import EngineFailed
from workers.policy.backoff import Backoff

MOST_DEATHS: Final = 5  # of engines under one run, which may be the cause of them
PAUSES: Final = Backoff(first_s=0.1, last_s=5.0)


class Patience:
    """What one run has behind it. Deaths by a signal from outside count towards nothing."""

    def __init__(self) -> None:
        self.deaths = 0
        self._refusals = 0
        self._refused_since: float | None = None

    def __repr__(self) -> str:
        return f"<Patience deaths={self.deaths} refusals={self._refusals}>"

    def pause_s(self, failed: EngineFailed, now: float, refusal_s: float | None) -> float | None:
        """Return how long to wait before the next try, None where there is to be none.

        ``refusal_s`` is for how long the worker may refuse one request.
        """
        if failed.brought_down:
            self.deaths += not failed.is_outside
            return 0.0 if self.deaths < MOST_DEATHS else None
        self._refusals += 1
        self._refused_since = now if self._refused_since is None else self._refused_since
        if refusal_s is not None and now - self._refused_since >= refusal_s:
            return None
        return failed.retry_after_s or PAUSES.after(self._refusals)

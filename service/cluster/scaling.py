"""Decides when a cluster under Ray gets another node, and when it gives one back."""

import re
from collections.abc import Mapping
from typing import Final

WAIT_S: Final = 10.0  # turns wait for so long before a node is added
IDLE_S: Final = 600.0  # nothing runs or waits for so long before an added node is drained
_SAMPLE: Final = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Scale:
    """The number of nodes beyond the first ones; times are in seconds of any clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle_since: float | None = None

    def __repr__(self) -> str:
        return f"<Scale to {self._most}>"

    def step(self, now: float, added: int, oldest_s: float, wanted: float, *, is_pending: bool) -> int:
        """Return 1 to add a node, -1 to drain one, else 0.

        ``oldest_s`` is how long the oldest ready turn has waited, ``wanted`` the slots that could be used at once. No
        node is added while the last one ``is_pending``: it cannot have helped yet.
        """
        if wanted:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        if oldest_s > WAIT_S and not is_pending and added < self._most:
            return 1
        if added and self._idle_since is not None and now - self._idle_since >= IDLE_S:
            self._idle_since = now
            return -1
        return 0


def samples_of(text: str) -> Mapping[str, list[float]]:
    """Return the values of each metric in Prometheus' text form."""
    found: dict[str, list[float]] = {}
    for match in _SAMPLE.finditer(text):
        found.setdefault(match[1], []).append(float(match[2]))
    return found

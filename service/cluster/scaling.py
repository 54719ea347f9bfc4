"""Decides when a cluster under Ray gets another node, and when it gives one back."""

from typing import Final

import msgspec

WAIT_S: Final = 10.0  # turns wait for so long before a node is added
IDLE_S: Final = 600.0  # nothing runs or waits for so long before an added node is drained


class ClusterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a cluster at one moment.

    ``oldest_s`` is how long the oldest ready turn of a node has waited, ``wanted`` counts the slots that could be used
    at once. ``is_queued``: the database has conversations that no node has claimed. ``is_pending``: a node does not
    answer yet.
    """

    oldest_s: float
    wanted: float
    is_queued: bool
    is_pending: bool


class Scale:
    """The number of nodes beyond the first ones; times are in seconds of any clock."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle_since: float | None = None
        self._queued_since: float | None = None

    def __repr__(self) -> str:
        return f"<Scale to {self._most}>"

    def step(self, now: float, added: int, load: ClusterLoad) -> int:
        """Return 1 to add a node, -1 to drain one, else 0.

        No node is added while the last one is pending: it cannot have helped yet.
        """
        is_idle = not load.wanted and not load.is_queued
        self._idle_since = _since(self._idle_since, now, is_true=is_idle)
        self._queued_since = _since(self._queued_since, now, is_true=load.is_queued)
        waits_s = max(load.oldest_s, 0.0 if self._queued_since is None else now - self._queued_since)
        if waits_s > WAIT_S and not load.is_pending and added < self._most:
            self._queued_since = now if load.is_queued else None
            return 1
        if added and self._idle_since is not None and now - self._idle_since >= IDLE_S:
            self._idle_since = now
            return -1
        return 0


def _since(before: float | None, now: float, *, is_true: bool) -> float | None:
    """Return since when something is true; None while it is not."""
    return (now if before is None else before) if is_true else None

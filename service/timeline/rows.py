"""Lays spans on rows, since the store does not record the slot of an attempt."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, merge
from itertools import islice
from typing import Final

from msgspec.structs import replace

from service.timeline.spans import Span

SORTED_AT_ONCE: Final = 4096


class _Rows:
    """The rows of one worker: the free ones, and the times when the others get free."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._taken: list[tuple[float, int]] = []

    def take(self, start: float, end: float) -> int:
        """Take the lowest row that is free at ``start`` until ``end``, and return it; starts come in order."""
        while self._taken and self._taken[0][0] <= start:
            heappush(self._free, heappop(self._taken)[1])
        if self._free:
            row = heappop(self._free)
        else:
            row, self.count = self.count, self.count + 1
        heappush(self._taken, (end, row))
        return row


def lay_rows(spans: Iterable[Span]) -> tuple[list[Span], dict[str, int]]:
    """Return the spans by their starts, each on the lowest free row of its worker, and each worker's number of rows.

    No two spans of a row overlap, and a worker has as many rows as spans at its busiest moment: never more than slots,
    if all attempts are of one node. A span that has not ended holds its row for ever; one that ended before it began,
    since a clock was set back, holds it for no time.
    """
    workers: dict[str, _Rows] = defaultdict(_Rows)
    laid = [replace(span, row=workers[span.worker].take(span.started_s, end_of(span))) for span in _in_order(spans)]
    return laid, {worker: rows.count for worker, rows in sorted(workers.items())}


def _in_order(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans by their starts, sorted in parts: one long sort would block every other thread."""
    left = iter(spans)
    parts = iter(lambda: sorted(islice(left, SORTED_AT_ONCE), key=_place), [])
    return merge(*parts, key=_place)


def _place(span: Span) -> tuple[float, float]:
    return span.started_s, end_of(span)


def end_of(span: Span, now_s: float = math.inf) -> float:
    """Return the end of a span in seconds after the origin; ``now_s`` for a running one."""
    return now_s if span.finished_s is None else max(span.started_s, span.finished_s)

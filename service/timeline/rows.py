"""Lays spans on rows: which slot of its worker an attempt held is not kept, and need not be."""

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
    """The rows of one worker: those that are free, and when the others get free."""

    def __init__(self) -> None:
        self.count = 0
        self._free: list[int] = []
        self._taken: list[tuple[float, int]] = []

    def take(self, start: float, end: float) -> int:
        """Return the lowest row that is free from ``start``, and take it to ``end``; starts come in their order."""
        while self._taken and self._taken[0][0] <= start:
            heappush(self._free, heappop(self._taken)[1])
        if self._free:
            row = heappop(self._free)
        else:
            row, self.count = self.count, self.count + 1
        heappush(self._taken, (end, row))
        return row


def lay_rows(spans: Iterable[Span]) -> tuple[list[Span], dict[str, int]]:
    """Return the spans in the order of their starts, each on the lowest free row of its worker, and the rows of each.

    No two spans of a row overlap, and a worker has no more rows than spans at its busiest moment: never more than
    slots, while all attempts are of one node. A span that has not ended holds its row for ever; one that ended before
    it began, by a clock that was set back, holds it for no time.
    """
    workers: dict[str, _Rows] = defaultdict(_Rows)
    laid = [replace(span, row=workers[span.worker].take(span.started_s, end_of(span))) for span in _in_order(spans)]
    return laid, {worker: rows.count for worker, rows in sorted(workers.items())}


def _in_order(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield spans by their starts, sorted in parts: one long sort would hold up every other thread."""
    left = iter(spans)
    parts = iter(lambda: sorted(islice(left, SORTED_AT_ONCE), key=_place), [])
    return merge(*parts, key=_place)


def _place(span: Span) -> tuple[float, float]:
    return span.started_s, end_of(span)


def end_of(span: Span, now_s: float = math.inf) -> float:
    """Return when a span ends, in seconds after the origin; one that is running has ``now_s``."""
    return now_s if span.finished_s is None else max(span.started_s, span.finished_s)

"""The last lines of a worker's engine, of this incarnation and the one before, in bounded memory."""

import re
from collections import deque
from datetime import UTC, datetime
from typing import Final

from workers.process.handed_over import HeldLog, LogLine

MAX_LINES: Final = 2000  # per incarnation: a llama-server start prints some 200
MAX_LINE_BYTES: Final = 8192
MOST_WORDS: Final = 300
_ERROR: Final = re.compile("error", re.IGNORECASE)
_SAYS_NO_MORE: Final = re.compile("exiting due to|see root cause", re.IGNORECASE)  # only repeats that an error occurred


class LogRing:
    """Cuts output into lines and keeps the newest; an older incarnation's lines never push out the present one's."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self._previous: deque[LogLine] = deque(maxlen=max_lines)
        self._current: deque[LogLine] = deque(maxlen=max_lines)
        self._incarnation = 0
        self._number = 0
        self._partial: dict[int, bytes] = {}
        self.bytes_taken = 0

    def __repr__(self) -> str:
        return f"<LogRing incarnation={self._incarnation} lines={len(self._current)}+{len(self._previous)}>"

    def begin_incarnation(self, incarnation: int) -> None:
        """Start the lines of a new incarnation; those of the last one are kept, older ones go."""
        self._end_partial()  # streams may have ended midway through a line
        self._incarnation = incarnation
        self._previous = self._current
        self._current = deque(maxlen=self._max_lines)

    def hand_over_lines(self) -> HeldLog:
        """Return all lines for another program."""
        return HeldLog(
            incarnation=self._incarnation,
            number=self._number,
            bytes_taken=self.bytes_taken,
            previous=list(self._previous),
            current=list(self._current),
            partial=dict(self._partial),
        )

    def restore(self, held: HeldLog) -> None:
        """Continue from another program's lines."""
        self._incarnation, self._number, self.bytes_taken = held.incarnation, held.number, held.bytes_taken
        self._previous = deque(held.previous, maxlen=self._max_lines)
        self._current = deque(held.current, maxlen=self._max_lines)
        self._partial = dict(held.partial)

    def add_output(self, stream: int, data: bytes) -> None:
        """Add output as it came on stream 1 or 2."""
        self.bytes_taken += len(data)
        *lines, rest = (self._partial.get(stream, b"") + data).split(b"\n")
        self._number += len(lines[: -self._max_lines])  # a flood of blank lines: surplus lines are not made
        for line in lines[-self._max_lines :]:
            self._append(stream, self._cut(stream, line))
        self._partial[stream] = self._cut(stream, rest)

    def add_note(self, text: str) -> None:
        """Add a line of our own."""
        self._end_partial()
        self._append(0, f"[roundhouse] {text}".encode())

    def tail(self, count: int, *, after: int = 0, incarnation: int | None = None) -> tuple[LogLine, ...]:
        """Return the last ``count`` lines with a number above ``after``, of all incarnations held or of one."""
        lines = [
            line
            for line in (*self._previous, *self._current)
            if line.number > after and incarnation in (None, line.incarnation)
        ]
        return tuple(lines[-count:]) if count > 0 else ()

    def tails(self, count: int, *, incarnation: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the last lines of standard output and of standard error of one incarnation, whole or not."""
        self._end_partial()
        lines = [line for line in (*self._previous, *self._current) if line.incarnation == incarnation]
        out, error = ([line.text for line in lines if line.stream == stream] for stream in (1, 2))
        return tuple(out[-count:]), tuple(error[-count:])

    def words_of_failure(self, incarnation: int) -> str | None:
        """Return the line that best explains an incarnation's end: its last error, else its last line."""
        out, error = (
            [line.strip() for line in lines if line.strip()] for lines in self.tails(MAX_LINES, incarnation=incarnation)
        )
        last = next(iter([*error[-1:], *out[-1:]]), None)
        errors = [line for line in (*out, *error) if _ERROR.search(line)]
        kept = [line for line in errors if not _SAYS_NO_MORE.search(line)] or errors
        if not kept or kept[-1] == last:
            return None if last is None else f"its last line: {last[:MOST_WORDS]}"
        return f"its last error: {kept[-1][:MOST_WORDS]}"

    def _end_partial(self) -> None:
        for stream, line in self._partial.items():
            if line:
                self._append(stream, line)
        self._partial.clear()

    def _cut(self, stream: int, line: bytes) -> bytes:
        """Add the full pieces of a line that is too long; return the rest."""
        while len(line) > MAX_LINE_BYTES:
            self._append(stream, line[:MAX_LINE_BYTES])
            line = line[MAX_LINE_BYTES:]
        return line

    def _append(self, stream: int, line: bytes) -> None:
        self._number += 1
        self._current.append(
            LogLine(
                number=self._number,
                incarnation=self._incarnation,
                stream=stream,
                at_utc=datetime.now(UTC),
                text=line.decode("utf-8", "replace").rstrip("\r"),
            )
        )

"""Cutting of a stream of bytes into lines and into server-sent events.

Lines end only in LF or CRLF: U+2028 and U+0085 are ordinary characters inside JSON strings.
"""

from collections.abc import Iterator
from typing import NamedTuple

from roundhouse_client.errors import AnswerMalformed

MOST_LINE_BYTES = 1 << 30  # longest line: one holds a transcript, and Roundhouse sends none longer


class LineCutter:
    """Cuts a stream into lines, however its bytes are divided."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # parts of an unfinished line
        self._size = 0

    def __repr__(self) -> str:
        return f"<LineCutter holds={self._size} bytes>"

    @property
    def is_between(self) -> bool:
        """Whether no line has begun."""
        return not self._size

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield every line that ``chunk`` completes, without its end.

        Raises:
            AnswerMalformed: a line has no end.
        """
        head, *rest = chunk.split(b"\n")
        for part in rest:
            self._parts.append(head)
            line = b"".join(self._parts)
            self._parts, self._size = [], 0
            yield line.removesuffix(b"\r")
            head = part
        if head:
            self._parts.append(head)
            self._size += len(head)
        if self._size > MOST_LINE_BYTES:
            raise AnswerMalformed(f"a line of more than {MOST_LINE_BYTES} bytes")


class Frame(NamedTuple):
    """One server-sent event: its id, empty if it has none of its own, its name and its data."""

    id: str
    event: str
    data: str


class FrameCutter:
    """Cuts a stream into server-sent events (WHATWG HTML); one without its final blank line is dropped."""

    def __init__(self) -> None:
        self._lines = LineCutter()
        self._id = self._event = ""
        self._data: list[str] = []

    def __repr__(self) -> str:
        return f"<FrameCutter {self._lines!r}>"

    def feed(self, chunk: bytes) -> Iterator[Frame]:
        """Yield every event that ``chunk`` completes."""
        for line in self._lines.feed(chunk):
            if line:
                self._take(line.decode(errors="replace"))
                continue
            if self._data:
                yield Frame(self._id, self._event or "message", "\n".join(self._data))
            self._id, self._event, self._data = "", "", []

    def _take(self, line: str) -> None:
        name, _, text = line.partition(":")
        text = text.removeprefix(" ")
        match name:
            case "id":
                self._id = text
            case "event":
                self._event = text
            case "data":
                self._data.append(text)
            case _:
                pass  # a comment, or another field

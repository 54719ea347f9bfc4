"""Server-sent events as a sans-IO object: bytes in, the data of whole frames out.

The format is WHATWG HTML, "Server-sent events". Two outcomes differ from a browser's on purpose, since our peer is an
engine and not a page: only ``data`` is kept (engines name no event types), and a frame that lacks its last blank line
is delivered at the end of the stream instead of dropped, because some engines end without one.
"""

from typing import Final

from transport.errors import FrameTooLarge

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
_BOM: Final = b"\xef\xbb\xbf"


class FrameDecoder:
    """Cuts a byte stream into frames; any re-chunking of the same bytes gives the same frames.

    Lines end in LF, CRLF or CR and nothing else: U+2028 and U+0085 are ordinary characters inside JSON strings.
    Each byte is scanned a bounded number of times, whatever the sizes of chunk and frame.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._tail = bytearray()  # a line whose end has not come yet
        self._data: list[bytes] = []  # the data lines of a frame whose blank line has not come yet
        self._data_bytes = 0
        self._swallow_lf = False  # the last chunk ended in CR, which has ended its line already
        self._at_start = True

    def __repr__(self) -> str:
        """State what is held back."""
        return f"<FrameDecoder held={self._data_bytes + len(self._tail)} bytes>"

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every frame that ``chunk`` completes.

        Raises:
            FrameTooLarge: a frame, complete or not, is larger than the cap.
        """
        # Engines flush one event at a time, so a chunk is nearly always exactly one frame of one line.
        size = len(chunk)
        if (
            chunk[:6] == b"data: "
            and not self._tail
            and not self._data
            and chunk.find(b"\n") == size - 2
            and chunk[-1:] == b"\n"
            and chunk.find(b"\r") < 0
            and size <= self._max_frame_bytes
        ):
            self._swallow_lf = self._at_start = False
            return [chunk[6:-2]]
        return self._feed_lines(chunk)

    def close(self) -> list[bytes]:
        """Return the frame that the end of the stream completes, if there is one."""
        frames: list[bytes] = []
        if self._tail:
            self._take_line(bytes(self._tail), frames)
            self._tail.clear()
        self._take_line(b"", frames)
        return frames

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        if self._swallow_lf and chunk:
            self._swallow_lf = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return []
        frames: list[bytes] = []
        lines = chunk.splitlines()  # bytes split on LF, CRLF and CR alone
        ends_whole = chunk[-1:] in (b"\n", b"\r")
        self._swallow_lf = chunk[-1:] == b"\r"
        rest = b"" if ends_whole else lines.pop()
        if lines and self._tail:
            self._check_size(len(lines[0]))
            self._tail += lines[0]
            lines[0] = bytes(self._tail)
            self._tail.clear()
        for line in lines:
            self._take_line(line, frames)
        if rest:
            self._check_size(len(rest))
            self._tail += rest
        return frames

    def _take_line(self, line: bytes, frames: list[bytes]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                frames.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
                self._data_bytes = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._check_size(len(value) + 1, tail=False)
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif line == b"data":
            self._check_size(1, tail=False)
            self._data.append(b"")
            self._data_bytes += 1

    def _check_size(self, more: int, *, tail: bool = True) -> None:
        held = self._data_bytes + (len(self._tail) if tail else 0)
        if held + more > self._max_frame_bytes:
            raise FrameTooLarge(self._max_frame_bytes)

"""Server-sent events as a sans-IO object: bytes in, the data of whole frames out.

The format is WHATWG HTML, "Server-sent events". Two outcomes differ from a browser's on purpose, since our peer is an
engine and not a page. Only ``data`` is kept (engines name no event types), and llama-box's field ``error``. A frame
without its last blank line is delivered at the end of the stream instead of dropped, because some engines end without
one.
"""

from typing import Final

import msgspec

from transport.errors import EngineProtocolError, FrameTooLarge, MalformedFrame

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_IDLE_BYTES: Final = 1024 * 1024  # comments and blank lines between two frames: pings of a day
LINE_BYTES: Final = 64  # counted for each further line of a frame beside its bytes: a line is held as an object
LARGE_FRAME_BYTES: Final = 64 * 1024
MOST_OBJECTS: Final = 50_000  # most objects made in one go of a large frame or answer: 10 ms of the event loop
_BOM: Final = b"\xef\xbb\xbf"


class FrameDecoder:
    """Cuts a byte stream into frames; any re-chunking of the same bytes gives the same frames.

    Lines end in LF, CRLF or CR and nothing else: U+2028 and U+0085 are ordinary characters inside JSON strings. Each
    byte is scanned a bounded number of times, whatever the sizes of chunk and frame. A frame over the cap (its data and
    the line in progress, comments included) is the last: ``failure`` is set, and no more frames come.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.failure: EngineProtocolError | None = None
        self._max_frame_bytes = max_frame_bytes
        self._tail = bytearray()  # a line whose end has not come yet
        self._data: list[bytes] = []  # the data lines of a frame whose blank line has not come yet
        self._data_bytes = 0
        self._idle_bytes = 0  # lines without data since the last frame
        self._swallow_lf = False  # the last chunk ended in CR, which already ended its line
        self._at_start = True

    def __repr__(self) -> str:
        return f"<FrameDecoder held={self._data_bytes + len(self._tail)} bytes>"

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every frame that ``chunk`` completes."""
        # Engines flush whole events, so a chunk is nearly always a few whole frames of one line each.
        size = len(chunk)
        if (
            chunk[:6] == b"data: "
            and chunk[-2:] == b"\n\n"
            and not self._tail
            and not self._data
            and chunk.find(b"\r") < 0
            and size - 2 <= self._max_frame_bytes
            and self.failure is None
        ):
            self._idle_bytes = 0
            if chunk.find(b"\n") == size - 2:
                self._swallow_lf = self._at_start = False
                return [chunk[6:-2]]
            frames = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(frames):  # no line feed is left within a frame
                self._swallow_lf = self._at_start = False
                return frames
        return self._feed_lines(chunk)

    def close(self) -> list[bytes]:
        """Return the frame that the end of the stream completes, if any."""
        frames: list[bytes] = []
        if self.failure is None:
            self._take_line(bytes(self._tail), frames)
            self._take_line(b"", frames)
        self._tail.clear()
        return frames

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        if self._swallow_lf and chunk:
            self._swallow_lf = False
            chunk = chunk.removeprefix(b"\n")
        frames: list[bytes] = []
        if not chunk:
            return frames
        lines = chunk.splitlines()  # bytes split on LF, CRLF and CR alone
        self._swallow_lf = chunk[-1:] == b"\r"
        rest = b"" if chunk[-1:] in (b"\n", b"\r") else lines.pop()
        for line in lines:
            if self._fits(line):
                self._tail += line
                self._take_line(bytes(self._tail), frames)
                self._tail.clear()
        if rest and self._fits(rest):
            self._tail += rest
        return frames

    def _take_line(self, line: bytes, frames: list[bytes]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                frame = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                if self._data_bytes > LARGE_FRAME_BYTES and frame.count(b"{") + frame.count(b"[") > MOST_OBJECTS:
                    self.failure = MalformedFrame(f"an event of more than {MOST_OBJECTS} objects")
                    return
                frames.append(frame)
                self._data = []
                self._data_bytes = self._idle_bytes = 0
            else:
                self._pass_over(1)
        elif line.startswith(b"data:"):
            self._hold(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            self._hold(b"")
        elif line.startswith(b"error:"):
            value = line[6:].strip()
            is_json = value[:1] in (b"{", b'"')
            self._hold(b'{"error": %b}' % (value if is_json else msgspec.json.encode(value.decode("utf-8", "replace"))))
        else:
            self._pass_over(len(line) + 1)

    def _pass_over(self, size: int) -> None:
        """Count a line without data; too many in a row fail the stream."""
        self._idle_bytes += size
        if self._idle_bytes > MAX_IDLE_BYTES and self.failure is None:
            self.failure = MalformedFrame(f"more than {MAX_IDLE_BYTES} bytes of comments and blank lines")

    def _hold(self, value: bytes) -> None:
        self._data_bytes += len(value) + (LINE_BYTES if self._data else 1)
        self._data.append(value)

    def _fits(self, more: bytes) -> bool:
        """Return whether the current line may grow by ``more``; if not, fail."""
        if self.failure is None and self._data_bytes + len(self._tail) + len(more) > self._max_frame_bytes:
            self.failure = FrameTooLarge(self._max_frame_bytes)
        return self.failure is None

"""The engine's output on its way to Roundhouse, in frames that never make the engine wait.

Only the standard library: a guardian imports it, as a file.
"""

import os
import select
import struct
import time
from collections import deque

BUFFER_BYTES = 1024 * 1024  # output held while Roundhouse is busy: seconds of the chattiest engine's log
READ_BYTES = 64 * 1024
FRAME_HEAD = ">BI"
FLUSH_LIMIT_S = 1.0  # for the last output to reach Roundhouse after the tree is gone


class Output:
    """Carries the engine's output to Roundhouse without ever making the engine wait."""

    def __init__(self, source_fds: tuple[int, int]) -> None:
        self.open_fds = dict(zip(source_fds, (1, 2), strict=True))
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._dropped_bytes = 0
        self._begun = b""  # the rest of a half-written frame, which must not be dropped
        for fd in (*source_fds, 1):
            os.set_blocking(fd, False)

    @property
    def wants_to_write(self) -> bool:
        """Whether output is held that Roundhouse has not read."""
        return bool(self._held or self._begun)

    def read_once(self, fd: int) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            del self.open_fds[fd]
            return False
        self._held.append(struct.pack(FRAME_HEAD, self.open_fds[fd], len(data)) + data)
        self._held_bytes += len(data)
        while self._held_bytes > BUFFER_BYTES:
            lost = len(self._held.popleft()) - struct.calcsize(FRAME_HEAD)
            self._held_bytes -= lost
            self._dropped_bytes += lost
        return True

    def give(self) -> None:
        """Write once."""
        if not self._begun:
            self._begun = self._next_frame()
        if not self._begun:
            return
        try:
            written = os.write(1, self._begun)
        except BlockingIOError:
            return
        except OSError:  # Roundhouse is gone
            self._held.clear()
            self._held_bytes, self._begun = 0, b""
            return
        self._begun = self._begun[written:]

    def drain(self) -> None:
        """Pass on the rest, for a bounded time."""
        for fd in tuple(self.open_fds):
            while fd in self.open_fds and self.read_once(fd):
                pass
        deadline = time.monotonic() + FLUSH_LIMIT_S
        poller = select.poll()
        poller.register(1, select.POLLOUT)
        while self.wants_to_write and time.monotonic() < deadline:
            poller.poll(50)
            self.give()

    def _next_frame(self) -> bytes:
        if self._dropped_bytes:
            note = f"\n[roundhouse: {self._dropped_bytes} bytes of output dropped here]\n".encode()
            self._dropped_bytes = 0
            return struct.pack(FRAME_HEAD, 2, len(note)) + note
        if not self._held:
            return b""
        frame = self._held.popleft()
        self._held_bytes -= len(frame) - struct.calcsize(FRAME_HEAD)
        return frame

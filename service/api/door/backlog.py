"""The bytes of answers that clients have not read, and the choice of a connection to cut off for them."""

import asyncio
import fcntl
import logging
import math
import struct
import termios
import time
from typing import Final

LATELY_S: Final = 5.0  # a slow reader's progress shows in steps: kernels pass data on in large pieces
# Even if a client does not read, its kernel takes more at first, until its buffer has its full size.
SETTLED_S: Final = 1.0
SETTLED_BYTES: Final = 512 * 1024
logger = logging.getLogger(__name__)


class Backlogs:
    """The backlogs of all connections of a server, together at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Backlog, int] = {}
        self._total = 0

    def __repr__(self) -> str:
        return f"<Backlogs of {len(self._held)} clients, {self._total} bytes>"

    def count(self, backlog: "Backlog", held: int) -> None:
        """Count the bytes that one backlog holds now, and cut off clients until the total is within the bound.

        Clients that have not read lately go first, and of these the one that has had bytes left for longest: a slow
        reader does not pay for one that does not read. Bytes that kernels take are no proof of reading.
        """
        self._total += held - self._held.pop(backlog, 0)
        if held:
            self._held[backlog] = held
        while self._total > self._most:
            for each in self._held:
                each.look()
            lately = time.monotonic() - LATELY_S
            worst = min(self._held, key=lambda each: (max(each.read_at, lately), max(each.read_at, each.left_since)))
            worst.cut_off(f"clients have left {self._total} bytes unread, this one {self._held[worst]} of them")


class Backlog:
    """The bytes of its answers that one client has not read.

    ``written`` counts all bytes written to it. A piece that was written at once is held until its last byte is taken.
    """

    def __init__(self, transport: asyncio.Transport, all_of_them: Backlogs) -> None:
        self.written = 0
        self.read_at = -math.inf  # when it was last seen to read, by a smaller rest
        self.left_since = math.inf  # since when bytes are left
        self.silent_s = 0  # ticks since it last took bytes; a stall of ours counts as one, however long
        self._transport = transport
        self._all = all_of_them
        self._taken, self._left = 0, 0  # at the last look
        self._taken_first = 0  # bytes taken when some were first left
        self._piece = 0  # largest piece that may be held

    def __repr__(self) -> str:
        return f"<Backlog silent_s={self.silent_s} written={self.written} taken={self._taken}>"

    def look(self) -> int:
        """Record whether the client has taken bytes since the last look; return the number left."""
        left = self._transport.get_write_buffer_size()
        taken = self.written - left - (self._unsent() if left else 0)
        if taken > self._taken:
            self.silent_s = 0
            now = time.monotonic()
            is_settled = now - self.left_since >= SETTLED_S or taken - self._taken_first >= SETTLED_BYTES
            if self._left and is_settled:  # the kernels were full, so the client has read
                self.read_at = now
        self._taken, self._left = taken, left
        return left

    def _unsent(self) -> int:
        """Return the bytes that our kernel holds; it takes more from us only in steps of megabytes."""
        peer = self._transport.get_extra_info("socket")
        try:
            return int(struct.unpack("i", fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except (OSError, AttributeError, ValueError):  # closed, or not a socket
            return 0

    def measure(self, piece: int = 0) -> None:
        """Count what is left after a piece of ``piece`` bytes was written at once."""
        left = self.look()
        self._piece = max(self._piece, piece) if left else 0
        if left and self.left_since == math.inf:
            self.left_since, self._taken_first = time.monotonic(), self._taken
        elif not left:
            self.left_since = math.inf
        self._all.count(self, max(left, self._piece))

    def tick(self) -> None:
        """Count a second in which the client could take bytes."""
        self.measure()
        self.silent_s = self.silent_s + 1 if self._transport.get_write_buffer_size() else 0

    def cut_off(self, why: str) -> None:
        """Close the connection at once, and drop what is left."""
        logger.warning("%s, and is cut off", why)
        self.end()
        self._transport.abort()

    def end(self) -> None:
        """Stop counting: the connection is closed."""
        self._all.count(self, 0)

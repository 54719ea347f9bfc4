"""The bytes of answers that clients have not taken, and which connection is cut off for them."""

import asyncio
import fcntl
import logging
import math
import struct
import termios
import time
from typing import Final

LATELY_S: Final = 5.0  # a kernel passes on in large steps what it holds
# A client's kernel takes some more for one that does not read, while it finds out how much it may hold.
SETTLED_S: Final = 1.0
SETTLED_BYTES: Final = 512 * 1024
logger = logging.getLogger(__name__)


class Backlogs:
    """The backlogs of all connections of a server, which hold at most ``most`` bytes together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Backlog, int] = {}
        self._total = 0

    def __repr__(self) -> str:
        return f"<Backlogs of {len(self._held)} clients, {self._total} bytes>"

    def count(self, backlog: "Backlog", held: int) -> None:
        """Count the bytes that one holds by now, and cut off clients until all together hold no more than they may.

        First those that were not seen to read lately, of them the one that has had the longest time for it: a client
        that reads, however slowly, does not pay for one that does not. What kernels take is no proof of reading.
        """
        self._total += held - self._held.pop(backlog, 0)
        if held:
            self._held[backlog] = held
        while self._total > self._most:
            for each in self._held:
                each.look()
            lately = time.monotonic() - LATELY_S
            worst = min(self._held, key=lambda each: (max(each.read_at, lately), max(each.read_at, each.left_since)))
            worst.cut_off(f"all clients leave {self._total} bytes unread, {self._held[worst]} of them this one")


class Backlog:
    """The bytes of its answers that one client has not taken.

    ``written`` counts all bytes that were written to it. What was written at once is held until its last byte is taken.
    """

    def __init__(self, transport: asyncio.Transport, all_of_them: Backlogs) -> None:
        self.written = 0
        self.read_at = -math.inf  # when it was last seen to read: what was left became less
        self.left_since = math.inf  # since when something is left
        self.silent_s = 0  # ticks since then: a stall of ours is one, whatever it lasted
        self._transport = transport
        self._all = all_of_them
        self._taken, self._left = 0, 0  # at the last look
        self._taken_first = 0  # as something was left first
        self._piece = 0  # the largest that may be held

    def __repr__(self) -> str:
        return f"<Backlog silent_s={self.silent_s} written={self.written} taken={self._taken}>"

    def look(self) -> int:
        """Note whether the client has taken anything since the last look; return how many bytes are left."""
        left = self._transport.get_write_buffer_size()
        taken = self.written - left - (self._unsent() if left else 0)
        if taken > self._taken:
            self.silent_s = 0
            now = time.monotonic()
            is_settled = now - self.left_since >= SETTLED_S or taken - self._taken_first >= SETTLED_BYTES
            if self._left and is_settled:  # the kernels took no more, and have now
                self.read_at = now
        self._taken, self._left = taken, left
        return left

    def _unsent(self) -> int:
        """Return how many bytes our kernel holds; it takes more of ours in steps of megabytes alone."""
        peer = self._transport.get_extra_info("socket")
        try:
            return int(struct.unpack("i", fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except (OSError, AttributeError, ValueError):  # it is closed, or is no socket
            return 0

    def measure(self, piece: int = 0) -> None:
        """Count what is left after a piece of so many bytes was written at once."""
        left = self.look()
        self._piece = max(self._piece, piece) if left else 0
        if left and self.left_since == math.inf:
            self.left_since, self._taken_first = time.monotonic(), self._taken
        elif not left:
            self.left_since = math.inf
        self._all.count(self, max(left, self._piece))

    def tick(self) -> None:
        """Let a second pass in which the client may take what is written to it."""
        self.measure()
        self.silent_s = self.silent_s + 1 if self._transport.get_write_buffer_size() else 0

    def cut_off(self, why: str) -> None:
        """Close the connection, whatever is left."""
        logger.warning("%s, and is cut off", why)
        self.end()
        self._transport.abort()

    def end(self) -> None:
        """Count nothing any more: the connection is closed."""
        self._all.count(self, 0)

"""Fewer, larger reads of unwatched answers: the kernel wakes us once for several tokens.

Two thirds of a token's cost is the wake-up and the read (``bench/token_path.py``). With ``SO_RCVLOWAT`` the kernel
wakes us only once that many bytes are there. The end of a connection, orderly or not, wakes at once, whatever has come
(Linux, ``tcp_data_ready`` and ``tcp_set_rcvlowat``). A UNIX socket ignores the option and reads as before.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Final

GATHERED_BYTES: Final = 2048  # eight frames of one token each
LOOK_S: Final = 0.25  # bytes are read within two looks: as often as the watch over the engine looks
READS_A_LOOK: Final = 4  # fewest reads between two looks that are worth gathering


class Reads:
    """The reads of one connection; its reader counts them in ``count``."""

    def __init__(self, connection: socket.socket) -> None:
        self.count = 0
        self._connection = connection
        self._is_gathering = False

    def __repr__(self) -> str:
        return f"<Reads {self.count} gathering={self._is_gathering}>"

    def adapt(self) -> None:
        """Gather if reads are many; if none has come since the last look, have the kernel hand over everything."""
        if self._is_gathering and not self.count:
            self._is_gathering = False
            self._wake_at(1)
        elif not self._is_gathering and self.count >= READS_A_LOOK:
            self._is_gathering = True
            self._wake_at(GATHERED_BYTES)
        self.count = 0

    def _wake_at(self, size: int) -> None:
        with suppress(OSError):  # the connection may have just broken, and the others still need a look
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


class Gathering:
    """The connections of one client whose reads may be gathered; one timer watches them while there are any."""

    def __init__(self) -> None:
        self._reads: set[Reads] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Gathering {len(self)} connections>"

    def __len__(self) -> int:
        """Return the number of connections."""
        return len(self._reads)

    def add(self, reads: Reads) -> None:
        """Watch one more connection, until it is forgotten."""
        self._reads.add(reads)
        if self._timer is None:
            self._look_later()

    def forget_reads(self, reads: Reads) -> None:
        """Stop watching a connection; called before it is closed."""
        self._reads.discard(reads)
        if not self._reads and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        for reads in self._reads:
            reads.adapt()
        self._look_later()

"""Fewer, larger reads of answers that nobody watches: the kernel wakes us once for several tokens.

Two thirds of what a token costs is the wake-up and the read (``bench/token_path.py``). ``SO_RCVLOWAT`` has the kernel
hold a wake-up back until that many bytes are there. The end of a connection, in order or not, wakes at once, whatever
has come (Linux, ``tcp_data_ready`` and ``tcp_set_rcvlowat``). A UNIX socket ignores it and stays as it is.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Final

GATHERED_BYTES: Final = 2048  # eight frames of a token each
LOOK_S: Final = 0.25  # what has come is read within two of them: as often as the watch over the engine looks
READS_A_LOOK: Final = 4  # that few at least have to be saved


class Reads:
    """The reads of one connection; whoever reads counts them in ``count``."""

    def __init__(self, connection: socket.socket) -> None:
        self.count = 0
        self._connection = connection
        self._is_gathering = False

    def __repr__(self) -> str:
        return f"<Reads {self.count} gathering={self._is_gathering}>"

    def adapt(self) -> None:
        """Gather where reads are many; where none has come since the last look, have the kernel hand over all."""
        if self._is_gathering and not self.count:
            self._is_gathering = False
            self._wake_at(1)
        elif not self._is_gathering and self.count >= READS_A_LOOK:
            self._is_gathering = True
            self._wake_at(GATHERED_BYTES)
        self.count = 0

    def _wake_at(self, size: int) -> None:
        with suppress(OSError):  # it may have broken in this moment, and the others are to be looked at
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


class Gathering:
    """All connections of one client whose reads may be gathered; one timer looks after them while there are any."""

    def __init__(self) -> None:
        self._reads: set[Reads] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Gathering {len(self)} connections>"

    def __len__(self) -> int:
        """Return how many connections it looks after."""
        return len(self._reads)

    def add(self, reads: Reads) -> None:
        """Look after one more connection, until it is discarded."""
        self._reads.add(reads)
        if self._timer is None:
            self._look_later()

    def forget_reads(self, reads: Reads) -> None:
        """Leave a connection alone; to be called before it is closed."""
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

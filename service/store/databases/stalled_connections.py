"""Ends waits on connections that are silent, though neither end has closed them.

A failover or a router that has lost a flow drops packets without a word. The server's own limits are of no use then,
and the system's take a quarter of an hour (tcp(7), ``tcp_retries2``) or, behind a proxy that goes on to acknowledge,
for ever.
"""

import threading
import time
from typing import Final, Protocol
from weakref import WeakSet

LOOK_S: Final = 0.5


class PendingReply(Protocol):
    """A connection; ``waits_since`` is when the present wait for an answer began, None where there is none."""

    waits_since: float | None

    def cut(self) -> None:
        """End the connection under its waiting user; called in another thread."""


class ConnectionWatchdog:
    """Cuts every connection that was waited on for longer than ``limit_s``; its thread ends with the last."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._connections: WeakSet[PendingReply] = WeakSet()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<ConnectionWatchdog {self._limit_s:g} s connections={len(self._connections)}>"

    def add(self, connection: PendingReply) -> None:
        """Watch a connection until it is closed or garbage."""
        with self._lock:
            self._connections.add(connection)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="silence", daemon=True)
                self._thread.start()

    def discard(self, connection: PendingReply) -> None:
        """Watch it no more."""
        with self._lock:
            self._connections.discard(connection)

    def _run(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._limit_s / 2))
            with self._lock:
                if not self._connections:
                    self._thread = None
                    return
                now = time.monotonic()
                silent = [each for each in self._connections if now - (each.waits_since or now) > self._limit_s]
                for connection in silent:  # within the lock: no thread closes it meanwhile
                    connection.cut()
                    self._connections.discard(connection)

"""Idle connections to one engine that its last answers left open for the next requests.

A connection costs both processes a handshake and an end. An engine may close an idle one at any moment; a request that
meets that is sent once more on a fresh one, if no byte of an answer has come.
"""

import asyncio
import fcntl
import termios
from typing import Final

IDLE_S: Final = 2.0  # uvicorn, which serves vLLM, closes after five
MOST: Final = 256


class KeptConnections:
    """The idle connections of one engine, newest first; one timer closes those left idle."""

    def __init__(self) -> None:
        self._idle: dict[_Idle, float] = {}  # with the loop's time at which each became idle
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<KeptConnections {len(self._idle)}>"

    def __len__(self) -> int:
        """Return the number of idle connections."""
        return len(self._idle)

    def take(self, protocol: asyncio.Protocol, scope: str | None = None) -> asyncio.Transport | None:
        """Give an idle connection of a scope to a protocol, as if made for it; None without one.

        A connection with unread bytes is closed: they are no answer to the next request.
        """
        while (idle := next((each for each in reversed(self._idle) if each.scope == scope), None)) is not None:
            del self._idle[idle]
            if idle.transport.is_closing():
                continue
            if _has_bytes(idle.transport):
                idle.transport.abort()
                continue
            idle.transport.set_protocol(protocol)
            protocol.connection_made(idle.transport)
            return idle.transport
        return None

    def keep(self, transport: asyncio.Transport, scope: str | None = None) -> None:
        """Keep a connection whose answer has ended, or close it if ``MOST`` are kept."""
        if len(self._idle) >= MOST or transport.is_closing():
            transport.abort()
            return
        idle = _Idle(self, transport, scope)
        transport.set_protocol(idle)
        loop = asyncio.get_running_loop()
        self._idle[idle] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._close_old)

    def close(self) -> None:
        """Close all idle connections: no more requests go to this engine."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            self._idle.popitem()[0].transport.abort()

    def forget_idle(self, idle: "_Idle") -> None:
        """Drop a broken connection."""
        self._idle.pop(idle, None)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer, oldest = None, loop.time() - IDLE_S
        for idle in [idle for idle, since in self._idle.items() if since <= oldest]:
            del self._idle[idle]
            idle.transport.abort()
        if self._idle:
            self._timer = loop.call_at(next(iter(self._idle.values())) + IDLE_S, self._close_old)


def _has_bytes(transport: asyncio.Transport) -> bool:
    """Whether bytes have come that the event loop has not read; False with TLS, whose own records may be unread."""
    if transport.get_extra_info("ssl_object") is not None:
        return False
    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    except (OSError, AttributeError):  # closed, or not a kernel socket
        return False
    return any(count)


class _Idle(asyncio.Protocol):
    """Listens on an idle connection and drops it at the first byte or at its end."""

    def __init__(self, kept: KeptConnections, transport: asyncio.Transport, scope: str | None) -> None:
        self.transport = transport
        self.scope = scope
        self._kept = kept

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - nothing was asked
        """Drop and close it."""
        self._kept.forget_idle(self)
        self.transport.abort()

    def eof_received(self) -> None:
        """Drop it; its transport closes by itself."""
        self._kept.forget_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Drop it."""
        self._kept.forget_idle(self)

"""Connections to one engine that its last answer has left open, for the requests that come next.

A connection costs two processes a handshake and an end. An engine may close an idle one at any moment; a request that
meets that is sent once more on a fresh one, as long as no byte of an answer has come.
"""

import asyncio
import fcntl
import termios
from typing import Final

IDLE_S: Final = 2.0  # uvicorn, which is vLLM's, closes after five
MOST: Final = 256


class KeptConnections:
    """The idle ones of one engine, the newest taken first; one timer closes what nobody takes."""

    def __init__(self) -> None:
        self._idle: dict[_Idle, float] = {}  # and since when, in the loop's seconds
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<KeptConnections {len(self._idle)}>"

    def __len__(self) -> int:
        """Count the idle ones."""
        return len(self._idle)

    def take(self, protocol: asyncio.Protocol, scope: str | None = None) -> asyncio.Transport | None:
        """Give an idle connection of a scope to a protocol, as one that is made for it; None where there is none.

        One on which bytes lie is closed: they are no answer to what is asked next.
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
        """Keep a connection on which an answer has come to its end, or close it where there are enough."""
        if len(self._idle) >= MOST or transport.is_closing():
            transport.abort()
            return
        idle = _Idle(self, transport, scope)
        transport.set_protocol(idle)
        loop = asyncio.get_running_loop()
        self._idle[idle] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._close_old)

    def forget_idle(self, idle: "_Idle") -> None:
        """Leave out one that has broken."""
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
    """Whether something has come that the event loop has not read yet; behind TLS there may be what is no answer."""
    if transport.get_extra_info("ssl_object") is not None:
        return False
    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    except (OSError, AttributeError):  # it is closed, or none of the kernel's
        return False
    return any(count)


class _Idle(asyncio.Protocol):
    """The listener on an idle connection: one of which anything is heard is of no more use."""

    def __init__(self, kept: KeptConnections, transport: asyncio.Transport, scope: str | None) -> None:
        self.transport = transport
        self.scope = scope
        self._kept = kept

    def data_received(self, data: bytes) -> None:  # noqa: ARG002 - nothing was asked
        """Close."""
        self._kept.forget_idle(self)
        self.transport.abort()

    def eof_received(self) -> None:
        """Close."""
        self._kept.forget_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Be gone."""
        self._kept.forget_idle(self)

"""How much of posted bodies is held at once, from their first byte to the answer's last."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import QueueFull

HELD: Final = "roundhouse.held_body"  # its place in an ASGI scope
SHARE: Final = 2  # of ``limits.queue_bytes``: what comes and what is answered, beside what waits
AGAIN_S: Final = 2


class HeldBody:
    """What one request has brought so far; counted in ``bodies`` until it is let go."""

    def __init__(self, bodies: "HeldBodies") -> None:
        self._bodies = bodies
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count more of it.

        Raises:
            QueueFull: all bodies together are larger than may be held.
        """
        bodies = self._bodies
        if bodies.bytes + size > bodies.most_bytes:
            raise QueueFull(f"posted bodies hold {bodies.bytes} bytes already (limits.queue_bytes)", AGAIN_S)
        self._bytes += size
        bodies.bytes += size

    def let_go(self) -> None:
        """Count it no more."""
        self._bodies.bytes -= self._bytes
        self._bytes = 0


class HeldBodies:
    """ASGI middleware: gives each request its ``HeldBody``."""

    def __init__(self, app: ASGIApp, queue_bytes: int) -> None:
        self._app = app
        self.most_bytes = SHARE * queue_bytes
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[HELD] = held = HeldBody(self)
        try:
            await self._app(scope, receive, send)
        finally:
            held.let_go()

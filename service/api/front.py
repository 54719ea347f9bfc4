"""The application in front, which may be another from one request to the next."""

from starlette.types import ASGIApp, Receive, Scope, Send


class Front:
    """An ASGI application that passes on to the current one; a request ends with the one that it began with."""

    def __init__(self, current: ASGIApp) -> None:
        self.current = current

    def __repr__(self) -> str:
        return f"<Front of {self.current!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        await self.current(scope, receive, send)

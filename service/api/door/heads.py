"""HEAD, answered as GET without the body: proxies and clients probe with it whatever path they know."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}


class Heads:
    """ASGI middleware: what is behind it knows GET alone, its scopes and limits too.

    An answer is over with its headers, so that a stream, which has no end of its own, does not go on for nobody.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a HEAD as a GET, in a scope of its own, since the server goes by the other to leave out a body."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send(_END)

        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send_head)
        finally:
            scope["route"] = asked.get("route")  # what is measured goes by it

"""Measures every request by the template of its route: how it was answered, and when the answer began."""

import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.telemetry.telemetry import trace_parent

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"  # a route or a method that is none of ours
UNANSWERED: Final = 499  # the client has gone before there was an answer


class Measuring:
    """ASGI middleware; ``observe`` takes route, method, status and seconds until the answer began."""

    def __init__(self, app: ASGIApp, observe: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and measure; a piece of a stream costs one call more, and one that is relayed none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, seconds, status = time.monotonic(), 0.0, UNANSWERED

        async def send_noted(message: Message) -> None:
            nonlocal seconds, status
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.monotonic() - began_s
            await send(message)

        trace_parent.set(Headers(scope=scope).get("traceparent"))
        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._observe(route, method, status, seconds or time.monotonic() - began_s)

"""Keys: with any configured, every path but /healthz needs one."""

import hmac
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem
from service.errors import NotAuthorised, PathNotFound

OPEN_PATHS: Final = frozenset({"/healthz"})


class KeyGate:
    """ASGI middleware that lets through who brings ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401; of a path that no name of ours can have, 404."""
        if scope["type"] == "http" and "\0" in scope["path"]:
            await problem(PathNotFound("no name of ours holds a NUL"))(scope, receive, send)
            return
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            # Every key is compared, in constant time, so that the time tells nothing of any of them.
            matches = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
            if scheme.lower() != "bearer" or not any(matches):
                response = problem(NotAuthorised("send Authorization: Bearer KEY with one of the configured api_keys"))
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

"""The gate: no page of another origin, no caller by a rebound name, and with keys only callers that have one.

A browser sends a POST of another page's making unasked, and lets that page read nothing; with a name that its owner
rebinds to our address it lets it read everything. Neither knows a key, and without keys neither gets past here.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.door.access import CALLER
from service.api.door.connections import CROWDED
from service.api.errors.forms import error_of_service, is_of_surface, is_served, not_served
from service.api.errors.problems import problem
from service.api.errors.refusals import ForeignOrigin, MediaTypeUnknown, RequestMalformed, TooManyConnections
from service.conversations.callers import ANYBODY, Caller
from service.errors import NotAuthorised, PathNotFound, ServiceError
from service.web.page_files import page_files

_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}
OPEN_PATHS: Final = frozenset({"/healthz", *page_files()})  # the page asks for what it shows with a key
BARE_PATH: Final = "/readyz"  # to whom has no key it tells a status, and no names
HEALTH_PATHS: Final = frozenset({"/healthz", "/readyz"})  # orchestrators have any name for us
MEDIA_TYPES: Final = frozenset({"application/json", "application/x-ndjson", "application/yaml"})
HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class KeyRing:
    """The callers by the SHA-256 digests of their keys; without any key everybody who gets here is ``ANYBODY``."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._callers = dict(callers)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._callers)}>"

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._callers)

    def find(self, authorization: str) -> Caller | None:
        """Return who brings a header ``Authorization: Bearer KEY``; None where no key is that one.

        Every digest is compared in constant time, whichever fits: so the time is the same for all keys and for none.
        """
        if not self._callers:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found: Caller | None = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(digest, known):
                found = caller
        return found if scheme.lower() == "bearer" else None


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


class Gate:
    """ASGI middleware: lets through who brings a key, or without keys who is of this machine.

    The ``Caller`` is in the state of what it lets through (``service.api.door.access``), but on open paths.

    ``hosts`` are names besides those of loopback that requests without keys may be sent to, ``origins`` the pages that
    may send requests.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(hosts)  # and origins: as the configuration writes them, in small letters
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 400, 401, 403 or 415; of a path that no name of ours can have, 404."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            caller = self._keys.find(_key_of(headers))
            error = (
                _fault_of(scope["path"], headers)
                or self._crowd_fault(scope, caller)
                or self._refusal(scope["method"], scope["path"], headers, caller)
            )
            if error is not None:
                path = scope["path"]
                response = error_of_service(error).response(path, {}) if is_of_surface(path) else problem(error)
                if isinstance(error, NotAuthorised):
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})[CALLER] = caller
        await self._app(scope, receive, send)

    def _crowd_fault(self, scope: Scope, caller: Caller | None) -> ServiceError | None:
        """Return the refusal of who brings no key on a connection that is kept for those who do, and for probes."""
        is_known = bool(self._keys) and caller is not None
        if not scope.get(CROWDED) or is_known or scope["path"] in HEALTH_PATHS:
            return None
        return TooManyConnections("the connections that are left are for who brings a key")

    def _refusal(self, method: str, path: str, headers: Headers, caller: Caller | None) -> ServiceError | None:
        is_open = path in OPEN_PATHS or (path == BARE_PATH and not _brings_key(headers))
        if not is_open and caller is None:
            told = "this key is not known here" if _brings_key(headers) else "send Authorization: Bearer KEY"
            return NotAuthorised(f"{told}; server.api_keys, server.keys and server.keys_file hold those that are")
        if not is_served(path):  # whatever else is wrong with it
            return PathNotFound(not_served(path))
        fault = self._origin_fault(headers) if path not in HEALTH_PATHS else None
        if fault is not None:
            return ForeignOrigin(fault)
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method not in SAFE and (media or _has_body(headers)) and media not in MEDIA_TYPES:
            shown = f"Content-Type {media[:100]}" if media else "a body without a Content-Type"
            return MediaTypeUnknown(f"{shown} is not taken; send application/json")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if method not in SAFE and coding not in {"", "identity"}:
            return MediaTypeUnknown(f"Content-Encoding {coding[:100]} is not taken; send the body as it is")
        return None

    def _origin_fault(self, headers: Headers) -> str | None:
        host, origins = headers.get("host", ""), headers.getlist("origin")
        if not self._keys and not self._is_ours(host):
            return f"Host {host[:100]!r} is not a name of this machine's own; server.hosts lists further ones"
        for origin in origins:
            named_origin = origin.lower()
            if named_origin in self._origins or named_origin.partition("://")[2] == host.lower():
                continue  # our own page's: with keys one that has a key, whatever name it reached us by
            return f"Origin {origin[:100]!r} is another page's; server.origins lists those that may ask"
        return None

    def _is_ours(self, host: str) -> bool:
        if not HOST.fullmatch(host):
            return False
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower().rstrip(".")
        except ValueError:
            return False
        return name in self._hosts or name == "localhost" or _is_loopback(name)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _key_of(headers: Headers) -> str:
    """Return the key as ``Authorization`` has it; clients of Anthropic bring ``x-api-key``, some of them both."""
    key = headers.get("x-api-key")
    return headers.get("authorization", "" if key is None else f"Bearer {key}")


def _fault_of(path: str, headers: Headers) -> ServiceError | None:
    """Return the fault that a request has for every caller: an impossible path, or a header with two meanings."""
    if "\0" in path:
        return PathNotFound("no name of ours holds a NUL")
    if len({name for name, _ in headers.raw}) == len(headers.raw):  # as good as always: none was sent twice
        return None
    for name in ("Host", "Authorization", "X-Api-Key", "Content-Type"):
        if len(set(headers.getlist(name))) > 1:
            return RequestMalformed(f"{name} was sent twice, and not the same: a proxy may go by the other one")
    return None


def _brings_key(headers: Headers) -> bool:
    return "authorization" in headers or "x-api-key" in headers


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in {"", "0"}

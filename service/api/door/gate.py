"""The gate: refuses pages of other origins, rebound host names, and, where there are keys, callers without one.

A browser sends another page's POST without asking, though that page cannot read the answer; under a host name that
its owner rebinds to our address the page can read everything. Neither has a key; without keys the gate stops both.
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
from service.api.door.session_urls import SESSIONS, take_session
from service.api.errors.forms import error_of_service, is_of_surface, is_served, not_served
from service.api.errors.problems import problem
from service.api.errors.refusals import ForeignOrigin, MediaTypeUnknown, RequestMalformed, TooManyConnections
from service.conversations.callers import ANYBODY, Caller
from service.errors import NotAuthorised, PathNotFound, ServiceError
from service.web.page_files import page_files

_END: Final[Message] = {"type": "http.response.body", "body": b"", "more_body": False}
OPEN_PATHS: Final = frozenset({"/healthz", *page_files()})  # the page itself sends a key for its data
BARE_PATH: Final = "/readyz"  # without a key it gives a status but no names
HEALTH_PATHS: Final = frozenset({"/healthz", "/readyz"})  # orchestrators use any host name for us
MEDIA_TYPES: Final = frozenset({"application/json", "application/x-ndjson", "application/yaml"})
HOST: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{0,5})?")
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class KeyRing:
    """The callers by the SHA-256 digests of their keys; without any key every caller is ``ANYBODY``."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        self._callers = dict(callers)

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._callers)}>"

    def __len__(self) -> int:
        """Count the keys."""
        return len(self._callers)

    def find(self, authorization: str) -> Caller | None:
        """Return the caller of a header ``Authorization: Bearer KEY``; None for an unknown key.

        Every digest is compared, in constant time, so the time is the same for all keys, known or not.
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
    """ASGI middleware that turns a HEAD into a GET, so that routes, scopes and limits only know GET.

    The answer ends with its headers, so that an endless stream does not go on unread.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; a HEAD gets a scope of its own: the server leaves out the body by the original one."""
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
            scope["route"] = asked.get("route")  # measurements use it


class Gate:
    """ASGI middleware that admits callers with a key, or, where there are no keys, those of this machine.

    It puts the ``Caller`` into the request's state (``service.api.door.access``), except on open paths.

    ``hosts`` are host names beside loopback's that are allowed where there are no keys, ``origins`` the pages that may
    send requests.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(hosts)  # lower case, like origins: the configuration writes them so
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 400, 401, 403 or 415; 404 for a path that cannot exist."""
        if scope["type"] == "http":
            if SESSIONS in scope["path"]:
                take_session(scope)  # before anything reads the path
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
        """Return the refusal of a caller without a key on a connection reserved for keys and probes."""
        is_known = bool(self._keys) and caller is not None
        if not scope.get(CROWDED) or is_known or scope["path"] in HEALTH_PATHS:
            return None
        return TooManyConnections("the remaining connections are reserved for requests with a key")

    def _refusal(self, method: str, path: str, headers: Headers, caller: Caller | None) -> ServiceError | None:
        is_open = path in OPEN_PATHS or (path == BARE_PATH and not _brings_key(headers))
        if not is_open and caller is None:
            advice = "this key is not known here" if _brings_key(headers) else "send Authorization: Bearer KEY"
            return NotAuthorised(f"{advice}; known keys are in server.api_keys, server.keys and server.keys_file")
        if not is_served(path):  # before any other fault
            return PathNotFound(not_served(path))
        fault = self._origin_fault(headers) if path not in HEALTH_PATHS else None
        if fault is not None:
            return ForeignOrigin(fault)
        return None if method in SAFE else _body_fault(headers)

    def _origin_fault(self, headers: Headers) -> str | None:
        host, origins = headers.get("host", ""), headers.getlist("origin")
        if not self._keys and not self._is_ours(host):
            return f"Host {host[:100]!r} is not a name of this machine; add it to server.hosts"
        for origin in origins:
            named_origin = origin.lower()
            if named_origin in self._origins or named_origin.partition("://")[2] == host.lower():
                continue  # our own page; with keys, under any host name, since the caller has a key
            return f"Origin {origin[:100]!r} is not allowed; add it to server.origins"
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
    """Return the key in the form of ``Authorization``; Anthropic's clients send ``x-api-key``, some send both."""
    key = headers.get("x-api-key")
    return headers.get("authorization", "" if key is None else f"Bearer {key}")


def _fault_of(path: str, headers: Headers) -> ServiceError | None:
    """Return the fault that a request has for every caller: an impossible path, or a header with two meanings."""
    if "\0" in path:
        return PathNotFound("no path holds a NUL")
    if len({name for name, _ in headers.raw}) == len(headers.raw):  # nearly always: no header was sent twice
        return None
    for name in ("Host", "Authorization", "X-Api-Key", "Content-Type"):
        if len(set(headers.getlist(name))) > 1:
            return RequestMalformed(f"{name} was sent twice with different values: a proxy may use the other one")
    return None


def _body_fault(headers: Headers) -> ServiceError | None:
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if (media or _has_body(headers)) and media not in MEDIA_TYPES:
        shown = f"Content-Type {media[:100]}" if media else "a body without a Content-Type"
        return MediaTypeUnknown(f"{shown} is not supported; send application/json")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in {"", "identity"}:
        return MediaTypeUnknown(f"Content-Encoding {coding[:100]} is not supported; send the body unencoded")
    return None


def _brings_key(headers: Headers) -> bool:
    return "authorization" in headers or "x-api-key" in headers


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0").strip() not in {"", "0"}

"""Requests for models that another node serves: passed on once, with their key, and answered as that node answers.

The other node checks the key, queues the request and streams the answer. A node that cannot be reached, or has stopped
serving the model, is passed over while nothing has been sent. Events of a stream are sent whole.
"""

import hashlib
import hmac
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import quote

import anyio
import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.door.parameters import OF_NODES as PASSED
from service.api.door.session_urls import SESSION, asked_path
from service.api.door.writer import WRITER
from service.api.errors.forms import error_of_service
from service.errors import NodeUnreachable
from service.node.node import Node
from service.store.seats import Seat, Seats

GONE_S: Final = 600.0  # a node that was not seen for longer is taken for gone
FRESH_S: Final = 300.0  # clocks of nodes differ
LOOK_S: Final = 1.0  # between two looks at whether the other node is still seen
CONNECT_S: Final = 3.0
MOST_BYTES: Final = 1024 * 1024 * 1024  # longest answer that is no stream
EVENTS: Final = "text/event-stream"
SENT: Final = frozenset({"authorization", "x-api-key", "content-type", "accept", "traceparent", "x-session-id"})
OURS: Final = "x-roundhouse-"
RETURNED: Final = frozenset(
    {b"content-type", b"retry-after", b"x-should-retry", b"cache-control", b"x-accel-buffering", b"www-authenticate"}
)
LEAST_STATUS, MOST_STATUS = 200, 599
MOST_EVENT: Final = 64 * 1024 * 1024  # longest event of a stream
NOT_ASKED: Final = (httpx.ConnectError, httpx.ConnectTimeout)  # errors before a node could begin with a request
NOT_THERE: Final = frozenset({404, 503})  # it serves the model no longer, or is about to stop
KEEP_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 11_000),
)


class Elsewhere:
    """The models of other nodes, and the requests that are passed on to them."""

    def __init__(self, node: Node, seats: Seats) -> None:
        self._node = node
        self._seats = seats
        transport = httpx.AsyncHTTPTransport(socket_options=KEEP_ALIVE, limits=httpx.Limits(max_connections=None))
        self._client = httpx.AsyncClient(
            transport=transport, timeout=httpx.Timeout(None, connect=CONNECT_S), trust_env=False
        )

    def __repr__(self) -> str:
        return f"<Elsewhere {sorted(self.served())}>"

    def served(self) -> frozenset[str]:
        """Return the models and adapters that other nodes serve now."""
        return frozenset(model for seat in self._seats.others() for model in seat.models)

    def others(self, model: str | None = None) -> list[Seat]:
        """Return the other nodes, or those of them that serve a model."""
        return [seat for seat in self._seats.others() if model is None or model in seat.models]

    def known(self, model: str | None = None) -> list[Seat]:
        """Return the other nodes that the store has seen lately, the newest of each address, or those with a model.

        One that is not seen may be back at any moment, with all that it had.
        """
        newest = {seat.url: seat for seat in sorted(self._seats.seats, key=lambda each: -each.seen_s)}
        return [
            seat
            for url, seat in sorted(newest.items())
            if seat.id != self._seats.own and seat.seen_s < GONE_S and (model is None or model in seat.models)
        ]

    @property
    def own_url(self) -> str:
        """The address of this node's HTTP for others."""
        return next((seat.url for seat in self._seats.seats if seat.id == self._seats.own), "this node")

    def answer(self, request: Request, path: str, body: bytes, model: str | None) -> "PassedOn | None":
        """Return the answer of a node that serves a model; None if there is none, or the request was passed on here."""
        seats = self.others(str(model))
        if not seats or PASSED in request.headers:
            return None
        random.shuffle(seats)
        kept = {name: value for name, value in request.headers.items() if name in SENT or name.startswith(OURS)}
        return PassedOn(self, (path, asked_path(request.scope)), body, kept, seats, str(model))

    def refusal(self, request: Request, path: str, body: bytes) -> str | None:
        """Return why a request that claims to be passed on is not; None if it is, or claims nothing."""
        given = request.headers.get(PASSED)
        if given is None:
            return None
        at, _, proof = given.partition(".")
        is_fresh = at.isdecimal() and len(at) < len(str(int(FRESH_S))) + 12 and abs(time.time() - int(at)) < FRESH_S
        whole = path if SESSION not in request.scope else asked_path(request.scope)
        is_proved = hmac.compare_digest(proof.encode(), self._proof(request.method, at, whole, body).encode())
        return None if is_fresh and is_proved else f"{PASSED}: is for the nodes of this cluster"

    def _proof(self, method: str, at: str, path: str, body: bytes) -> str:
        digest = hashlib.sha256(body).hexdigest()
        return hmac.digest(self._seats.secret, f"{method} {at} {path} {digest}".encode(), hashlib.sha256).hex()

    @asynccontextmanager
    async def passing_to(
        self, seat: Seat, path: str, body: bytes, headers: Mapping[str, str], method: str = "POST"
    ) -> AsyncIterator[httpx.Response]:
        """Pass a request on, and give its answer for a block, which ends if the node is seen no longer.

        Raises:
            httpx.HTTPError: the node cannot be reached, or its answer has broken off.
        """
        at = str(int(time.time()))
        asked = self._client.build_request(
            method,
            seat.url + quote(path),
            content=body,
            headers=[
                *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),  # as they have come
                (PASSED.encode(), f"{at}.{self._proof(method, at, path, body)}".encode()),
            ],
        )
        with anyio.CancelScope() as patience:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, seat, patience)
                response = await self._client.send(asked, stream=True)
                try:
                    yield response
                finally:
                    with anyio.CancelScope(shield=True):
                        await response.aclose()
                    tasks.cancel_scope.cancel()
        if patience.cancelled_caught:
            raise httpx.ReadError(f"the node at {seat.address} is seen no longer")

    async def _watch(self, seat: Seat, patience: anyio.CancelScope) -> None:
        while any(seat.id == other.id for other in self._seats.others()):  # noqa: ASYNC110 - seats are read in turns
            await anyio.sleep(LOOK_S)
        patience.cancel()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request that is under way for a block, so that a shutdown waits for it."""
        self._node.passing.count += 1
        try:
            yield
        finally:
            self._node.passing.count -= 1
            self._node.passing.changed.notify()


class PassedOn:
    """An ASGI application: the answer of the first of some nodes that takes a request."""

    def __init__(
        self,
        nodes: Elsewhere,
        paths: tuple[str, str],
        body: bytes,
        headers: Mapping[str, str],
        seats: Sequence[Seat],
        model: str,
    ) -> None:
        self._nodes = nodes
        self._path, self._asked_path = paths  # the second with its session
        self._body = body
        self._headers = headers
        self._seats = seats
        self._model = model
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the client leaves."""
        try:
            with self._nodes.counted(), anyio.CancelScope() as client:
                scope[WRITER].on_gone(client.cancel)
                await self._answer(scope, receive, send)
        finally:
            scope[WRITER].forget_gone()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        trouble, is_taken = "", False  # by a node that may have begun with it
        for seat in self._seats:
            try:
                async with self._nodes.passing_to(seat, self._asked_path, self._body, self._headers) as response:
                    is_last = seat is self._seats[-1]
                    if response.status_code not in NOT_THERE or is_last:
                        await self._give(response, scope, receive, send)
                        return
                    trouble = f"the node at {seat.address} answers {response.status_code}"
            except* (httpx.HTTPError, OSError) as group:
                error = _first(group)
                trouble, is_taken = f"the node at {seat.address}: {error}", not isinstance(error, NOT_ASKED)
            if is_taken:
                break
        refused = error_of_service(NodeUnreachable(self._model, trouble))
        if not self._has_begun:
            await refused.response(self._path, {})(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": refused.event(self._path), "more_body": False})

    async def _give(self, response: httpx.Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an answer: a stream in whole events, anything else at once."""
        if not LEAST_STATUS <= response.status_code <= MOST_STATUS:
            raise httpx.DecodingError(f"its status is {response.status_code}")
        named = [(name.lower(), value) for name, value in response.headers.raw]
        raw = [(name, value) for name, value in named if name in RETURNED or name.startswith(OURS.encode())]
        if not response.headers.get("content-type", "").startswith(EVENTS):
            whole = bytearray()
            async for piece in response.aiter_raw():
                whole += piece
                if len(whole) > MOST_BYTES:
                    raise httpx.DecodingError("its answer is too long")
            answer = Response(bytes(whole), response.status_code)
            answer.raw_headers += raw
            await answer(scope, receive, send)
            return
        self._has_begun = True
        await send({"type": "http.response.start", "status": response.status_code, "headers": raw})
        held = bytearray()
        async for piece in response.aiter_raw():
            looked_at = max(0, len(held) - 1)
            held += piece
            end = held.rfind(b"\n\n", looked_at) + 2
            if end > 1:
                await send({"type": "http.response.body", "body": bytes(held[:end]), "more_body": True})
                del held[:end]
            elif len(held) > MOST_EVENT:
                raise httpx.DecodingError("an event of its stream is too long")
        if held and not held.endswith(b"\n"):
            raise httpx.RemoteProtocolError("its stream ended within an event")
        await send({"type": "http.response.body", "body": bytes(held), "more_body": False})


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group

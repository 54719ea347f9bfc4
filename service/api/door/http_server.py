"""uvicorn as the service runs it: without its signal handlers, with a clock for connections, and able to rest.

While it rests it accepts and reads nothing: new connections wait in the backlog, and clients' bytes in their sockets,
for this program or for the next one of this process.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import anyio
import anyio.lowlevel
import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.door.leaving import LeavingDoor
from service.api.door.writer import WRITER, BodyWriter
from service.telemetry.telemetry import trace_parent
from workers.process.handed_over import HeldStream

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"  # label for an unknown route or method
UNANSWERED: Final = 499  # status when the client left before an answer
CANCEL_S: Final = 1.0  # time for cancelled answers to end
HTTP_GRACE_S: Final = 5  # time for answers under way once all else has stopped; streams have ended before
KEEP_ALIVE_S: Final = 60  # longer than clients keep an idle connection for reuse
TICKS_A_SECOND: Final = 10  # rate of uvicorn's main loop
BACKLOG: Final = 2048
POLL_S: Final = 0.005


class Accepted(NamedTuple):
    """A connection by its descriptor, and the answer to its request; only its rest if its headers are sent."""

    fd: int
    answer: ASGIApp | None = None
    has_begun: bool = False
    keeps_alive: bool = True


class Measuring:
    """ASGI middleware; ``observe`` gets the route, method, status and seconds until the answer began."""

    def __init__(self, app: ASGIApp, observe: Callable[[str, str, int, float], None]) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and measure; this costs one more call per piece of a stream, none for a relayed piece."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, seconds, status = time.monotonic(), 0.0, UNANSWERED
        writer: BodyWriter | None = scope.get(WRITER)

        async def send_noted(message: Message) -> None:
            nonlocal seconds, status
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.monotonic() - began_s
            await send(message)
            if message["type"] == "http.response.body" and writer is not None:
                writer.note_whole(len(message.get("body", b"")))

        trace_parent.set(Headers(scope=scope).get("traceparent"))
        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            method = scope["method"] if scope["method"] in METHODS else OTHER
            self._observe(route, method, status, seconds or time.monotonic() - began_s)


def server_config(app: ASGIApp, most: int) -> uvicorn.Config:
    """Return uvicorn's configuration for ``app``, with at most ``most`` connections."""
    return uvicorn.Config(
        app,
        lifespan="off",
        http=LeavingDoor,
        ws="none",  # an upgrade would bypass the door
        limit_concurrency=most,
        proxy_headers=False,  # no proxy between us and a client is trusted
        timeout_keep_alive=KEEP_ALIVE_S,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=HTTP_GRACE_S,
        backlog=BACKLOG,
    )


class HttpServer(uvicorn.Server):
    """The server of one listening socket, which its caller owns.

    ``connections`` are those that an earlier program of this process accepted.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, connections: Sequence[Accepted] = ()) -> None:
        super().__init__(config)
        self._listener = listener
        self._inherited = list(connections)

    def __repr__(self) -> str:
        return f"<HttpServer connections={len(self.server_state.connections)}>"

    async def run_until_told(self) -> None:
        """Serve until ``should_exit``.

        Raises:
            OSError: it ended by itself.
        """
        await self.serve(sockets=[self._listener.dup()])  # uvicorn closes its sockets
        await self._end_answers()
        if not self.should_exit:
            raise OSError("the HTTP server ended by itself")

    async def _end_answers(self) -> None:
        """Cancel all open answers at once: a request that one of them admits would outlive the loop."""
        left = set(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and continue connections that were accepted before."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        while self._inherited:
            inherited = self._inherited.pop()
            accepted = socket.socket(fileno=inherited.fd)
            accepted.setblocking(False)
            with contextlib.suppress(OSError):  # its client has gone meanwhile
                _, door = await loop.connect_accepted_socket(self._door, accepted)
                if inherited.answer is None:
                    door.rest_is_over()
                else:
                    door.go_on(inherited.answer, has_begun=inherited.has_begun, keeps_alive=inherited.keeps_alive)

    async def on_tick(self, counter: int) -> bool:
        """Tick each connection once a second; uvicorn calls this ten times a second."""
        if counter % TICKS_A_SECOND == 0:
            for connection in self._doors():
                connection.tick()
        return await super().on_tick(counter)

    async def wait_answered(self, limit_s: float) -> None:
        """Return at a moment when no request is under way, or at the limit; new requests are accepted meanwhile."""
        with anyio.move_on_after(limit_s):
            while not all(door.is_at_rest or door.held for door in self._doors()):  # noqa: ASYNC110 - no single event marks the moment
                await anyio.sleep(POLL_S)

    async def quiesce(self, limit_s: float) -> None:
        """Accept nothing more, and return when no request is under way, or at the limit."""
        for server in self.servers:
            server.close()  # its duplicate of the listening socket
        await anyio.lowlevel.checkpoint()  # lets sockets that were just accepted become connections
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(limit_s):
            # Each connection rests as soon as its answer ends, before its client asks again.
            while not all([door.rest() for door in self._doors()]):  # noqa: C419, ASYNC110 - rest() has to run for each
                await anyio.sleep(POLL_S)

    def note_followers(self) -> None:
        """Mark requests that others follow on their connections: the next program could not answer those."""
        for door in self._doors():
            door.note_followers()

    def resting(self) -> list[int]:
        """Return the descriptors of connections without a request under way or bytes to send."""
        return [door.fileno() for door in self._doors() if door.is_at_rest and door.rest()]

    def held_streams(self) -> list[HeldStream]:
        """Return the connections whose requests the next program answers, the oldest first."""
        held = [(door.fileno(), request) for door in self._doors() if (request := door.held) is not None]
        held.sort(key=lambda each: each[1].posted_at)
        return [HeldStream(fd=fd, request=msgspec.json.encode(request.hand_over())) for fd, request in held]

    async def resume(self) -> None:
        """Accept and read again."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            await server.wait_closed()
        self.servers = [await loop.create_server(self._door, sock=self._listener.dup(), backlog=BACKLOG)]
        for door in self._doors():
            door.end_rest()

    def _doors(self) -> list[LeavingDoor]:
        return [connection for connection in self.server_state.connections if isinstance(connection, LeavingDoor)]

    def _door(self, *_arguments: Any) -> LeavingDoor:  # noqa: ANN401 - a loop's arguments for a factory
        door: LeavingDoor = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return door

"""uvicorn as the service runs it: without hands on our signals, with a clock for its connections, and able to rest.

While it rests nothing is accepted and nothing is read: who connects waits in the backlog, and what clients send waits
in their sockets, for this program or for the next one of this process.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import anyio
import anyio.lowlevel
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.door.connections import Door
from service.api.door.writer import WRITER, BodyWriter
from service.telemetry.telemetry import trace_parent

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER: Final = "other"  # a route or a method that is none of ours
UNANSWERED: Final = 499  # the client has gone before there was an answer
CANCEL_S: Final = 1.0  # for what is cancelled to end
HTTP_GRACE_S: Final = 5  # for answers under way when everything else has stopped; streams were told to end before
KEEP_ALIVE_S: Final = 60  # longer than clients keep a connection that they may be about to use
TICKS_A_SECOND: Final = 10  # of uvicorn's main loop
BACKLOG: Final = 2048
POLL_S: Final = 0.005


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
    """Return how ``app`` is served, on at most ``most`` connections."""
    return uvicorn.Config(
        app,
        lifespan="off",
        http=Door,
        ws="none",  # an upgrade would leave the door
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
    """The server of one listening socket, which stays its caller's.

    ``connections`` are descriptors of those that an earlier program of this process has accepted.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket, connections: Sequence[int] = ()) -> None:
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
        await self.serve(sockets=[self._listener.dup()])  # uvicorn closes what it is given
        await self._end_answers()
        if not self.should_exit:
            raise OSError("the HTTP server ended by itself")

    async def _end_answers(self) -> None:
        """Cancel what is still answered, all before any goes on: what one of them lets in would outlive the loop."""
        left = set(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and go on with connections that were accepted already."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        while self._inherited:
            accepted = socket.socket(fileno=self._inherited.pop())
            accepted.setblocking(False)
            with contextlib.suppress(OSError):  # its client has gone meanwhile
                _, door = await loop.connect_accepted_socket(self._door, accepted)
                door.rest_is_over()

    async def on_tick(self, counter: int) -> bool:
        """Do what is done ten times a second."""
        if counter % TICKS_A_SECOND == 0:
            for connection in self._doors():
                connection.tick()
        return await super().on_tick(counter)

    async def wait_answered(self, limit_s: float) -> None:
        """Return when for a moment no connection has a request under way, or time is up; requests are taken on."""
        with anyio.move_on_after(limit_s):
            while not all(door.is_at_rest for door in self._doors()):  # noqa: ASYNC110 - a moment, of many owners
                await anyio.sleep(POLL_S)

    async def quiesce(self, limit_s: float) -> None:
        """Accept nothing, and return when no connection has a request under way, or time is up."""
        for server in self.servers:
            server.close()  # its duplicate of the listening socket
        await anyio.lowlevel.checkpoint()  # what was accepted at this moment becomes a connection
        await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(limit_s):
            # Each is to rest at once when its answer has ended, before its client asks again.
            while not all([door.rest() for door in self._doors()]):  # noqa: C419, ASYNC110 - each of them, by turns
                await anyio.sleep(POLL_S)

    def resting(self) -> list[int]:
        """Return the descriptors of connections on which nothing is asked and nothing is left to be sent."""
        return [door.fileno() for door in self._doors() if door.rest()]

    async def resume(self) -> None:
        """Accept and read again."""
        loop = asyncio.get_running_loop()
        for server in self.servers:
            await server.wait_closed()
        self.servers = [await loop.create_server(self._door, sock=self._listener.dup(), backlog=BACKLOG)]
        for door in self._doors():
            door.end_rest()

    def _doors(self) -> list[Door]:
        return [connection for connection in self.server_state.connections if isinstance(connection, Door)]

    def _door(self, *_arguments: Any) -> Door:  # noqa: ANN401 - what a loop gives a factory
        door: Door = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return door

"""Connections that the next program of this process goes on with: idle ones, and those with a request."""

import asyncio
from typing import Any, Final

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.api.door.connections import HEAD, NOTHING, Door
from service.api.door.writer import WRITER, BodyWriter, Holdable

CLOSE: Final = (b"connection", b"close")


class LeavingDoor(Door):
    """A connection that can be handed over to the next program of this process."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no request is under way and all answers are sent."""
        return (
            self._is_between
            and not self._is_busy()
            and not self.pipeline
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    @property
    def _is_between(self) -> bool:
        """Whether no part of a further request has come."""
        return self._stage is NOTHING or (self._stage is HEAD and not self._overhead)

    @property
    def held(self) -> Holdable | None:
        """The request whose answer the next program can give, or go on with; None without one."""
        cycle, transport = self._request, self.transport
        if cycle is None or not self._is_busy() or self.pipeline or transport.is_closing() or not self._is_between:
            return None
        request: Holdable | None = cycle.scope[WRITER].request  # type: ignore[typeddict-item]
        if request is None or not request.can_be_held or transport.get_write_buffer_size():
            return None
        return request if cycle.chunked_encoding or not cycle.response_started else None

    def note_followers(self) -> None:
        """Mark requests that others follow on this connection."""
        followed = [cycle for cycle in self._open if cycle is not self._request or not self._is_between]
        requests: list[Holdable | None] = [cycle.scope[WRITER].request for cycle in followed]  # type: ignore[typeddict-item]
        for request in requests:
            if request is not None:
                request.is_followed = True

    def go_on(self, answer: ASGIApp, *, has_begun: bool, keeps_alive: bool) -> None:
        """Give the answer to a request that an earlier program has taken; its headers are sent if it ``has_begun``."""
        self._expect(NOTHING, 0)
        scope: Any = {"type": "http", "method": "POST", "headers": [] if keeps_alive else [CLOSE]}
        self.cycle = self._request = cycle = RequestResponseCycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keeps_alive,
            on_response=self.on_response_complete,
        )
        if has_begun:
            cycle.response_started = cycle.chunked_encoding = True
        cycle.more_body = False
        scope[WRITER] = BodyWriter(cycle, self._backlog)
        self._open = [cycle]
        self._crowd.idle.pop(self, None)
        task = self.loop.create_task(cycle.run_asgi(answer))  # type: ignore[arg-type]
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def rest(self) -> bool:
        """Stop reading if the connection is at rest, or can be held; return whether it is."""
        is_resting = self.is_at_rest or self.held is not None
        if is_resting and self.transport.is_reading():
            self.transport.pause_reading()
        return is_resting

    def end_rest(self) -> None:
        """Resume reading."""
        if not self.transport.is_closing() and not self.transport.is_reading():
            self.transport.resume_reading()

    def rest_is_over(self) -> None:
        """Treat a connection that an earlier program accepted as one that has been answered."""
        self._expect(NOTHING, 0)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def fileno(self) -> int:
        """Return its descriptor."""
        return int(self.transport.get_extra_info("socket").fileno())

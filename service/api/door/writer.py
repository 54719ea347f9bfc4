"""Direct writing of a streamed answer's pieces: ASGI's ``send`` would have to wake a task for each token."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final, Protocol

import msgspec
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.api.door.backlog import Backlog

WRITER: Final = "roundhouse.writer"  # key in an ASGI scope
MOST_BUFFERED: Final = 8 * 1024 * 1024  # unread bytes of a client, some 30,000 tokens
logger = logging.getLogger(__name__)


class Holdable(Protocol):
    """A request that the next program of this process may answer, or go on with."""

    is_followed: bool  # by another on its connection, which has been read already

    @property
    def can_be_held(self) -> bool:
        """Whether it can at this moment."""

    @property
    def posted_at(self) -> datetime:
        """When it came."""

    def hand_over(self) -> msgspec.Struct:
        """Return its state, as JSON has it."""


class BodyWriter:
    """Writes to the connection of one request, once its answer has begun and until ``send`` ends it.

    It does not wait for a slow client, whose slot would stay taken; one that is ``MOST_BUFFERED`` behind counts as
    gone. ``backlog`` counts the unread bytes.
    """

    def __init__(self, cycle: RequestResponseCycle, backlog: Backlog) -> None:
        self._cycle = cycle
        self._backlog = backlog
        self._gone: Callable[[], None] | None = None
        self.request: Holdable | None = None  # set for one that the next program may answer

    def __repr__(self) -> str:
        return f"<BodyWriter begun={self._cycle.response_started} over={self._cycle.response_complete}>"

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, or is about to, before the answer is complete."""
        return self._cycle.disconnected or self._cycle.transport.is_closing()

    @property
    def is_whole(self) -> bool:
        """Whether the connection has taken all of the answer."""
        return self._cycle.response_complete

    def on_gone(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` when the client leaves before its answer is complete; at once if it has left."""
        if self._cycle.disconnected:
            tell()
        else:
            self._gone = tell

    def forget_gone(self) -> None:
        """Drop the callback: with the scope it forms a reference cycle that would keep body and answer."""
        self._gone = self.request = None

    def note_gone(self) -> None:
        """Report that the client has gone; waiting for ``receive`` would take one more task per request."""
        tell, self._gone = self._gone, None
        if tell is not None and not self._cycle.response_complete:
            tell()

    def write_nowait(self, piece: bytes) -> None:
        """Write a piece, unless the client has gone."""
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete or not piece:
            return
        transport = cycle.transport
        if transport.is_closing():
            return
        data = b"%x\r\n%b\r\n" % (len(piece), piece) if cycle.chunked_encoding else piece
        transport.write(data)
        self._backlog.written += len(data)
        if not cycle.flow.write_paused:
            return
        if _buffered(transport) > MOST_BUFFERED:
            logger.warning("a client is %d bytes behind its answer, and is cut off", MOST_BUFFERED)
            transport.abort()
        else:
            self._backlog.measure()

    def note_whole(self, size: int) -> None:
        """Count a piece of this size that ``send`` has written."""
        self._backlog.written += size
        if self._cycle.flow.write_paused:
            self._backlog.measure(size)


def _buffered(transport: asyncio.Transport) -> int:
    return transport.get_write_buffer_size()

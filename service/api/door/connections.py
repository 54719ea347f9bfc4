"""A connection's bounds in time, bytes and number, before the service gets its request.

uvicorn bounds none of these: a half-sent request holds its connection for ever, and a header may have any size.
"""

import asyncio
import resource
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any, ClassVar, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from service.api.door.backlog import Backlog, Backlogs
from service.api.door.writer import WRITER, BodyWriter
from service.api.errors.problems import problem
from service.api.errors.refusals import HeadTooLarge, RequestMalformed, RequestTooSlow, TooManyConnections
from service.errors import ServiceError

FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
MOST_FILES: Final = 1 << 16  # engines inherit the limit, and some programs loop over all of it
FILES_KEPT: Final = 128  # descriptors for the store, its readers, logs, tool servers and webhooks
FILES_A_WORKER: Final = 16  # descriptors for its pipes, its probes and its log
FILES_A_SLOT: Final = 2
CROWDED: Final = "roundhouse.crowded"  # key in an ASGI scope


def parser_behind_head(door: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Return a parser that reports to ``door`` all that follows the first head that it parses."""
    parser = httptools.HttpRequestParser(_BehindHead(door))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's own parser
    return parser


def framing_head(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head that only gives the length of the body that follows a head with these headers."""
    framing = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in FRAMING)
    return b"POST / HTTP/1.1\r\n%b\r\n" % framing


class _BehindHead:
    """Reports to a door what a parser finds after the first head."""

    def __init__(self, door: HttpToolsProtocol) -> None:
        self._door = door
        self._is_behind = False
        self.on_body = door.on_body
        self.on_message_complete = door.on_message_complete

    def __repr__(self) -> str:
        return f"<_BehindHead of {self._door!r}>"

    def on_message_begin(self) -> None:
        """Take the first byte of a request."""
        if self._is_behind:
            self._door.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of its target."""
        if self._is_behind:
            self._door.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one that trails a body."""
        if self._is_behind:
            self._door.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Handle the end of a request's head."""
        if self._is_behind:
            self._door.on_headers_complete()
        self._is_behind = True


LEAST_CONNECTIONS, MOST_CONNECTIONS = 16, 4096


class Stage(Enum):
    """The part of a request that a connection is to send next."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # the request is complete; the next may begin
    REFUSED = auto()


HEAD, BODY, NOTHING, REFUSED = Stage  # Python 3.11 looks up globals far faster than enum members


class Crowd:
    """State that a server's connections share: the idle ones, the longest first, and all unread bytes."""

    def __init__(self, unread: int) -> None:
        self.idle: dict[Door, float] = {}  # when each became idle
        self.backlogs = Backlogs(unread)

    def __repr__(self) -> str:
        return f"<Crowd idle={len(self.idle)} {self.backlogs!r}>"

    @classmethod
    def of(cls, server_state: ServerState, unread: int) -> "Crowd":
        """Return a server's crowd, whose clients may leave ``unread`` bytes."""
        crowd: Crowd | None = getattr(server_state, "crowd", None)
        if crowd is None:
            crowd = server_state.crowd = cls(unread)  # type: ignore[attr-defined]
        return crowd


class Door(HttpToolsProtocol):
    """A connection with limits; ``limit_concurrency`` of its configuration is the most connections.

    Time is counted in ticks; a stall of the event loop is one tick, so that no client is blamed for it.
    """

    HEAD_BYTES: ClassVar = 64 * 1024
    HEAD_S: ClassVar[float] = 10.0  # from the connection, or a later request's first byte, to the end of its headers
    BODY_S: ClassVar[float] = 30.0  # longest silence in a body
    BODY_RATE: ClassVar = 16 * 1024  # bytes of a body that buy another second
    CLOSING_S: ClassVar[float] = 5.0  # time for a last answer that the client does not read
    CROWDED_HEAD_S: ClassVar[float] = 2.0  # the same as HEAD_S once only reserved places are left
    GIVES_WAY_S: ClassVar[float] = 1.0  # idle time before it may be closed: bytes just sent may still be unread
    KEPT: ClassVar = 32  # places reserved for callers with a key, and for probes
    UNREAD_S: ClassVar[float] = 60.0  # time without a byte taken before a client is cut off
    UNREAD_BYTES: ClassVar = 128 * 1024 * 1024  # most unread bytes of all clients together
    PIPELINED: ClassVar = 16  # requests that may wait behind an unanswered one: 14,000 fit into one read

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._stage, self._left_s = HEAD, self.HEAD_S
        self._overhead = 0  # bytes since the last body byte, or since the end of a head or a request
        self._request: RequestResponseCycle | None = None  # the last with a complete head
        self._open: list[RequestResponseCycle] = []  # requests not answered yet
        self._crowd = Crowd.of(server_state, self.UNREAD_BYTES)
        self._is_crowded = False
        self._is_ending = False  # closes after the open answers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it."""
        super().connection_made(transport)
        self._crowd.idle[self] = self.loop.time()
        self._backlog = Backlog(transport, self._crowd.backlogs)
        if self._most is None or len(self.connections) <= self._most:
            return
        oldest, since = next(iter(self._crowd.idle.items()))
        if self.loop.time() - since >= self.GIVES_WAY_S and oldest is not self:
            oldest.give_way()
        elif len(self.connections) <= self._most + self.KEPT:
            self._is_crowded, self._left_s = True, min(self.HEAD_S, self.CROWDED_HEAD_S)
        else:
            self._refuse(TooManyConnections(f"{self._most} connections are open; try again"))

    def give_way(self) -> None:
        """Close this idle connection, since another needs its place."""
        self._crowd.idle.pop(self, None)
        self._expect(REFUSED, self.CLOSING_S)
        self._disconnect()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes in pieces no larger than what may still come outside a body."""
        if self._is_ending:
            return
        self._crowd.idle.pop(self, None)
        if self._stage is NOTHING:
            self._expect(HEAD, self.HEAD_S)
        at = 0
        while at < len(data) and not self.transport.is_closing():
            room = self.HEAD_BYTES - self._overhead
            if room <= 0:
                self._refuse(HeadTooLarge(f"request line and headers exceed {self.HEAD_BYTES} bytes"))
                return
            piece = data[at : at + room]
            at += len(piece)
            self._overhead += len(piece)
            self._parse(piece)

    def _parse(self, data: bytes) -> None:
        """Parse data; this replaces uvicorn's ``data_received``, which logs every malformed request."""
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse_to_upgrade(data)
        except httptools.HttpParserError:
            if self._stage is not BODY and (self._is_busy() or self.pipeline):
                self._end_when_answered()
            else:
                self._refuse(RequestMalformed("the request is not HTTP/1.1"))

    def _end_when_answered(self) -> None:
        """Read nothing more, and close once the earlier requests are answered: a bad one does not cancel them."""
        self._is_ending = True
        self._expect(NOTHING, 0)
        self.transport.pause_reading()

    def on_response_complete(self) -> None:
        """Begin the next request that has come, or close after the last one."""
        super().on_response_complete()
        self._end_if_answered()

    def _end_if_answered(self) -> bool:
        is_over = self._is_ending and not (self._is_busy() or self.pipeline)
        if is_over:
            self.transport.close()
        return is_over

    def _parse_to_upgrade(self, data: bytes) -> bytes:
        """Parse to the end of a head that offers an upgrade; return the rest, which is HTTP/1.1 as well."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.parser = parser_behind_head(self)
            return framing_head(self.cycle.scope["headers"]) + data[upgrade.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        """Begin a request whose first byte came with the end of the one before."""
        super().on_message_begin()
        if self._stage is NOTHING:
            self._expect(HEAD, self.HEAD_S)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        if len(self.pipeline) >= self.PIPELINED:
            raise ValueError("too many requests at once")  # the parser ends, and what came is refused
        super().on_headers_complete()
        self.headers = []  # trailers must not become headers of the request that is being answered
        self._request = self.cycle
        self.scope[WRITER] = BodyWriter(self.cycle, self._backlog)  # type: ignore[typeddict-unknown-key]
        self.scope[CROWDED] = self._is_crowded  # type: ignore[typeddict-unknown-key]
        self._open = [*(cycle for cycle in self._open if not cycle.response_complete), self.cycle]
        self._expect(BODY, self.BODY_S)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; it extends the time limit while the request is unanswered."""
        super().on_body(body)
        self._overhead = 0
        if not self.cycle.response_complete:
            self._left_s = min(self.BODY_S, self._left_s + len(body) / self.BODY_RATE)

    def on_message_complete(self) -> None:
        """End the request's sending."""
        if self.parser.should_upgrade():
            return  # at a head that offers an upgrade the parser ends as if no body followed
        super().on_message_complete()
        self._expect(NOTHING, 0)

    def tick(self) -> None:
        """Count a second if the connection waits for its client."""
        self._note_silence()
        if self._end_if_answered():
            return
        if self._stage is NOTHING and not self._is_busy() and self not in self._crowd.idle:
            self._crowd.idle[self] = self.loop.time()
        stage = self._stage
        if stage is NOTHING or (stage is HEAD and self._is_busy()) or (stage is BODY and self.flow.read_paused):
            return
        self._left_s -= 1
        if self._left_s >= 0:
            return
        if stage is REFUSED:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._refuse(RequestTooSlow("the rest of the request did not arrive in time"))

    def _note_silence(self) -> None:
        """Count a second in which the client could read its answer."""
        self._backlog.tick()
        if self._backlog.silent_s >= self.UNREAD_S:
            self._backlog.cut_off(f"a client has taken nothing of its answer for {self.UNREAD_S:g} s")

    def _is_busy(self) -> bool:
        """Whether the last request with a complete head still waits for its answer or the answer's end."""
        return self._request is not None and not self._request.response_complete

    def _expect(self, stage: Stage, left_s: float) -> None:
        self._stage, self._left_s, self._overhead = stage, left_s, 0

    def _refuse(self, error: ServiceError) -> None:
        """Close the connection, with an answer unless it could be taken for another request's."""
        is_body = self._stage is BODY
        is_ours = not (self.cycle.response_started or self.pipeline) if is_body else not self._is_busy()
        is_unused = isinstance(error, RequestTooSlow) and not is_body and not self._overhead  # nothing has come
        if is_ours and not is_unused:
            response = problem(error)
            headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + bytes(response.body))
        self._expect(REFUSED, self.CLOSING_S)
        self._disconnect()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the requests of a connection that is gone."""
        self._disconnect()
        self._crowd.idle.pop(self, None)
        self._backlog.end()
        super().connection_lost(exc)

    def _disconnect(self) -> None:
        """Disconnect every open request: uvicorn disconnects only the newest, and others' writes would raise."""
        cycles, self._open = self._open, []
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope[WRITER].note_gone()  # type: ignore[typeddict-item]


def most_connections(workers: int, slots: int) -> int:
    """Return the most connections that leave descriptors for engines and the store.

    A batch holds a second one, for its answers. The soft limit on files is raised to the hard one first.
    """
    kept = FILES_KEPT + FILES_A_WORKER * workers + FILES_A_SLOT * slots
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, (_raise_file_limit() - kept) // 2))


def _raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, at most to what engines can safely inherit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted

"""A connection's bounds in time, bytes and number, before the service hears of its request.

uvicorn itself bounds none of these: a half-sent request holds its connection for ever, and a header may be of any size.
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
MOST_FILES: Final = 1 << 16  # engines inherit the limit, and some programs walk over all of it
FILES_KEPT: Final = 128  # for the store, its readers, logs, tool servers and webhooks
FILES_A_WORKER: Final = 16  # its pipes, its probes and its log
FILES_A_SLOT: Final = 2
CROWDED: Final = "roundhouse.crowded"  # its place in an ASGI scope


def parser_behind_head(door: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Return a parser that tells ``door`` of all that follows the first head that it is fed."""
    parser = httptools.HttpRequestParser(_BehindHead(door))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    return parser


def framing_head(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a head that says no more than how long the body is that follows a head with these headers."""
    framing = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in FRAMING)
    return b"POST / HTTP/1.1\r\n%b\r\n" % framing


class _BehindHead:
    """Tells a door of what a parser finds behind the first head."""

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
        """Take the end of its head."""
        if self._is_behind:
            self._door.on_headers_complete()
        self._is_behind = True


LEAST_CONNECTIONS, MOST_CONNECTIONS = 16, 4096


class Stage(Enum):
    """The part of a request that a connection is to send next."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()  # its request is whole; the next may begin
    REFUSED = auto()


HEAD, BODY, NOTHING, REFUSED = Stage  # found far faster by these names than as members, in Python 3.11


class Crowd:
    """Shared by a server's connections: those that idle, the longest first, and what all have not taken."""

    def __init__(self, unread: int) -> None:
        self.idle: dict[Door, float] = {}  # since when
        self.backlogs = Backlogs(unread)

    def __repr__(self) -> str:
        return f"<Crowd idle={len(self.idle)} {self.backlogs!r}>"

    @classmethod
    def of(cls, server_state: ServerState, unread: int) -> "Crowd":
        """Return the one of a server, whose clients may leave so many bytes unread."""
        crowd: Crowd | None = getattr(server_state, "crowd", None)
        if crowd is None:
            crowd = server_state.crowd = cls(unread)  # type: ignore[attr-defined]
        return crowd


class Door(HttpToolsProtocol):
    """A connection with limits; ``limit_concurrency`` of its configuration is how many there may be, and no more.

    Time is counted in ticks, of which a stall of the event loop is one, so that no client is blamed for it.
    """

    HEAD_BYTES: ClassVar = 64 * 1024
    HEAD_S: ClassVar[float] = 10.0  # from the connection, or a later request's first byte, to the end of its headers
    BODY_S: ClassVar[float] = 30.0  # of silence in a body
    BODY_RATE: ClassVar = 16 * 1024  # so many bytes of a body buy another second
    CLOSING_S: ClassVar[float] = 5.0  # for a last answer that the client does not read
    CROWDED_HEAD_S: ClassVar[float] = 2.0  # where only places are left that are kept
    GIVES_WAY_S: ClassVar[float] = 1.0  # of idling: what a client has just sent may not have been read yet
    KEPT: ClassVar = 32  # places for who brings a key, and for probes
    UNREAD_S: ClassVar[float] = 60.0  # in which a client takes no byte of what is written to it
    UNREAD_BYTES: ClassVar = 128 * 1024 * 1024  # of all clients together
    PIPELINED: ClassVar = 16  # requests that wait for the answer to one before them: 14,000 fit into one read

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
        self._overhead = 0  # bytes since the last one of a body, or since the end of a head or a request
        self._request: RequestResponseCycle | None = None  # the last whose head is whole
        self._open: list[RequestResponseCycle] = []  # those that are not answered yet
        self._crowd = Crowd.of(server_state, self.UNREAD_BYTES)
        self._is_crowded = False
        self._is_ending = False  # once what was asked is answered

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
        """Close: nothing is under way, and another connection has no place."""
        self._crowd.idle.pop(self, None)
        self._expect(REFUSED, self.CLOSING_S)
        self._disconnect()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Hand on no more at once than there may be of what is no body."""
        if self._is_ending:
            return
        self._crowd.idle.pop(self, None)
        if self._stage is NOTHING:
            self._expect(HEAD, self.HEAD_S)
        at = 0
        while at < len(data) and not self.transport.is_closing():
            room = self.HEAD_BYTES - self._overhead
            if room <= 0:
                self._refuse(HeadTooLarge(f"more than {self.HEAD_BYTES} bytes of request line and headers"))
                return
            piece = data[at : at + room]
            at += len(piece)
            self._overhead += len(piece)
            self._parse(piece)

    def _parse(self, data: bytes) -> None:
        """Parse data; this replaces uvicorn's ``data_received``, which logs all that a client sends amiss."""
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse_to_upgrade(data)
        except httptools.HttpParserError:
            if self._stage is not BODY and (self._is_busy() or self.pipeline):
                self._end_when_answered()
            else:
                self._refuse(RequestMalformed("it is not HTTP/1.1"))

    def _end_when_answered(self) -> None:
        """Take nothing more, and close once what was asked before is answered: that is owed, whatever follows it."""
        self._is_ending = True
        self._expect(NOTHING, 0)
        self.transport.pause_reading()

    def on_response_complete(self) -> None:
        """Begin the next request that has come, or close behind the last one."""
        super().on_response_complete()
        self._end_if_answered()

    def _end_if_answered(self) -> bool:
        is_over = self._is_ending and not (self._is_busy() or self.pipeline)
        if is_over:
            self.transport.close()
        return is_over

    def _parse_to_upgrade(self, data: bytes) -> bytes:
        """Parse to the end of a head that offers an upgrade; return what follows, which is HTTP/1.1 as well."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.parser = parser_behind_head(self)
            return framing_head(self.cycle.scope["headers"]) + data[upgrade.args[0] :]
        return b""

    def on_message_begin(self) -> None:
        """Begin a request whose first byte came together with the end of the one before."""
        super().on_message_begin()
        if self._stage is NOTHING:
            self._expect(HEAD, self.HEAD_S)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        if len(self.pipeline) >= self.PIPELINED:
            raise ValueError("too many requests at once")  # the parser ends, and what came is refused
        super().on_headers_complete()
        self.headers = []  # what trails the body is no header of a request that is being answered
        self._request = self.cycle
        self.scope[WRITER] = BodyWriter(self.cycle, self._backlog)  # type: ignore[typeddict-unknown-key]
        self.scope[CROWDED] = self._is_crowded  # type: ignore[typeddict-unknown-key]
        self._open = [*(cycle for cycle in self._open if not cycle.response_complete), self.cycle]
        self._expect(BODY, self.BODY_S)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; it gives more time as long as anybody waits for it."""
        super().on_body(body)
        self._overhead = 0
        if not self.cycle.response_complete:
            self._left_s = min(self.BODY_S, self._left_s + len(body) / self.BODY_RATE)

    def on_message_complete(self) -> None:
        """End the request's sending."""
        if self.parser.should_upgrade():
            return  # the parser ends at a head that offers an upgrade, as if no body followed
        super().on_message_complete()
        self._expect(NOTHING, 0)

    def tick(self) -> None:
        """Let a second pass, if it is the client that is to do something."""
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
            self._refuse(RequestTooSlow("the rest of it did not come in time"))

    def _note_silence(self) -> None:
        """Let a second pass in which a client may take what is written to it."""
        self._backlog.tick()
        if self._backlog.silent_s >= self.UNREAD_S:
            self._backlog.cut_off(f"a client has taken nothing of its answer for {self.UNREAD_S:g} s")

    # Between one program of this process and the next

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is asked and all is answered."""
        is_between = self._stage is NOTHING or (self._stage is HEAD and not self._overhead)
        return (
            is_between
            and not self._is_busy()
            and not self.pipeline
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    def rest(self) -> bool:
        """Read nothing more if it is at rest; return whether it is."""
        is_resting = self.is_at_rest
        if is_resting and self.transport.is_reading():
            self.transport.pause_reading()
        return is_resting

    def end_rest(self) -> None:
        """Read on."""
        if not self.transport.is_closing() and not self.transport.is_reading():
            self.transport.resume_reading()

    def rest_is_over(self) -> None:
        """Take a connection that an earlier program has accepted as one that has been answered."""
        self._expect(NOTHING, 0)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def fileno(self) -> int:
        """Return its descriptor."""
        return int(self.transport.get_extra_info("socket").fileno())

    def _is_busy(self) -> bool:
        """Whether the last request whose head is whole is still to be answered, or its answer to end."""
        return self._request is not None and not self._request.response_complete

    def _expect(self, stage: Stage, left_s: float) -> None:
        self._stage, self._left_s, self._overhead = stage, left_s, 0

    def _refuse(self, error: ServiceError) -> None:
        """Close the connection, with an answer where none could take it for another request's."""
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
        """Let go of what was asked on a connection that is gone."""
        self._disconnect()
        self._crowd.idle.pop(self, None)
        self._backlog.end()
        super().connection_lost(exc)

    def _disconnect(self) -> None:
        """Disconnect every open request: uvicorn tells the newest alone, and the others' writes would raise."""
        cycles, self._open = self._open, []
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
            cycle.scope[WRITER].note_gone()  # type: ignore[typeddict-item]


def most_connections(workers: int, slots: int) -> int:
    """Return how many connections there may be, so that engines and the store always find a descriptor.

    A batch holds a second one, for its answers. The soft limit on files is raised to the hard one first.
    """
    kept = FILES_KEPT + FILES_A_WORKER * workers + FILES_A_SLOT * slots
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, (_raise_file_limit() - kept) // 2))


def _raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, or to what engines can inherit without harm; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted

"""One HTTP/1.1 POST, its answer handed over as the bytes arrive.

This is the token path, so it is an ``asyncio.Protocol`` over httptools and not an HTTP client: between the socket and
the receiver nothing is awaited and no task is woken (``bench/token_path.py`` compares). Each exchange serves one
request. llama-server closes idle connections after five seconds, which a pooled client meets as a reset of its next
request; a new connection costs a tenth of a millisecond on loopback.
"""

import asyncio
import re
import time
from typing import Final, Protocol, cast

import httptools

from transport.dialects.refusals import decode_error
from transport.errors import (
    AnswerTooLarge,
    EngineError,
    EngineUnreachable,
    MalformedFrame,
    TruncatedStream,
    UnreadableFrame,
    without_frames,
)
from transport.events import Event, PromptProgress, ReasoningDelta, TextDelta, ToolCallDelta
from transport.gathering import Gathering, Reads
from transport.sse import MAX_FRAME_BYTES
from transport.stream import SAID, ChatStream

MAX_HEAD_BYTES: Final = 64 * 1024  # status line and headers, including those of interim answers
HEAD_S: Final = 10.0  # from the first byte of the headers to their end
LAST_STATUS: Final = 599
MAX_BARREN_BYTES: Final = MAX_FRAME_BYTES + 1024 * 1024  # most bytes between two events
SLICE_BYTES: Final = 16 * 1024  # parsed in one go: 16,000 blank lines, the worst case, take 8 ms
TURN_S: Final = 0.005  # time of the event loop that one read may take
MAX_ERROR_BODY_BYTES: Final = 64 * 1024  # enough for any message
MAX_CHARS: Final = 16 * 1024 * 1024  # longest answer, about four million tokens
LLAMA_CPP: Final = "llama.cpp"  # its server ties up one of its few threads for each idle connection
ORDINARY_BYTES: Final = 4096  # between two events, or of gathered reads; above it letters are counted here
SHOWN_BYTES: Final = 200  # shown of an unreadable body
EVENT_STREAM: Final = "text/event-stream"
_STREAM: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry)?:")  # a stream, whatever its content type
_OK: Final = 200


def _chars_of(event: Event) -> int:
    if isinstance(event, TextDelta | ReasoningDelta):
        return len(event.text)
    return len(event.arguments) + len(event.name or "") if isinstance(event, ToolCallDelta) else 0


class Receiver(Protocol):
    """Takes an engine's events for one request, in the event loop and without waiting."""

    def begin_stream(self) -> None:
        """Take the start of a stream: the engine has accepted the request."""

    def touch(self) -> None:
        """Take the arrival of body bytes: progress, whatever they hold (specification, "Progress")."""

    def receive(self, event: Event) -> None:
        """Take one event."""


class Exchange(asyncio.Protocol):
    """The answer to one request; ``finished`` completes with it, or fails with an ``EngineError``.

    With ``gathering`` its reads may be gathered from the first token on: no reader watches it.
    """

    def __init__(
        self,
        request: bytes,
        receiver: Receiver,
        finished: "asyncio.Future[None]",
        *,
        stream: ChatStream | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        self._request = request
        self._receiver = receiver
        self.finished = finished
        self._gathering = gathering
        self._reads: Reads | None = None  # set if they may be gathered
        self._is_answering = False
        self._stream = stream or ChatStream()
        self._pieces: list[bytes] = []  # parts of the body in the read that is being parsed
        self.on_body = self._pieces.append  # httptools calls it for each chunk: no function of ours runs per token
        self._status = 0
        self._headers: dict[str, str] = {}
        self._is_stream = False
        self._body = bytearray()  # body of an answer that is not a stream
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()  # received bytes that later turns of the loop parse
        self._is_behind = False  # pending bytes must be parsed before new ones
        self._is_reading = True
        self.leaves_open = False  # set after the answer: the connection can serve another request
        self._ends = 0  # answers that ended on this connection
        self.is_answered = False  # at least one byte has come
        self._has_head = False
        self._head_since = 0.0  # time of the first byte
        self._barren_bytes = 0  # since the last event
        self._chars = 0  # letters of large reads

    def __repr__(self) -> str:
        return f"<Exchange status={self._status or None} finished={self.finished.done()} {self._stream!r}>"

    def stop_gathering(self) -> None:
        """Leave the reads alone; called before we close the connection."""
        if self._gathering is not None and self._reads is not None:
            self._gathering.forget_reads(self._reads)

    def give_up(self) -> None:
        """End an exchange that its caller left while it was connecting: uvloop does not report that."""
        self.finished.cancel()
        if self._transport is not None:
            self.connection_lost(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._parser = httptools.HttpResponseParser(self)  # lives until the connection is lost
        # asyncio declares the base class; uvloop's transports are no subclass of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        if self._gathering is not None:
            self._reads = Reads(transport.get_extra_info("socket"))
        self._request = b""  # it may be megabytes, and this object lives as long as the answer

    def data_received(self, data: bytes) -> None:
        """Parse the bytes and hand over their events; large reads are parsed over several turns of the loop."""
        self.is_answered = True
        if self.finished.done():
            self.leaves_open = False  # bytes came after the answer
            return
        size = len(data)
        if size > SLICE_BYTES or self._is_behind:
            self._pending += data
            self._parse_pending()
            return
        if self._reads is not None:
            self._reads.count += 1
        self._barren_bytes += size
        try:
            if self._barren_bytes > ORDINARY_BYTES or not self._has_head:
                self._bound_barren()
            self._parser.feed_data(data)
            if self._pieces:
                self._deliver()
        except EngineError as error:
            self._fail(error)
        except httptools.HttpParserError as error:
            # An error raised in a callback of ours arrives as the context of httptools' own error.
            cause = error.__context__
            self._deliver()
            if isinstance(cause, EngineError):
                self._fail(cause)
            else:
                self._fail(MalformedFrame(f"the answer is not HTTP: {error}"), error)

    def _parse_pending(self) -> None:
        """Parse for up to ``TURN_S``; stop reading until all received bytes are parsed."""
        until = time.monotonic() + TURN_S
        while self._pending and not self.finished.done():
            piece = bytes(self._pending[:SLICE_BYTES])
            del self._pending[:SLICE_BYTES]
            self._is_behind = False
            self.data_received(piece)
            if self._pending and time.monotonic() >= until:
                self._is_behind = True
                self._set_reading(False)
                asyncio.get_running_loop().call_soon(self._parse_pending)
                return
        self._pending.clear()
        self._is_behind = False
        self._set_reading(True)

    def _set_reading(self, is_wanted: bool) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self._is_reading is is_wanted:
            return
        self._is_reading = is_wanted
        if is_wanted:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _bound_barren(self) -> None:
        """Check the bytes received since the last event against their bound.

        Raises:
            MalformedFrame: they are too many.
        """
        if not self._has_head:
            now = time.monotonic()
            self._head_since = self._head_since or now
            if self._barren_bytes > MAX_HEAD_BYTES + SLICE_BYTES:  # the body may have begun
                raise MalformedFrame(f"more than {MAX_HEAD_BYTES} bytes of headers")
            if now - self._head_since > HEAD_S:
                raise MalformedFrame(f"headers that have not ended {HEAD_S:g} s after they began")
        if self._barren_bytes > MAX_BARREN_BYTES:
            raise MalformedFrame(f"{MAX_BARREN_BYTES} bytes without an event")

    def _bound_letters(self, events: list[Event]) -> None:
        """Count the letters of large reads; the engine's watch counts those of ordinary ones."""
        self._chars += sum(map(_chars_of, events))
        if self._chars > MAX_CHARS:
            self._fail(AnswerTooLarge(f"the answer is longer than {MAX_CHARS} letters"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Decide what the end of the connection means for the answer."""
        while self._pending and not self.finished.done():
            self._parse_pending()
        self._transport, self.leaves_open = None, False
        del self._parser  # it and we keep each other: only the collector would free both, and what our receiver holds
        self.stop_gathering()
        if self.finished.done():
            return
        if not self._has_head:
            self._fail(EngineUnreachable("the connection broke before an answer began"), exc)
        elif not self._is_stream:
            if self._status == _OK and {"content-length", "transfer-encoding"} & self._headers.keys():
                self._fail(TruncatedStream("the connection broke in the middle of the answer"), exc)
            else:
                self._end_whole()
        else:
            self._close_stream(exc)

    # httptools callbacks

    def on_status(self, _status: bytes) -> None:
        """Set the status."""
        self._status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store one header; trailers after the body are ignored."""
        if not self._has_head:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Decide whether a stream follows."""
        self._take_head()
        self._is_stream = self._status == _OK and self._headers.get("content-type", "").lower().startswith(EVENT_STREAM)
        if self._status == _OK:
            self._receiver.begin_stream()
            if self._parser.should_keep_alive() or not self._is_stream:
                self._reads = None  # the connection stays open after the answer, so the end would not wake us

    def _take_head(self) -> None:
        """Read status and headers.

        Raises:
            MalformedFrame: the body is packed, so its size is unknown; or the status is not one of HTTP's.
        """
        self._status = self._parser.get_status_code()
        if self._status > LAST_STATUS:
            raise MalformedFrame(f"an answer of the status {self._status}")
        self._has_head = self._status >= _OK
        coding = self._headers.get("content-encoding", "").strip().lower()
        if coding not in {"", "identity"}:
            raise MalformedFrame(f"the answer is compressed ({coding[:50]}), although no compression was requested")

    def on_message_complete(self) -> None:
        """Handle the end of the answer."""
        self._deliver()
        self.leaves_open = self._may_stay_open()
        if self.finished.done():
            return
        if self._status < _OK:  # an interim answer; the real one follows
            self._status = 0
            self._headers.clear()
        elif self._is_stream:
            self._close_stream(None)
        else:
            self._end_whole()

    def _may_stay_open(self) -> bool:
        """Count the end of an answer; return whether its connection stays open with nothing sent after it."""
        self._ends += self._status >= _OK
        is_llama = self._headers.get("server", "").startswith(LLAMA_CPP)
        return self._ends == 1 and not is_llama and self._parser.should_keep_alive()

    def _deliver(self) -> None:
        """Hand over the body bytes of this read, if there are any."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if not body:
            return
        if not self._is_stream:
            self._hold(body)
            return
        receiver = self._receiver
        receiver.touch()
        stream = self._stream
        events = stream.feed(body)
        if events:
            for event in events:
                receiver.receive(event)
            if self._barren_bytes > ORDINARY_BYTES:
                self._bound_letters(events)
            self._barren_bytes = 0
        if stream.is_complete or stream.failure is not None:
            self._settle()
        elif not self._is_answering and events and type(events[-1]) is not PromptProgress:
            self._is_answering = True  # the time of the first token must be exact; many follow
            if self._gathering is not None and self._reads is not None:
                self._gathering.add(self._reads)

    # outcomes

    def _close_stream(self, cause: Exception | None) -> None:
        for event in self._stream.close():
            self._receiver.receive(event)
        self._settle(cause)

    def _settle(self, cause: Exception | None = None) -> None:
        """Finish the way the stream ended."""
        if self._stream.failure is not None:
            self._fail(self._stream.failure, cause)
        elif not self.finished.done():
            self.finished.set_result(None)

    def _hold(self, body: bytes) -> None:
        """Hold a piece of an answer that is not a stream although one was asked for."""
        if self._status != _OK:
            self._body += body[: MAX_ERROR_BODY_BYTES - len(self._body)]
            return
        self._receiver.touch()
        self._barren_bytes = 0
        self._body += body
        if len(self._body) > MAX_FRAME_BYTES:
            raise AnswerTooLarge(f"the answer is larger than {MAX_FRAME_BYTES} bytes")

    def _end_whole(self) -> None:
        """Handle the end of an answer outside a stream: an error, one whole answer, or a stream without its type.

        Each of them may have the status 200.
        """
        body = bytes(self._body)
        if self._status != _OK:
            self._fail(decode_error(self._status, self._headers, body))
        elif _STREAM.match(body):
            for event in self._stream.feed(body):
                self._receiver.receive(event)
            self._close_stream(None)
        else:
            self._take_whole(body)

    def _take_whole(self, body: bytes) -> None:
        events: list[Event] = []
        try:
            has_stopped = self._stream.decode_whole(body, events)
        except UnreadableFrame:
            has_stopped = False
        except EngineError as error:
            self._fail(error)
            return
        if not has_stopped and not any(isinstance(event, SAID) for event in events):
            content_type = self._headers.get("content-type", "of no type")
            shown = body[:SHOWN_BYTES].decode("utf-8", "replace")
            kind = UnreadableFrame if body.strip() else MalformedFrame
            self._fail(kind(f"the answer is {content_type}, and neither an answer nor an error: {shown}"))
            return
        for event in events:
            self._receiver.receive(event)
        self._bound_letters(events)
        self._settle()

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        if cause is not None and error.__cause__ is None:
            error.__cause__ = cause
        if not self.finished.done():
            self.finished.set_exception(without_frames(error))

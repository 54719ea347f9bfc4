"""One HTTP/1.1 POST on one fresh connection, its answer handed over as the bytes arrive.

This is the token path, so it is an ``asyncio.Protocol`` over httptools and not an HTTP client: nothing is awaited and
no task is woken between the socket and the receiver (``bench/token_path.py`` compares). No connection is used twice.
llama-server closes idle ones after five seconds, a pooled client meets that as a reset of its next request, and a new
connection costs a tenth of a millisecond on loopback.
"""

import asyncio
import time
from typing import Final, Protocol, cast

import httptools

from transport.dialects import openai
from transport.errors import AnswerTooLarge, EngineError, EngineUnreachable, MalformedFrame, without_frames
from transport.events import Event, PromptProgress, ReasoningDelta, TextDelta, ToolCallDelta
from transport.gathering import Gathering, Reads
from transport.sse import MAX_FRAME_BYTES
from transport.stream import ChatStream

MAX_HEAD_BYTES: Final = 64 * 1024  # status line and headers, those of interim answers included
HEAD_S: Final = 10.0  # from its first byte to its end
LAST_STATUS: Final = 599
MAX_BARREN_BYTES: Final = MAX_FRAME_BYTES + 1024 * 1024  # between two events
SLICE_BYTES: Final = 16 * 1024  # parsed in one go: 16,000 blank lines, the worst, take 8 ms
TURN_S: Final = 0.005  # of the event loop, for what has come in one read
MAX_ERROR_BODY_BYTES: Final = 64 * 1024  # enough for any message; an engine that sends more has nothing more to say
MAX_CHARS: Final = 16 * 1024 * 1024  # of one answer: four million tokens
LLAMA_CPP: Final = "llama.cpp"  # whose server waits on an idle connection with a thread of the few that it has
ORDINARY_BYTES: Final = 4096  # from one event to the next, or of what is gathered of them
_OK: Final = 200


def _chars_of(event: Event) -> int:
    if isinstance(event, TextDelta | ReasoningDelta):
        return len(event.text)
    return len(event.arguments) + len(event.name or "") if isinstance(event, ToolCallDelta) else 0


class Receiver(Protocol):
    """Takes what an engine sends for one request, in the event loop and without waiting."""

    def begin_stream(self) -> None:
        """The engine has taken the request up: a stream follows."""

    def touch(self) -> None:
        """Bytes of the body have come: progress, whatever they hold (specification, "Progress")."""

    def receive(self, event: Event) -> None:
        """Take one event."""


class Exchange(asyncio.Protocol):
    """The answer to one request; ``finished`` is done when it is complete or has failed with an ``EngineError``.

    With ``gathering`` its reads may be gathered from the first token on: nobody watches it.
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
        self._reads: Reads | None = None  # where they may be gathered
        self._is_answering = False
        self._stream = stream or ChatStream()
        self._pieces: list[bytes] = []  # of the body, in the read that is being parsed
        self.on_body = self._pieces.append  # httptools calls it for each chunk: no function of ours for a token
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._headers: dict[str, str] = {}
        self._is_stream = False
        self._error_body = bytearray()
        self._transport: asyncio.Transport | None = None
        self._pending = bytearray()  # what has come and is parsed in later turns of the loop
        self._is_behind = False  # it has to be parsed before what comes
        self._is_reading = True
        self.leaves_open = False  # once its answer is whole: its connection is good for another request
        self._ends = 0  # of answers on this connection
        self.is_answered = False  # by one byte at least
        self._has_head = False
        self._head_since = 0.0  # when its first byte came
        self._barren_bytes = 0  # since the last event
        self._chars = 0  # of large reads

    def __repr__(self) -> str:
        return f"<Exchange status={self._status or None} finished={self.finished.done()} {self._stream!r}>"

    def stop_gathering(self) -> None:
        """Leave the reads alone; to be called before the connection is closed from here."""
        if self._gathering is not None and self._reads is not None:
            self._gathering.forget_reads(self._reads)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        # asyncio declares the base class; uvloop's transports are no subclass of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)
        if self._gathering is not None:
            self._reads = Reads(transport.get_extra_info("socket"))
        self._request = b""  # it may be megabytes, and we are kept for as long as the answer takes

    def data_received(self, data: bytes) -> None:
        """Parse what came and hand it over; more than a little is parsed over several turns of the loop."""
        self.is_answered = True
        if self.finished.done():
            self.leaves_open = False  # something has come behind it
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
            # An error raised in one of our callbacks arrives as the context of httptools' own.
            cause = error.__context__
            self._deliver()
            if isinstance(cause, EngineError):
                self._fail(cause)
            else:
                self._fail(MalformedFrame(f"the answer is not HTTP: {error}"), error)

    def _parse_pending(self) -> None:
        """Parse for a moment; read no more until all that has come is parsed."""
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
        """Bound what has come since the last event.

        Raises:
            MalformedFrame: it is too much.
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
        """Count the letters of events that were large; those of ordinary ones are counted by the engine's watch."""
        self._chars += sum(map(_chars_of, events))
        if self._chars > MAX_CHARS:
            self._fail(AnswerTooLarge(f"the answer is longer than {MAX_CHARS} letters"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Judge what the end of the connection means for the answer."""
        while self._pending and not self.finished.done():
            self._parse_pending()
        self._transport, self.leaves_open = None, False
        del self._parser  # it keeps us as we keep it: only the collector would free us, and what our receiver holds
        self.stop_gathering()
        if self.finished.done():
            return
        if not self._has_head:
            self._fail(EngineUnreachable("the connection broke before an answer began"), exc)
        elif not self._is_stream:
            self._reject()
        else:
            self._close_stream(exc)

    # httptools callbacks

    def on_status(self, _status: bytes) -> None:
        """Take the status line."""
        self._status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header; what trails the body is none."""
        if not self._has_head:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Decide whether a stream follows."""
        self._take_head()
        content_type = self._headers.get("content-type", "")
        if self._status == _OK and not content_type.lower().startswith("text/event-stream"):
            raise MalformedFrame(f"the answer is {content_type or 'of no type'} and not an event stream")
        self._is_stream = self._status == _OK
        if self._is_stream:
            self._receiver.begin_stream()
            if self._parser.should_keep_alive():
                self._reads = None  # it does not close its connection after the answer, so the end would not wake us

    def _take_head(self) -> None:
        """Take status and headers.

        Raises:
            MalformedFrame: the body is packed, of which nobody knows how large it is; or the status is none.
        """
        self._status = self._parser.get_status_code()
        if self._status > LAST_STATUS:
            raise MalformedFrame(f"an answer of the status {self._status}")
        self._has_head = self._status >= _OK
        coding = self._headers.get("content-encoding", "").strip().lower()
        if coding not in {"", "identity"}:
            raise MalformedFrame(f"the answer is packed ({coding[:50]}), which nobody asked for")

    def on_message_complete(self) -> None:
        """Take the end of the answer."""
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
            self._reject()

    def _may_stay_open(self) -> bool:
        """Note the end of an answer; return whether its connection stays open, and nothing has come behind it."""
        self._ends += self._status >= _OK
        is_llama = self._headers.get("server", "").startswith(LLAMA_CPP)
        return self._ends == 1 and not is_llama and self._parser.should_keep_alive()

    def _deliver(self) -> None:
        """Hand over what of the body has come with this read, if anything has."""
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if not body:
            return
        if not self._is_stream:
            room = MAX_ERROR_BODY_BYTES - len(self._error_body)
            self._error_body += body[:room]
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
            self._is_answering = True  # when the first token came has to be known well; from now on there are many
            if self._gathering is not None and self._reads is not None:
                self._gathering.add(self._reads)

    # outcomes

    def _close_stream(self, cause: Exception | None) -> None:
        for event in self._stream.close():
            self._receiver.receive(event)
        self._settle(cause)

    def _settle(self, cause: Exception | None = None) -> None:
        """Finish as the stream has ended."""
        if self._stream.failure is not None:
            self._fail(self._stream.failure, cause)
        elif not self.finished.done():
            self.finished.set_result(None)

    def _reject(self) -> None:
        self._fail(openai.decode_error(self._status, self._headers, bytes(self._error_body)))

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        if cause is not None and error.__cause__ is None:
            error.__cause__ = cause
        if not self.finished.done():
            self.finished.set_exception(without_frames(error))

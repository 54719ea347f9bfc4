"""One POST whose answer is passed on unchanged and read along the way.

A stream is passed on piece by piece within ``data_received``, like the whole token path. Pieces that can only be tokens
are read a few at a time: their arrival is reported at once, their text is needed only twice a second. Any other answer
is passed on when it is whole: until then the request can be sent again.
"""

import asyncio
import re
from typing import Final, Protocol

import msgspec
from typing_extensions import override

from transport.dialects.recording import AnswerReaders
from transport.dialects.refusals import SERVER_ERROR, Refusal, decode_error, encode_error, refusal_in, rejection
from transport.dialects.relayed import account_of, decode_body, decode_frame
from transport.errors import UNDECODABLE, AnswerTooLarge, EngineError, EngineRejected, TruncatedStream, UnreadableFrame
from transport.events import Finished
from transport.exchange import MAX_ERROR_BODY_BYTES, ORDINARY_BYTES, Exchange, Receiver
from transport.stream import ChatStream

MAX_BODY_BYTES: Final = 64 * 1024 * 1024  # one answer without a stream: embeddings of hundreds of texts
MAX_HELD_BYTES: Final = 96 * 1024 * 1024  # all such answers in progress
READ_AT_ONCE: Final = 16  # pieces that are passed on before they are read
_TOKENS: Final = (b"data: {", b"event: content_block_delta\n", b"event: response.output_text.delta\n")
_DOCUMENT: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*[{\[]")  # JSON, perhaps after a byte order mark
SHOWN: Final = 80  # bytes shown of an answer that is not JSON
JSON: Final = "application/json"
_ENDS: Final = (b"\n\n", b"\n\r\n")  # each ends a frame
_ERROR: Final = re.compile(rb'data:[^\n]*"error"\s*:')
FLAT: Final = frozenset(
    {"message", "msg", "detail", "code", "status", "status_code", "raw_status_code", "type", "param"}
)
READERS: Final = AnswerReaders(decode=decode_frame)
_OK: Final = 200
_LAST_OK: Final = 299
_NOT_IMPLEMENTED: Final = 501


class Passage(Protocol):
    """Passes an answer to its client, in the event loop and without waiting."""

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Take a piece of a stream."""

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Take an answer outside a stream, good or bad."""


class RelayReceiver(Receiver, Protocol):
    """A receiver that can learn of a token before it is read."""

    def advance(self) -> None:
        """Take the arrival of bytes that show progress of the model; their events follow."""


class HeldAnswers:
    """Counts the bytes held of whole answers, of all engines together: they share one process's memory."""

    def __init__(self, most_bytes: int = MAX_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<HeldAnswers {self.bytes} bytes>"

    def add(self, size: int) -> bool:
        """Hold ``size`` bytes more; return whether there is room for them."""
        self.bytes += size
        return self.bytes <= self._most_bytes


HELD: Final = HeldAnswers()


class RelayExchange(Exchange):
    """The answer to one relayed request; an engine's refusal is passed on, and fails the exchange as well.

    An error in a stream is kept back while nothing of it was passed on: the request may be sent again.
    """

    def __init__(
        self, request: bytes, receiver: RelayReceiver, finished: "asyncio.Future[None]", passage: Passage
    ) -> None:
        super().__init__(request, receiver, finished, stream=ChatStream(readers=READERS, tells_reason=False))
        self._relay_receiver = receiver
        self._passage = passage
        self._unread: list[bytes] = []
        self._content_type = ""
        self._is_sized = False  # by a length or by chunks, which mark its end
        self._has_passed = False
        self._unfinished = bytearray()  # a frame that is not whole yet: another answer cannot go on from half a frame
        finished.add_done_callback(self._let_go)

    @override
    def on_headers_complete(self) -> None:
        self._take_head()
        headers = self._headers
        self._content_type = headers.get("content-type", JSON)
        self._is_sized = "content-length" in headers or "transfer-encoding" in headers
        self._is_stream = self._status == _OK and self._content_type.lower().startswith("text/event-stream")
        if self._status >= _OK:
            self._receiver.begin_stream()

    def _deliver(self) -> None:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if not body or self.finished.done():
            return
        unread = self._unread
        if (
            self._has_passed
            and len(unread) < READ_AT_ONCE
            and not self._unfinished
            and body.startswith(_TOKENS)
            and body[-2:] == b"\n\n"
            and b"[DONE]" not in body  # nothing may follow it, not even the end of the body
            and b'"error"' not in body
            and not self._stream.is_over
        ):
            unread.append(body)
            self._barren_bytes = 0
            self._relay_receiver.advance()
            self._passage.pass_frames(self._content_type, body)
            return
        self._receiver.touch()
        if not self._is_stream:
            self._hold(body)
            return
        self._read(body)
        self._pass_read(body, self._stream.failure)
        if self._stream.is_over:
            self._settle()

    def _pass_read(self, body: bytes, failure: EngineError | None) -> None:
        """Pass on a piece of a stream that was read; an engine's refusal before any of it is an answer of its own."""
        if failure is None or self._has_passed:
            self._has_passed = True
            self._pass(body, is_last=failure is not None)
            if isinstance(failure, EngineRejected) and _ERROR.search(body) is None:  # in a form that no client reads
                self._passage.pass_frames(self._content_type, b"\n\ndata: %b\n\n" % encode_error(failure))
        elif isinstance(failure, EngineRejected) and is_about_the_request(failure):
            # vLLM refuses in a stream that it began with 200: clients get a refusal like any other.
            self._passage.pass_whole(failure.status, JSON, encode_error(failure))

    def _pass(self, body: bytes, *, is_last: bool) -> None:
        """Pass on whole frames; the rest waits for its end, unless it is the last of the stream."""
        held, end = self._unfinished, len(body)
        if not is_last:  # a long frame is not searched again with each piece
            edge = bytes(held[-2:])
            joined = edge + body
            end = max((joined.rfind(mark) + len(mark) for mark in _ENDS if mark in joined), default=0) - len(edge)
            if end <= 0:
                held += body
                return
        self._unfinished = bytearray(body[end:])
        self._passage.pass_frames(self._content_type, bytes(held) + body[:end])

    def _read(self, body: bytes = b"") -> None:
        """Read the pieces that were passed on unread, then ``body``."""
        if self._unread:
            body = b"".join(self._unread) + body
            self._unread.clear()
        receive = self._receiver.receive
        events = self._stream.feed(body)
        for event in events:
            receive(event)
        if events and self._barren_bytes > ORDINARY_BYTES:
            self._bound_letters(events)
        if events:
            self._barren_bytes = 0

    def read_rest(self) -> None:
        """Read what was passed on unread: another answer may have to go on from it."""
        if not self.finished.done() or self.finished.cancelled():
            self._read()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._read()
        if not self.finished.done() and self._has_head and not self._is_stream and not self._is_sized:
            self._pass_whole()  # only the end of the connection marks its end
        super().connection_lost(exc)

    def on_message_complete(self) -> None:
        """Handle the end of the answer that the protocol marks."""
        self._deliver()
        self._read()
        if self.finished.done() or self._status < _OK:
            super().on_message_complete()
            return
        self.leaves_open = self._may_stay_open()
        if not self._is_stream:
            self._pass_whole()
        elif not self._has_passed and self._stream.failure is None:
            self._fail(TruncatedStream("the stream ended before it had begun"))
        else:
            self._close_stream(None)

    @override
    def _close_stream(self, cause: Exception | None) -> None:
        for event in self._stream.close():
            self._receiver.receive(event)
        if self._unfinished and self._stream.failure is None:  # a last frame without its blank line
            self._pass(b"", is_last=True)
        self._settle(cause)

    @override
    def _hold(self, body: bytes) -> None:
        self._barren_bytes = 0
        self._body += body
        has_room = HELD.add(len(body))
        if len(self._body) > MAX_BODY_BYTES:
            self._fail(AnswerTooLarge(f"the answer is larger than {MAX_BODY_BYTES} bytes"))
        elif not has_room:
            self._fail(AnswerTooLarge(f"answers that come whole hold more than {MAX_HELD_BYTES} bytes together"))

    def _let_go(self, _finished: object) -> None:
        HELD.add(-len(self._body))
        self._body = bytearray()

    def _pass_whole(self) -> None:
        whole = bytes(self._body)
        refusal = _refusal_in(whole) if self._status <= _LAST_OK else None
        if refusal is not None:
            refused = rejection(refusal, SERVER_ERROR, None)
            self._passage.pass_whole(refused.status, JSON, encode_error(refused))
            self._fail(refused)
        elif self._status <= _LAST_OK and _DOCUMENT.match(whole) is None:
            self._fail(UnreadableFrame(f"the answer is no JSON: {whole[:SHOWN]!r}"))
        elif self._status <= _LAST_OK:
            self._passage.pass_whole(self._status, self._content_type, whole)
            for event in (*decode_body(account_of(whole)), Finished("")):
                self._receiver.receive(event)
            self.finished.set_result(None)
        else:
            error = decode_error(self._status, self._headers, whole[:MAX_ERROR_BODY_BYTES])
            status = error.status if is_about_the_request(error) else self._status  # llama.cpp: 500 for some
            self._passage.pass_whole(status, self._content_type, whole)
            self._fail(error)

    @override
    def _end_whole(self) -> None:
        if self._status <= _LAST_OK:
            self._fail(TruncatedStream("the connection broke in the middle of the answer"))
            return
        self._fail(decode_error(self._status, self._headers, bytes(self._body)))


def _refusal_in(whole: bytes) -> Refusal | None:
    """Return the error in a body of status 200; a failed answer of the Responses surface is an answer."""
    if len(whole) > MAX_ERROR_BODY_BYTES:
        return None
    try:
        document = msgspec.json.decode(whole)
    except UNDECODABLE:
        return None
    if not isinstance(document, dict) or document.get("object") == "response":
        return None
    is_error = document.get("error") or "error" in (document.get("object"), document.get("type"))
    return refusal_in(document) if is_error or document.keys() <= FLAT else None


def is_about_the_request(error: EngineRejected) -> bool:
    """Whether a refusal concerns only this request: its faults, and features that the engine lacks."""
    return error.is_about_the_request or error.status == _NOT_IMPLEMENTED

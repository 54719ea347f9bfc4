"""One POST whose answer is passed on as it came, and read along the way.

A stream is passed on piece by piece, within ``data_received`` as all of the token path. Pieces that can only be tokens
are read a few at a time: what they say is wanted twice a second, and that they came is known at once. Any other answer
is passed on when it is whole: until then it can be asked for again.
"""

import asyncio
from typing import Final, Protocol

from typing_extensions import override

from transport.dialects import openai
from transport.dialects.relayed import account_of, decode_body, decode_frame
from transport.errors import AnswerTooLarge, EngineRejected, TruncatedStream
from transport.events import Finished
from transport.exchange import MAX_ERROR_BODY_BYTES, ORDINARY_BYTES, Exchange, Receiver
from transport.stream import ChatStream

MAX_BODY_BYTES: Final = 64 * 1024 * 1024  # of one answer that is not streamed: embeddings of hundreds of texts
MAX_HELD_BYTES: Final = 96 * 1024 * 1024  # of all such answers that are being read
READ_AT_ONCE: Final = 16  # pieces that are passed on before they are read
_TOKENS: Final = (b"data: {", b"event: content_block_delta\n", b"event: response.output_text.delta\n")
JSON: Final = "application/json"
_OK: Final = 200
_LAST_OK: Final = 299
_NOT_IMPLEMENTED: Final = 501


class Passage(Protocol):
    """The way of an answer to its client, in the event loop and without waiting."""

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Take a piece of a stream."""

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Take an unstreamed answer, good or bad."""


class RelayReceiver(Receiver, Protocol):
    """A receiver that can be told of a token before it is read."""

    def advance(self) -> None:
        """Bytes have come, and the model has got further; what it has said follows."""


class HeldAnswers:
    """The bytes that are held of answers that come whole, of all engines together: memory is the process's."""

    def __init__(self, most_bytes: int = MAX_HELD_BYTES) -> None:
        self._most_bytes = most_bytes
        self.bytes = 0

    def __repr__(self) -> str:
        return f"<HeldAnswers {self.bytes} bytes>"

    def add(self, size: int) -> bool:
        """Hold so many bytes more; return whether there is room for them."""
        self.bytes += size
        return self.bytes <= self._most_bytes


HELD: Final = HeldAnswers()


class RelayExchange(Exchange):
    """The answer to one relayed request; what an engine refuses is passed on, and fails as well.

    An error that the engine tells in a stream of which nothing was passed on yet is kept back: its request may be
    asked again.
    """

    def __init__(
        self, request: bytes, receiver: RelayReceiver, finished: "asyncio.Future[None]", passage: Passage
    ) -> None:
        super().__init__(request, receiver, finished, stream=ChatStream(decode=decode_frame))
        self._relay_receiver = receiver
        self._passage = passage
        self._unread: list[bytes] = []
        self._body = bytearray()
        self._content_type = ""
        self._is_sized = False  # by a length or by chunks: then its end is told
        self._has_passed = False
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
            and body.startswith(_TOKENS)
            and body[-2:] == b"\n\n"
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
            self._take(body)
            return
        self._read(body)
        failure = self._stream.failure
        if failure is None or self._has_passed:
            self._has_passed = True
            self._passage.pass_frames(self._content_type, body)
        elif isinstance(failure, EngineRejected) and is_about_the_request(failure):
            # vLLM says so in a stream that it has begun with 200: to clients it is a refusal like any other.
            self._passage.pass_whole(failure.status, JSON, openai.encode_error(failure))
        if self._stream.is_over:
            self._settle()

    def _read(self, body: bytes = b"") -> None:
        """Read what has been passed on unread, and ``body`` after it."""
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

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._read()
        if not self.finished.done() and self._has_head and not self._is_stream and not self._is_sized:
            self._pass_whole()  # nothing else has told its end
        super().connection_lost(exc)

    def on_message_complete(self) -> None:
        """Take the end of the answer, as the protocol tells it."""
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
        elif self._stream.failure is None:  # of whatever kind it is: some know no last frame
            self.finished.set_result(None)

    def _take(self, body: bytes) -> None:
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
        if self._status <= _LAST_OK:
            self._passage.pass_whole(self._status, self._content_type, whole)
            for event in (*decode_body(account_of(whole)), Finished("")):
                self._receiver.receive(event)
            self.finished.set_result(None)
        else:
            error = openai.decode_error(self._status, self._headers, whole[:MAX_ERROR_BODY_BYTES])
            status = error.status if is_about_the_request(error) else self._status  # llama.cpp has 500 for some of them
            self._passage.pass_whole(status, self._content_type, whole)
            self._fail(error)

    def _reject(self) -> None:
        if self._status <= _LAST_OK:
            self._fail(TruncatedStream("the connection broke in the middle of the answer"))
            return
        self._fail(openai.decode_error(self._status, self._headers, bytes(self._error_body)))


def is_about_the_request(error: EngineRejected) -> bool:
    """Whether a refusal is of this request alone: what the engine does not do counts, beside what is wrong with it."""
    return error.is_about_the_request or error.status == _NOT_IMPLEMENTED

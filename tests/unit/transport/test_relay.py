"""Answers that are passed on unchanged, and the facts read from them on the way."""

import asyncio
import time

import msgspec
import pytest

from tests.harness.waiting import LIMIT_S
from transport.dialects.relayed import decode_body, decode_frame
from transport.errors import EngineError, EngineRejected, TruncatedStream
from transport.events import Advance, Event, Finished, PartialUsage, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from transport.relay import READ_AT_ONCE, RelayExchange
from workers.requests.generation import Generation

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'"usage": {"prompt_tokens": 7, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 5}}'
FRAMES = [
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n',
    b": ping\n\n",
    *(b'data: {"choices": [{"index": 0, "delta": {"content": "w%d "}}]}\n\n' % number for number in range(40)),
    b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], %b}\n\n' % USAGE,
    b"data: [DONE]\n\n",
]


class Passed:
    """A passage that keeps what went through."""

    def __init__(self) -> None:
        self.frames = b""
        self.whole: tuple[int, str, bytes] | None = None

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        assert content_type == "text/event-stream"
        self.frames += frames

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        self.whole = (status, content_type, body)


class Wire(asyncio.Transport):
    """A connection that accepts everything."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


def chunked(frames: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(frame), frame) for frame in frames)


def exchange() -> tuple[RelayExchange, Generation, Passed]:
    generation, passed = Generation(time.monotonic), Passed()
    made = RelayExchange(b"", generation, asyncio.get_running_loop().create_future(), passed)
    made.connection_made(Wire())
    return made, generation, passed


@pytest.mark.parametrize("size", [1, 7, 61, 240, 10_000])
async def test_any_division_passes_the_same_bytes(size: int) -> None:
    """However the bytes arrive, all pass unchanged, and the same facts are read."""
    made, generation, passed = exchange()
    wire = STREAM_HEAD + chunked(FRAMES) + b"0\r\n\r\n"
    for at in range(0, len(wire), size):
        made.data_received(wire[at : at + size])
    assert made.finished.result() is None
    assert passed.frames == b"".join(FRAMES)
    assert generation.text == "".join(f"w{number} " for number in range(40))
    assert (generation.finish_reason, generation.usage) == ("stop", Usage(7, 40, 5))


async def test_tokens_are_counted_at_once_and_read_a_few_at_a_time() -> None:
    """The watch sees each token when it arrives; its text is read within a bounded number of tokens."""
    made, generation, passed = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:1]))
    for number in range(READ_AT_ONCE):
        before = generation.last_progress_at
        made.data_received(chunked([FRAMES[2 + number]]))
        assert generation.last_progress_at > before
        assert passed.frames.endswith(FRAMES[2 + number])
    assert generation.text == ""
    made.data_received(chunked([FRAMES[2 + READ_AT_ONCE]]))
    assert generation.text == "".join(f"w{number} " for number in range(READ_AT_ONCE + 1))


@pytest.mark.parametrize("behind", [b"", b": bye\n\n"])
@pytest.mark.parametrize("between", [b"", FRAMES[3]])
async def test_a_stream_ends_with_done_whatever_comes_with_it(between: bytes, behind: bytes) -> None:
    """A server may leave its body open afterwards; the last token and [DONE] may come in one read."""
    made, generation, passed = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:1]))
    made.data_received(chunked([FRAMES[2]]))
    made.data_received(chunked([between + b"data: [DONE]\n\n" + behind]))
    assert made.finished.result() is None
    assert passed.frames.endswith(b"[DONE]\n\n" + behind)
    assert generation.text == ("w0 w1 " if between else "w0 ")


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=repr)
async def test_half_a_frame_is_never_passed_on(end: bytes) -> None:
    """Another engine can go on from whole frames; a long one that comes in many pieces costs its length once."""
    made, generation, passed = exchange()
    long = b"x" * 4_000_000
    frame = b'data: {"choices": [{"index": 0, "delta": {"content": "%b"}}]}' % long + end
    made.data_received(STREAM_HEAD + chunked(FRAMES[:1]))
    began_s = time.process_time()
    for at in range(0, len(frame) - 1, 8_192):
        made.data_received(chunked([frame[at : min(at + 8_192, len(frame) - 1)]]))
        assert passed.frames == FRAMES[0]
    made.data_received(chunked([frame[-1:]]))
    assert passed.frames == FRAMES[0] + frame
    made.data_received(chunked([FRAMES[2][:20]]))
    assert time.process_time() - began_s < LIMIT_S
    assert passed.frames == FRAMES[0] + frame
    assert generation.text == long.decode()


async def test_comments_are_no_progress() -> None:
    """A hung engine may still ping."""
    made, generation, passed = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:1]))
    before = generation.last_progress_at
    made.data_received(chunked([b": ping\n\n"]))
    assert (generation.last_progress_at, passed.frames[-8:]) == (before, b": ping\n\n")


async def test_a_first_error_is_kept_back_and_a_later_one_passes() -> None:
    """As long as no byte was passed on, another attempt is possible."""
    error = b'data: {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}}\n\n'
    made, _, passed = exchange()
    made.data_received(STREAM_HEAD + chunked([error]))
    assert passed.frames == b""
    with pytest.raises(EngineRejected, match="Compute error"):
        made.finished.result()
    made, _, passed = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:3]))
    made.data_received(chunked([error]))
    assert passed.frames.endswith(error)
    assert isinstance(made.finished.exception(), EngineRejected)


@pytest.mark.parametrize(("code", "is_refusal"), [(400, True), (404, True), (422, True), (429, False), (503, False)])
async def test_a_refusal_in_the_first_event_is_a_refusal(code: int, *, is_refusal: bool) -> None:
    """VLLM begins a stream with 200 before it examines a grammar.

    An event that may precede a refusal is no answer yet.
    """
    error = b'data: {"error": {"code": %d, "message": "bad grammar", "type": "BadRequestError"}}\n\n' % code
    made, _, passed = exchange()
    made.data_received(STREAM_HEAD + chunked([error]))
    assert passed.frames == b""
    assert isinstance(made.finished.exception(), EngineRejected)
    told = {"message": "bad grammar", "type": "BadRequestError", "param": None, "code": code}
    expected = (code, "application/json", msgspec.json.encode({"error": told}))
    assert passed.whole == (expected if is_refusal else None)
    made, _, passed = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:3]))
    made.data_received(chunked([error]))
    assert (passed.whole, passed.frames.endswith(error)) == (None, True), "in mid-stream it passes as it came"
    assert isinstance(made.finished.exception(), EngineRejected)


@pytest.mark.parametrize(
    ("words", "status"),
    [("'messages' is required", 400), ("image input is not supported - hint: give mmproj", 400), ("CUDA error", 500)],
)
async def test_an_error_that_an_engine_calls_its_own_may_be_the_requests(words: str, status: int) -> None:
    """llama.cpp answers 500 to some bad requests; other errors of an engine stay its own."""
    made, _, passed = exchange()
    body = b'{"error":{"code":500,"message":"%b","type":"server_error"}}' % words.encode()
    made.data_received(b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert passed.whole == (status, "application/json", body)
    error = made.finished.exception()
    assert isinstance(error, EngineRejected)
    assert error.is_about_the_request == (status == 400)


async def test_a_broken_stream_is_truncated() -> None:
    """Unread tokens count as well."""
    made, generation, _ = exchange()
    made.data_received(STREAM_HEAD + chunked(FRAMES[:1]))
    made.data_received(chunked(FRAMES[2:3]))
    made.connection_lost(ConnectionResetError())
    assert isinstance(made.finished.exception(), TruncatedStream)
    assert generation.text == "w0 "


@pytest.mark.parametrize(
    ("last", "is_whole"),
    [
        (b"", False),
        (b'data: {"choices": [{"index": 0, "delta": {"content": "b"}}]}\n\n', False),
        (b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n', True),
        (b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}\n\n', True),
        (b"data: [DONE]\n\n", True),
        (b'event: message_stop\ndata: {"type": "message_stop"}\n\n', True),
        (b'data: {"type": "response.incomplete", "response": {}}\n\n', True),
        (b'data: {"content": "", "stop": true}\n\n', True),
    ],
)
async def test_a_stream_without_a_final_event_is_truncated(last: bytes, *, is_whole: bool) -> None:
    """A proxy whose backend went away ends its chunks properly."""
    made, _, _ = exchange()
    made.data_received(STREAM_HEAD + chunked([FRAMES[0], FRAMES[2], *([last] if last else [])]) + b"0\r\n\r\n")
    assert (made.finished.exception() is None) == is_whole
    assert is_whole or isinstance(made.finished.exception(), TruncatedStream)


@pytest.mark.parametrize("is_marked", [True, False], ids=["chunks", "close"])
@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", FRAMES[-2][:-2], FRAMES[-2][:-1]], ids=repr)
async def test_a_last_frame_without_its_blank_line_passes(last: bytes, *, is_marked: bool) -> None:
    """Some servers end so; the client gets their last bytes too."""
    made, _, passed = exchange()
    frames = [FRAMES[0], FRAMES[2], last]
    if is_marked:
        made.data_received(STREAM_HEAD + chunked(frames) + b"0\r\n\r\n")
    else:
        made.data_received(STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"") + b"".join(frames))
        made.connection_lost(None)
    assert made.finished.result() is None
    assert passed.frames == b"".join(frames)


@pytest.mark.parametrize("is_marked", [True, False], ids=["chunks", "close"])
async def test_a_stream_that_ends_within_a_frame_passes_none_of_it(*, is_marked: bool) -> None:
    """Whether its end is marked or not, the next engine goes on after the last whole frame."""
    made, _, passed = exchange()
    frames = [FRAMES[0], FRAMES[2], FRAMES[3][:30]]
    made.data_received(STREAM_HEAD + chunked(frames) + (b"0\r\n\r\n" if is_marked else b""))
    if not is_marked:
        made.connection_lost(None)
    assert isinstance(made.finished.exception(), EngineError)
    assert passed.frames == b"".join(frames[:2])


@pytest.mark.parametrize(
    ("head", "is_whole"),
    [(b"Content-Length: 60\r\n", False), (b"Transfer-Encoding: chunked\r\n", False), (b"", True)],
)
async def test_half_a_body_is_no_answer(head: bytes, *, is_whole: bool) -> None:
    """A known length shows the break; without one the end of the connection is the end of the body."""
    made, _, passed = exchange()
    body = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}'
    sent = chunked([body]) if b"chunked" in head else body
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + head + b"\r\n" + sent)
    made.connection_lost(None)
    if is_whole:
        assert (made.finished.result(), passed.whole) == (None, (200, "application/json", body))
    else:
        assert isinstance(made.finished.exception(), EngineError)
        assert passed.whole is None


@pytest.mark.parametrize("body", [b"", b"<!doctype html>", b"ok", b'"text"'])
@pytest.mark.parametrize("kind", [b"application/json", b"text/html"])
async def test_a_success_without_a_document_is_no_answer(body: bytes, kind: bytes) -> None:
    """For example the page of a proxy, or of another program on the engine's port."""
    made, _, passed = exchange()
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body))
    assert isinstance(made.finished.exception(), EngineError)
    assert passed.whole is None


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n\n\n", b"\xef\xbb\xbf\r\n "])
async def test_a_document_may_follow_blanks_or_a_byte_order_mark(before: bytes) -> None:
    """RFC 8259 lets readers ignore them, and real servers send blanks while they work."""
    made, _, passed = exchange()
    body = before + b'{"choices": []}'
    made.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert (made.finished.result(), passed.whole) == (None, (200, "application/json", body))


async def test_a_refusal_is_passed_on_and_is_a_failure() -> None:
    """The client reads it, and blame judges it."""
    made, _, passed = exchange()
    body = b'{"error": {"code": 400, "message": "no", "type": "invalid_request_error"}}'
    made.data_received(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert passed.whole == (400, "application/json", body)
    error = made.finished.exception()
    assert isinstance(error, EngineRejected)
    assert (error.status, error.message) == (400, "no")


@pytest.mark.parametrize(
    ("frame", "events"),
    [
        (b'{"choices": [{"index": 1, "delta": {"content": "x"}}]}', [Advance()]),
        (b'{"choices": [{"index": 0, "text": "x"}]}', [TextDelta("x")]),
        (b'{"choices": [{"index": 0, "delta": {"reasoning_content": "x"}}]}', [ReasoningDelta("x")]),
        (b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}}]}', [ToolCallDelta(0, None, None, "")]),
        (b'{"type": "response.output_text.delta", "delta": "x"}', [TextDelta("x")]),
        (b'{"type": "response.reasoning_text.delta", "delta": "x"}', [ReasoningDelta("x")]),
        (b'{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}', [TextDelta("x")]),
        (b'{"type": "ping"}', []),
        (b'{"index": 0, "content": "x", "stop": false}', [TextDelta("x")]),
        (b'{"index": 0, "content": "", "stop": true}', [Finished("")]),
        (b'{"type": "message_stop"}', [Finished("")]),
        (
            b'{"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 2}}}',
            [Usage(3, 2, 0), Finished("")],
        ),
        (
            (
                b'{"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 7,'
                b' "cache_creation_input_tokens": 1, "output_tokens": 1}}}'
            ),
            [PartialUsage(11, None, 7)],
        ),
        (
            b'{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}}',
            [Advance(), PartialUsage(None, 5)],
        ),
        (
            b'{"type": "message_delta", "delta": {}, "usage": {"input_tokens": 3, "output_tokens": 5}}',
            [Advance(), Usage(3, 5, 0)],
        ),
        (b'{"type": "message_delta", "delta": {}, "usage": {"output_tokens": -5}}', [Advance()]),
        (b'{"choices": "what is this"}', [Advance()]),
        (b"[DONE", []),  # bytes alone are no progress
    ],
)
def test_frames_of_each_surface_are_read(frame: bytes, events: list[Event]) -> None:
    """A frame of any surface tells what the model does; an unreadable one counts as progress."""
    found: list[Event] = []
    assert decode_frame(frame, found) is any(type(event) is Finished for event in events)
    assert found == events


@pytest.mark.parametrize(
    "frame",
    [
        b'{"error": {"message": "broken"}}',
        b'{"type": "error", "error": {"type": "overloaded_error", "message": "broken"}}',
        b'{"type": "error", "message": "broken", "code": "server_error"}',
        b'{"type": "response.failed", "response": {"error": {"code": "server_error", "message": "broken"}}}',
    ],
)
def test_failures_of_each_surface_are_read(frame: bytes) -> None:
    """An error inside a 200 stream, in its four forms."""
    with pytest.raises(EngineRejected, match="broken"):
        decode_frame(frame, [])


def test_the_cost_of_a_whole_answer_is_read() -> None:
    """It is the usage of any surface; Anthropic counts cached tokens separately."""
    messages = b'{"usage": {"input_tokens": 3, "cache_read_input_tokens": 9, "output_tokens": 2}}'
    assert decode_body(messages) == [Usage(12, 2, 9)]
    assert decode_body(b"no JSON") == []


def test_an_answer_is_counted_by_its_pieces_until_its_engine_reports() -> None:
    """The number at the start of Messages counts no answer: one that is cut off costs what was received."""
    generation = Generation(time.monotonic)
    begin = b'{"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 0}}}'
    piece = b'{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}}'
    end = b'{"type": "message_delta", "delta": {}, "usage": {"output_tokens": 5}}'
    events: list[Event] = []
    for frame in (begin, piece, piece):
        decode_frame(frame, events)
    for event in events:
        generation.receive(event)
    assert (generation.usage, generation.seen, generation.prompt_tokens) == (None, Usage(3, 2, 0), 3)
    events.clear()
    decode_frame(end, events)
    for event in events:
        generation.receive(event)
    assert generation.usage == Usage(3, 5, 0)

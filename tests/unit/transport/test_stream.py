from pathlib import Path

import pytest

from transport.errors import EngineError, EngineRejected, MalformedFrame, TruncatedStream
from transport.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from transport.stream import ChatStream

WIRE = Path(__file__).parent / "wire"
TEXT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def read(chunks: list[bytes], *, tells_reason: bool = True) -> tuple[list[Event], EngineError | None]:
    """Return the events, and the failure of the stream."""
    stream = ChatStream(tells_reason=tells_reason)
    events = [event for chunk in chunks for event in stream.feed(chunk)] + stream.close()
    assert stream.is_complete == (stream.failure is None)
    return events, stream.failure


def events_of(chunks: list[bytes]) -> list[Event]:
    events, failure = read(chunks)
    assert failure is None
    return events


def test_a_captured_stream_gives_its_events_at_every_cut() -> None:
    """A real server's stream, cut in two at any byte, gives the same sequence of events."""
    wire = (WIRE / "llama_server_text.sse").read_bytes()
    whole = events_of([wire])
    kinds = [type(event) for event in whole]
    assert kinds[0] is PromptProgress
    assert kinds.count(TextDelta) >= 10
    assert kinds[-3:] == [Finished, Usage, Timings]
    assert "".join(event.text for event in whole if isinstance(event, TextDelta))
    for cut in range(len(wire)):
        assert events_of([wire[:cut], wire[cut:]]) == whole


@pytest.mark.parametrize(
    ("frame", "events"),
    [
        pytest.param(b'{"choices":[{"delta":{"content":"a"}}]}', [TextDelta("a")], id="text"),
        pytest.param(b'{"choices":[{"delta":{"reasoning_content":"a"}}]}', [ReasoningDelta("a")], id="reasoning"),
        pytest.param(b'{"choices":[{"delta":{"role":"assistant","content":null}}]}', [], id="a role alone"),
        pytest.param(b'{"choices":[{"delta":{"content":""}}]}', [], id="no text"),
        pytest.param(b'{"choices":[]}', [], id="no choice"),
        pytest.param(b'{"choices":[{"delta":{},"finish_reason":"length"}]}', [Finished("length")], id="finish"),
        pytest.param(b'{"choices":[{"delta":{"refusal":"No."}}]}', [RefusalDelta("No.")], id="a refusal"),
        pytest.param(
            b'{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"x","function":{"name":"f","arguments":"{"}}]}}]}',
            [ToolCallDelta(1, "x", "f", "{")],
            id="a tool call begins",
        ),
        pytest.param(
            b'{"choices":[{"delta":{"tool_calls":[{"index":1,"function":{"arguments":"}"}}]}}]}',
            [ToolCallDelta(1, None, None, "}")],
            id="a tool call goes on",
        ),
        pytest.param(
            b'{"choices":[{"delta":{}}],"prompt_progress":{"total":9,"cache":2,"processed":5,"time_ms":3}}',
            [PromptProgress(9, 2, 5, 3.0)],
            id="prompt progress",
        ),
        pytest.param(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}',
            [Usage(3, 4, 2)],
            id="usage",
        ),
        pytest.param(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}', [Usage(3, 4, 0)], id="usage, bare"
        ),
    ],
)
def test_each_field_is_its_event(frame: bytes, events: list[Event]) -> None:
    """The llama-server dialect, field by field; unknown fields are ignored."""
    found = events_of([b"data: " + frame + b"\n\n", STOP, DONE])
    assert found == [*events, Finished("stop")]


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (rb'{"choices":[{"delta":{"content":"a\ud83d"}}]}', "a\ufffd"),
        (rb'{"choices":[{"delta":{"content":"\ud83d\ude00 \\ud83d"}}]}', "\U0001f600 \\ud83d"),
        (b'{"choices":[{"delta":{"content":"a"},"logprobs":{"x":-Infinity}}]}', "a"),
        (b'{"choices":[{"index":"0","delta":{"content":"a"}}]}', "a"),
        (b'{"choices":[{"delta":{},"message":{"content":"a"}}]}', "a"),
        (b'{"choices":[{"delta":{},"text":"a"}]}', "a"),
        (b'{"choices":[{"delta":{"content":[{"type":"text","text":"a"}]}}]}', "a"),
    ],
)
def test_unusual_frames_that_other_clients_accept_are_read(frame: bytes, text: str) -> None:
    """Half a character, an invalid number, a message in place of a delta, and empty frames."""
    assert events_of([b"data: " + frame + b"\n\n", STOP, b"data:\n\n", b"data: [DONE] \n\n"]) == [
        TextDelta(text),
        Finished("stop"),
    ]


@pytest.mark.parametrize("reason", ["error", "abort", "internal_error", "timeout", "cancelled"])
def test_a_finish_reason_that_reports_a_failure_is_one(reason: str) -> None:
    """Half an answer is not complete because its server gives a reason."""
    end = b'data: {"choices":[{"delta":{},"finish_reason":"%s"}]}\n\n' % reason.encode()
    events, failure = read([TEXT + end + DONE])
    assert events == [TextDelta("hi")]
    assert isinstance(failure, EngineRejected)
    assert not failure.is_about_the_request


def test_errors_beside_choices_are_errors() -> None:
    """They may have any name."""
    frame = b'data: {"choices":[{"delta":{"content":"x"}}],"errors":[{"message":"no"}]}\n\n'
    events, failure = read([frame + DONE])
    assert (events, isinstance(failure, EngineRejected)) == ([], True)


@pytest.mark.parametrize("came", [b"", b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\n'])
@pytest.mark.parametrize("tells_reason", [True, False])
def test_done_alone_is_no_answer(came: bytes, tells_reason: bool) -> None:
    """Some servers answer so to a request that they refused."""
    assert isinstance(read([came + DONE], tells_reason=tells_reason)[1], TruncatedStream)


def test_done_after_words_ends_the_answer_of_a_server_without_reasons() -> None:
    """An engine of ours always gives a reason: without one the answer is half."""
    assert read([TEXT + DONE], tells_reason=False) == ([TextDelta("hi")], None)
    assert isinstance(read([TEXT + DONE])[1], TruncatedStream)
    thought = b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n'
    assert isinstance(read([thought + DONE], tells_reason=False)[1], TruncatedStream)


def test_data_after_done_is_ignored() -> None:
    """[DONE] is the end, whatever a server writes afterwards."""
    assert events_of([TEXT + STOP + DONE + TEXT + b"data: rubbish\n\n"]) == [TextDelta("hi"), Finished("stop")]


def test_an_end_after_the_finish_reason_is_complete() -> None:
    """Some servers close without [DONE], some without the last blank line."""
    assert events_of([TEXT, STOP]) == [TextDelta("hi"), Finished("stop")]
    assert events_of([TEXT, STOP.rstrip()]) == [TextDelta("hi"), Finished("stop")]


@pytest.mark.parametrize("wire", [b"", TEXT, TEXT + STOP[:20], b": ping\n\n"], ids=["nothing", "text", "half", "ping"])
def test_an_end_before_the_engine_finished_is_a_truncation(wire: bytes) -> None:
    """A cut-off stream is never taken for a short answer."""
    assert isinstance(read([wire])[1], TruncatedStream)


@pytest.mark.parametrize(
    "frame",
    [
        b"<html>",
        b"{",
        b"5",
        b'{"choices": 5}',
        b'{"choices":[{"delta":{"content":7}}]}',
        b'{"choices":"\xff"}',
        b"[" * 100_000,
    ],
)
def test_a_frame_of_another_form_is_malformed(frame: bytes) -> None:
    """The error shows the frame."""
    for cut in (0, 5, len(TEXT), len(TEXT) + 9):
        wire = TEXT + b"data: " + frame + b"\n\n" + TEXT
        events, failure = read([wire[:cut], wire[cut:]])
        assert events == [TextDelta("hi")]
        assert isinstance(failure, MalformedFrame)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (b'{"code":500,"message":"Compute error.","type":"server_error"}', 500, "Compute error."),
        (b'{"message":"no code"}', 500, "no code"),
        (b'"just text"', 500, "just text"),
        (b'{"code":"bad","message":"a word for a code"}', 500, "a word for a code"),
    ],
)
def test_an_error_inside_a_200_stream_is_a_rejection(error: bytes, status: int, message: str) -> None:
    """llama-server reports errors after the first token as data of the stream."""
    events, failure = read([TEXT + b'data: {"error":' + error + b"}\n\n" + TEXT])
    assert events == [TextDelta("hi")]
    assert isinstance(failure, EngineRejected)
    assert (failure.status, failure.message) == (status, message)

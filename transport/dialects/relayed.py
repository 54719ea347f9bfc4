"""The parts of a relayed answer that Roundhouse reads: the model's progress, and the cost.

One decoder reads the frames and bodies of all surfaces: OpenAI's chat, completions, embeddings and Responses,
Anthropic's Messages, and llama.cpp's own. A field means the same on each. Unknown fields are skipped, since the client
reads the answer; JSON of an unreadable form counts as progress.

Sources: OpenAI's and Anthropic's API references; llama.cpp, ``tools/server``; vLLM, ``entrypoints``, of 2026.
"""

import re
from typing import Final

import msgspec
from msgspec import Struct

from transport.dialects.lenient import failure_of
from transport.dialects.openai import (
    SHOWN_BYTES,
    TimingsDocument,
    add_partial_usage,
    add_timings,
    add_usage,
)
from transport.dialects.refusals import SERVER_ERROR, Refusal, refusal_in, rejection, tells_words
from transport.errors import UNDECODABLE, EngineRejected, UnreadableFrame
from transport.events import Advance, Event, Finished, PartialUsage, ReasoningDelta, TextDelta, ToolCallDelta

BEGIN: Final = "message_start"  # its count of answer tokens is only a start value
ENDS: Final = frozenset({"message_stop", "response.completed", "response.incomplete"})
FAILURES: Final = frozenset({"error", "response.failed"})
THOUGHTS: Final = frozenset({"response.reasoning_text.delta", "response.reasoning_summary_text.delta"})
SMALL_BODY_BYTES: Final = 64 * 1024
NEAR_BYTES: Final = 4096  # searched at either end of a large body for its account
_ACCOUNT: Final = re.compile(rb'"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}')  # with one level of details


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    text: str | None = None  # Anthropic's fields
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()


class _Choice(Struct, gc=False):
    index: int | None = 0
    delta: _Delta | None = None
    text: str | None = None  # from completions
    finish_reason: str | None = None


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None  # from Responses and Messages
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # from Messages, beside ``input_tokens``
    cache_creation_input_tokens: int | None = None  # from Messages, too


class _Answer(Struct, gc=False):
    usage: _Usage | None = None
    error: object = None


class _Words(Struct, gc=False):
    choices: list[_Choice] | None = None
    error: object = None
    type: str | None = None
    delta: _Delta | str | None = None
    content: object = None  # a text in llama.cpp's own form
    stop: object = None  # true in its last frame


class _Frame(_Words, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None
    response: _Answer | None = None
    message: _Answer | str | None = None


class _Body(Struct, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None


_NO_DELTA = _Delta()
_NO_CALLS: Final = frozenset({b"", b"null", b"[]"})
_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_words = msgspec.json.Decoder(_Words).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def decode_frame(frame: bytes, events: list[Event]) -> bool:
    """Add the events of one frame to ``events``; return whether the model has stopped with it.

    ``Finished`` with an empty reason ends a stream that knows no other end.

    Raises:
        UnreadableFrame: it is not JSON.
        EngineRejected: the engine reports an error inside the stream.
    """
    if not frame.startswith(b"{"):
        return False  # bytes alone are no progress
    read = _read(frame)
    if read is None:
        events.append(Advance())
        return False
    has_stopped = False
    for choice in read.choices or ():
        has_stopped |= _add_choice(choice, events)
    if read.type is not None:
        has_stopped |= _add_typed(read, read.type, events)
    elif read.error:
        raise _failure_of(read)
    elif read.choices is None:
        has_stopped = _add_native(read, frame, events)
    _add_cost(read.usage, read.timings, events)
    return has_stopped


def _read(frame: bytes) -> _Frame | None:
    """Decode a frame, without its accounts if they cannot be read; None if nothing can be."""
    try:
        return _decode_frame(frame)
    except UNDECODABLE:
        pass
    try:
        words = _decode_words(frame)
    except UNDECODABLE:
        _check_json(frame)
        return None
    return _Frame(**{name: getattr(words, name) for name in _Words.__struct_fields__})


def _check_json(frame: bytes) -> None:
    try:
        msgspec.json.decode(frame)
    except UNDECODABLE as error:
        raise UnreadableFrame(f"{error}: {frame[:SHOWN_BYTES]!r}") from error


def account_of(body: bytes) -> bytes:
    """Return a body, or only the account of a large one: decoding its vectors would hold the event loop.

    The account stands near the end or the beginning. A text cannot look like it: its quotes are escaped.
    """
    if len(body) <= SMALL_BODY_BYTES:
        return body
    for part in (body[-NEAR_BYTES:], body[:NEAR_BYTES]):
        at = part.rfind(b'"usage"')
        found = _ACCOUNT.match(part, at) if at >= 0 else None
        if found is not None:
            return b"{%b}" % found[0]
    return b"{}"


def decode_body(body: bytes) -> list[Event]:
    """Return the cost that an answer outside a stream reports; empty if it reports none."""
    events: list[Event] = []
    try:
        read = _decode_body(body)
    except UNDECODABLE:
        return events
    _add_cost(read.usage, read.timings, events)
    return events


def _add_choice(choice: _Choice, events: list[Event]) -> bool:
    delta = choice.delta or _NO_DELTA
    text = delta.content or choice.text
    reasoning = delta.reasoning or delta.reasoning_content
    if choice.index or not (text or reasoning):
        if not choice.index and _has_calls(delta):
            events.append(ToolCallDelta(0, None, None, ""))  # its words are for the client alone
        elif choice.delta is not None or choice.text is not None:
            events.append(Advance())  # another answer of the same request, a role
    elif text:
        events.append(TextDelta(text))
    elif reasoning:
        events.append(ReasoningDelta(reasoning))
    if choice.finish_reason and not choice.index:
        failure = failure_of(choice.finish_reason)
        if failure is not None:
            raise failure
        events.append(Finished(choice.finish_reason))
        return True
    return False


def _has_calls(delta: _Delta) -> bool:
    return not _NO_CALLS.issuperset((bytes(delta.tool_calls), bytes(delta.function_call)))


def _add_native(read: _Frame, frame: bytes, events: list[Event]) -> bool:
    """Add the events of a frame of llama.cpp's own surface; a frame of no surface may be an error."""
    is_of_none = read.content is None and read.stop is None and read.usage is None and read.timings is None
    if is_of_none and tells_words(frame):
        refusal = refusal_in(msgspec.json.decode(frame))
        if refusal is not None:
            raise rejection(refusal, SERVER_ERROR, None)
    if isinstance(read.content, str) and read.content:
        events.append(TextDelta(read.content))
    if read.stop is True:
        events.append(Finished(""))
        return True
    return False


def _add_typed(read: _Frame, kind: str, events: list[Event]) -> bool:
    """Add the events of a frame of Responses or Messages, whose frames name their kinds."""
    if kind in FAILURES:
        raise _failure_of(read)
    delta = read.delta
    if isinstance(delta, str):
        _add_words(kind, delta, events)
    elif delta is not None:
        _add_block(delta, events)
    inner = read.response or (read.message if isinstance(read.message, _Answer) else None)
    usage = inner.usage if inner is not None else None
    if usage is not None and kind == BEGIN:
        prompt = _prompt_tokens(usage)
        add_partial_usage(PartialUsage(prompt, None, min(usage.cache_read_input_tokens or 0, prompt)), events)
    else:
        _add_cost(usage, None, events)
    if kind in ENDS:
        events.append(Finished(""))
        return True
    return False


def _add_words(kind: str, words: str, events: list[Event]) -> None:
    """Add a piece of Responses."""
    if kind == "response.output_text.delta" and words:
        events.append(TextDelta(words))
    elif kind in THOUGHTS and words:
        events.append(ReasoningDelta(words))
    elif kind == "response.function_call_arguments.delta":
        events.append(ToolCallDelta(0, None, None, ""))
    else:
        events.append(Advance())


def _add_block(delta: _Delta, events: list[Event]) -> None:
    """Add a piece of Messages."""
    if delta.text:
        events.append(TextDelta(delta.text))
    elif delta.thinking:
        events.append(ReasoningDelta(delta.thinking))
    elif delta.partial_json:
        events.append(ToolCallDelta(0, None, None, ""))
    else:
        events.append(Advance())


def _failure_of(read: _Frame) -> EngineRejected:
    error = read.error or (read.response.error if read.response is not None else None)
    refusal = refusal_in({"error": error, "message": read.message if isinstance(read.message, str) else None})
    return rejection(refusal or Refusal(message="the engine says that it has failed"), SERVER_ERROR, None)


def _add_cost(usage: _Usage | None, timings: TimingsDocument | None, events: list[Event]) -> None:
    if timings is not None:
        add_timings(timings, events)
    if usage is not None and (usage.prompt_tokens is not None or usage.input_tokens is not None):
        details = usage.prompt_tokens_details or usage.input_tokens_details
        add_usage(
            _prompt_tokens(usage),
            usage.completion_tokens or usage.output_tokens or 0,
            (details.cached_tokens if details else None) or usage.cache_read_input_tokens or 0,
            events,
        )
    elif usage is not None and usage.output_tokens is not None:
        add_partial_usage(PartialUsage(None, usage.output_tokens), events)
    elif timings is not None and usage is None:
        add_usage(timings.prompt_n + timings.cache_n, timings.predicted_n, timings.cache_n, events)


def _prompt_tokens(usage: _Usage) -> int:
    apart = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return (usage.prompt_tokens or usage.input_tokens or 0) + apart

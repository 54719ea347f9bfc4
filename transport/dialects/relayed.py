"""The parts of a relayed answer that Roundhouse reads: the model's progress, and the cost.

One decoder reads the frames and bodies of all surfaces: OpenAI's chat, completions, embeddings and Responses, and
Anthropic's Messages. A field that is there means the same on each. What it does not know it passes over, since another
reads the answer; a frame that it cannot read at all is taken for progress.

Sources: OpenAI's and Anthropic's API references; llama.cpp, ``tools/server``; vLLM, ``entrypoints``, of 2026.
"""

import re
from typing import Final

import msgspec
from msgspec import Struct

from transport.dialects.openai import (
    UNDECODABLE,
    ErrorDocument,
    TimingsDocument,
    add_timings,
    add_usage,
    rejection,
)
from transport.errors import EngineRejected
from transport.events import Advance, Event, Finished, ReasoningDelta, TextDelta

ENDS: Final = frozenset({"message_stop", "response.completed", "response.incomplete"})
FAILURES: Final = frozenset({"error", "response.failed"})
SMALL_BODY_BYTES: Final = 64 * 1024
NEAR_BYTES: Final = 4096  # of either end of a large body, where its account stands
_ACCOUNT: Final = re.compile(rb'"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}')  # with details of one level
_SERVER_ERROR: Final = 500


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    text: str | None = None  # Anthropic's
    stop_reason: str | None = None


class _Choice(Struct, gc=False):
    index: int | None = 0
    delta: _Delta | None = None
    text: str | None = None  # of completions
    finish_reason: str | None = None


class _Details(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None  # of Responses and Messages
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # of Messages, beside ``input_tokens``


class _Answer(Struct, gc=False):
    usage: _Usage | None = None
    error: ErrorDocument | str | None = None


class _Words(Struct, gc=False):
    choices: list[_Choice] | None = None
    error: ErrorDocument | str | None = None
    type: str | None = None
    delta: _Delta | str | None = None


class _Frame(_Words, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None
    response: _Answer | None = None
    message: _Answer | str | None = None


class _Body(Struct, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None


_NO_DELTA = _Delta()
_decode_frame = msgspec.json.Decoder(_Frame).decode
_decode_words = msgspec.json.Decoder(_Words).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def decode_frame(frame: bytes, events: list[Event]) -> bool:
    """Add the events of one frame to ``events``; return whether the model has stopped with it.

    ``Finished`` with an empty reason ends a stream that knows no other end.

    Raises:
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
    elif read.error is not None:
        raise rejection(read.error, _SERVER_ERROR, None)
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
        return None
    return _Frame(choices=words.choices, error=words.error, type=words.type, delta=words.delta)


def account_of(body: bytes) -> bytes:
    """Return a body, or of a large one only its account: vectors hold the event loop while they are passed over.

    The account stands at its end or its beginning. Within a text its quotes would be escaped.
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
    """Return the cost that an unstreamed answer reports; nothing if it reports none."""
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
        if choice.delta is not None or choice.text is not None:
            events.append(Advance())  # another answer of the same request, a call's arguments, a role
    elif text:
        events.append(TextDelta(text))
    elif reasoning:
        events.append(ReasoningDelta(reasoning))
    if choice.finish_reason and not choice.index:
        events.append(Finished(choice.finish_reason))
        return True
    return False


def _add_typed(read: _Frame, kind: str, events: list[Event]) -> bool:
    """Add what a frame of Responses or Messages says, which name their kinds."""
    if kind in FAILURES:
        raise _failure_of(read)
    delta = read.delta
    text = delta if isinstance(delta, str) else delta.text if delta is not None else None
    if text and kind in ("response.output_text.delta", "content_block_delta"):
        events.append(TextDelta(text))
    elif delta is not None:
        events.append(Advance())
    inner = read.response or (read.message if isinstance(read.message, _Answer) else None)
    if inner is not None:
        _add_cost(inner.usage, None, events)
    if kind in ENDS:
        events.append(Finished(""))
        return True
    return False


def _failure_of(read: _Frame) -> EngineRejected:
    error = read.error or (read.response.error if read.response is not None else None)
    if error is None:
        error = read.message if isinstance(read.message, str) else "the engine says that it has failed"
    return rejection(error, _SERVER_ERROR, None)


def _add_cost(usage: _Usage | None, timings: TimingsDocument | None, events: list[Event]) -> None:
    if timings is not None:
        add_timings(timings, events)
    if usage is not None and (usage.prompt_tokens is not None or usage.input_tokens is not None):
        details = usage.prompt_tokens_details or usage.input_tokens_details
        apart = usage.cache_read_input_tokens or 0
        add_usage(
            (usage.prompt_tokens or usage.input_tokens or 0) + apart,
            usage.completion_tokens or usage.output_tokens or 0,
            (details.cached_tokens if details else None) or apart,
            events,
        )
    elif timings is not None and usage is None:
        add_usage(timings.prompt_n + timings.cache_n, timings.predicted_n, timings.cache_n, events)

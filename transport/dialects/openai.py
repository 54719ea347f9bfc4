"""The OpenAI chat API as all engines share it: requests to bodies, frames to events.

Engines add their own fields to frames (llama.cpp ``timings`` and ``prompt_progress``, vLLM ``reasoning``). A field
means the same from every server, so one decoder reads them all. Sources: OpenAI's API reference; llama.cpp,
``tools/server``, builds of 2026; vLLM 0.32 and 0.33, ``entrypoints/openai``.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import Struct

from transport.dialects.lenient import failure_of, read_answer, thoughts_of
from transport.dialects.refusals import tells_words
from transport.errors import UNDECODABLE, UnreadableFrame
from transport.events import (
    Event,
    Finished,
    PartialUsage,
    PromptProgress,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from transport.request import BegunAnswer, ChatRequest, Constraint, Message, Thought, ToolCall
from transport.sse import MOST_OBJECTS

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
MODELS_PATH: Final = "/v1/models"
DONE: Final = b"[DONE]"
MOST_TOKENS: Final = 2**31 - 1  # per request; a larger or negative number is no count
MOST_MS: Final = 1e12
SHOWN_BYTES: Final = 200  # shown of an unreadable frame


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct, gc=False):
    index: int | None = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # older name of ``reasoning``
    tool_calls: list[_ToolCall] | None = None
    refusal: str | None = None
    reasoning_details: object = None
    function_call: object = None  # older form of ``tool_calls``, with one call


class Choice(Struct, gc=False):
    """One answer of a frame."""

    index: int | None = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    error: object = None
    message: object = None  # some servers send it, or a text, instead of a delta
    text: str | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class TimingsDocument(Struct, gc=False):
    """llama.cpp's timings of its own work."""

    prompt_n: int = 0
    prompt_ms: float = 0.0
    cache_n: int = 0
    predicted_n: int = 0
    predicted_ms: float = 0.0


class ProgressDocument(Struct, gc=False):
    """llama.cpp's progress with a prompt."""

    total: int
    processed: int
    cache: int = 0
    time_ms: float = 0.0


class _Accounts(Struct, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None
    prompt_progress: ProgressDocument | None = None


class Chunk(_Accounts, gc=False):
    """One frame."""

    choices: Sequence[Choice] | None = None
    error: object = None
    errors: object = None


# Half of a letter that JSON escapes as two surrogates; escaped backslashes and whole letters stay.
_HALVES: Final = re.compile(
    rb"(?P<whole>\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
GO_ON: Final[Mapping[str, object]] = {"continue_final_message": True, "add_generation_prompt": False}
_OTHER: Final = Choice(delta=_Delta())  # an answer that is not read
_decode_chunk = msgspec.json.Decoder(Chunk).decode


def body_of(request: ChatRequest) -> dict[str, object]:
    """Return the body that every engine accepts: the caller's parameters, overridden by ours."""
    body: dict[str, object] = dict(request.params)
    body["model"] = request.model
    body["messages"] = request.posted or [message_document(message) for message in request.messages]
    body.pop("tools", None)  # ours, even if there are none
    if request.tools:
        body["tools"] = request.tools
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return body


def respond_in_format(constraint: Constraint) -> Mapping[str, object] | None:
    """Return OpenAI's ``response_format``; None if it cannot express the constraint.

    It only knows JSON: a choice comes as a string in quotes.
    """
    schema = constraint.json_schema
    if constraint.choices:
        schema = {"type": "string", "enum": list(constraint.choices)}
    if schema is None or constraint.thought is not Thought.NONE:
        return None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def decode(frame: bytes, events: list[Event], read: Callable[[bytes], Chunk] = _decode_chunk) -> bool:
    """Add the events of one frame, several or none, to ``events``; return whether the model has stopped with it.

    ``read`` decodes the frame.

    Raises:
        UnreadableFrame: it is neither an answer nor an error.
        EngineRejected: the engine reports an error inside the stream.
    """
    try:
        chunk = read(frame)
    except UNDECODABLE:
        return decode_whole(frame, events)
    choices, has_stopped = chunk.choices, False
    if choices and not (chunk.error or chunk.errors):
        choice = choices[0]
        if choice.index:  # the caller asked for n > 1; a turn has one answer
            choice = next((each for each in choices if not each.index), _OTHER)
        delta = choice.delta
        if delta is None or choice.error or choice.message or choice.text or delta.function_call:
            return decode_whole(frame, events)
        has_stopped = _add_choice(choice, delta, events)
    elif chunk.error or chunk.errors or not (chunk.usage or chunk.timings or chunk.prompt_progress):
        return tells_words(frame) and decode_whole(frame, events)
    if chunk.usage is not None or chunk.timings is not None or chunk.prompt_progress is not None:
        _add_accounts(chunk, events)
    return has_stopped


def decode_whole(document: bytes, events: list[Event]) -> bool:
    """Add the events of a frame in any form, or of a whole answer; return whether the model has stopped.

    Raises:
        UnreadableFrame: it is neither an answer nor an error.
        EngineRejected: the engine reports an error.
    """
    try:
        read = _decoded(document)
        has_stopped = read_answer(read, events)
    except (*UNDECODABLE, ValueError) as error:
        raise UnreadableFrame(f"{error}: {document[:SHOWN_BYTES]!r}") from error
    for name in _Accounts.__struct_fields__:
        with suppress(msgspec.ValidationError):  # an unreadable account is skipped
            _add_accounts(msgspec.convert({name: read.get(name)}, _Accounts, strict=False), events)
    return has_stopped


def _decoded(document: bytes) -> Any:  # noqa: ANN401 - JSON
    """Decode JSON, and the invalid JSON that Python writes: NaN, and half of a letter."""
    if document.count(b"{") + document.count(b"[") > MOST_OBJECTS:
        raise UnreadableFrame(f"more than {MOST_OBJECTS} objects")
    try:
        return msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(_HALVES.sub(lambda found: found["whole"] or rb"\ufffd", document).decode())


def _add_accounts(chunk: _Accounts, events: list[Event]) -> None:
    if chunk.prompt_progress is not None:
        add_progress(chunk.prompt_progress, events)
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        add_usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached, events)
    if chunk.timings is not None:
        add_timings(chunk.timings, events)


def add_usage(prompt: int, completion: int, cached: int, events: list[Event]) -> None:
    """Add the tokens that a request cost; impossible numbers are skipped.

    The numbers go into sums of 64 bits, and a key pays by them.
    """
    if 0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS:
        events.append(Usage(prompt, completion, min(max(cached, 0), prompt)))


def add_partial_usage(event: PartialUsage, events: list[Event]) -> None:
    """Add the tokens of a prompt or an answer, reported apart; impossible numbers are skipped."""
    if 0 <= (event.prompt_tokens or event.completion_tokens or 0) <= MOST_TOKENS and event.cached_tokens >= 0:
        events.append(event)


def add_timings(given: TimingsDocument, events: list[Event]) -> None:
    """Add an engine's account of its work; impossible numbers are skipped."""
    counts = (given.prompt_n, given.cache_n, given.predicted_n)
    if min(counts) >= 0 and max(counts) <= MOST_TOKENS and _are_times(given.prompt_ms, given.predicted_ms):
        events.append(Timings(given.prompt_n, given.prompt_ms, given.cache_n, given.predicted_n, given.predicted_ms))


def add_progress(given: ProgressDocument, events: list[Event]) -> None:
    """Add the progress with a prompt; impossible numbers are skipped."""
    if 0 <= given.processed <= MOST_TOKENS and 0 <= given.total <= MOST_TOKENS and _are_times(given.time_ms):
        cached = min(max(given.cache, 0), given.processed)
        events.append(PromptProgress(given.total, cached, given.processed, given.time_ms))


def _are_times(*milliseconds: float) -> bool:
    return all(0 <= each <= MOST_MS for each in milliseconds)


def ask_to_go_on(body: dict[str, object], begun: BegunAnswer) -> None:
    """Add the beginning of an answer to a chat's body, as the model's own message that goes on."""
    thought = {"reasoning_content": begun.reasoning} if begun.reasoning else {}
    messages = body["messages"]
    assert isinstance(messages, list)  # noqa: S101 - a chat has them
    body["messages"] = [*messages, {"role": "assistant", "content": begun.text, **thought}]
    body |= GO_ON


def call_document(call: ToolCall) -> dict[str, object]:
    """Return a call as chats have it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def message_document(message: Message) -> dict[str, object]:
    """Return a message as it is sent to an engine."""
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = [call_document(call) for call in message.calls]
    if message.call_id is not None:
        fields["tool_call_id"] = message.call_id
    return fields


def _add_choice(choice: Choice, delta: _Delta, events: list[Event]) -> bool:
    if delta.content:
        events.append(TextDelta(delta.content))
    reasoning = delta.reasoning or delta.reasoning_content
    if not reasoning and delta.reasoning_details:
        reasoning = thoughts_of(delta.reasoning_details)
    if reasoning:
        events.append(ReasoningDelta(reasoning))
    if delta.refusal:
        events.append(RefusalDelta(delta.refusal))
    if delta.tool_calls:
        events.extend(
            ToolCallDelta(call.index or 0, call.id, call.function.name, call.function.arguments or "")
            for call in delta.tool_calls
        )
    if choice.finish_reason:
        failure = failure_of(choice.finish_reason)
        if failure is not None:
            raise failure
        events.append(Finished(choice.finish_reason))
        return True
    return False

"""The OpenAI chat API as all engines share it: requests to bodies, frames to events, answers to errors.

Engines add fields of their own to frames (llama.cpp ``timings`` and ``prompt_progress``, vLLM ``reasoning``). A field
that is there means the same from every server, so one decoder reads them all. Sources: OpenAI's API reference;
llama.cpp, ``tools/server``, builds of 2026; vLLM 0.32 and 0.33, ``entrypoints/openai``.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from transport.errors import CacheFull, ContextOverflow, EngineOverloaded, EngineRejected, MalformedFrame
from transport.events import (
    Event,
    Finished,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from transport.request import ChatRequest, Constraint, Message, Thought

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
MODELS_PATH: Final = "/v1/models"
DONE: Final = b"[DONE]"
OVERFLOW_TYPE: Final = "exceed_context_size_error"  # llama.cpp
OVERFLOW_CODE: Final = "context_length_exceeded"  # OpenAI
OVERFLOW_WORDS: Final = "maximum context length"  # vLLM, which has no word for it alone
FULL_WORDS: Final = "Context size has been exceeded"  # llama.cpp, of the cache that its slots share
# What llama.cpp answers 500 to, and is the request's: its own body has no messages, or holds what its model cannot see.
CLIENTS_FAULTS: Final = ("' is required", "input is not supported")
_BAD: Final = 400
_TOO_MANY: Final = 429
_UNAVAILABLE: Final = 503
_SERVER_ERROR: Final = 500
UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # msgspec raises all three
MOST_TOKENS: Final = 2**31 - 1  # of one request; what is more, or less than none, is no count
MOST_MS: Final = 1e12
MAX_ERROR_CHARS: Final = 4 * 1024  # of an engine's words for what is wrong
MAX_TYPE_CHARS: Final = 200
MAX_RETRY_DIGITS: Final = 9
_LEAST_STATUS, _MOST_STATUS = 100, 599


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
    reasoning_content: str | None = None  # the older name of the same
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct, gc=False):
    index: int | None = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class TimingsDocument(Struct, gc=False):
    """The timings that llama.cpp tells of its own work."""

    prompt_n: int = 0
    prompt_ms: float = 0.0
    cache_n: int = 0
    predicted_n: int = 0
    predicted_ms: float = 0.0


class ProgressDocument(Struct, gc=False):
    """The progress of llama.cpp with a prompt."""

    total: int
    processed: int
    cache: int = 0
    time_ms: float = 0.0


class ErrorDocument(Struct, gc=False):
    """An error as a body or a frame tells it."""

    code: int | str | None = None
    message: str = ""
    type: str = ""


class _Words(Struct, gc=False):
    choices: list[_Choice] | None = None
    error: ErrorDocument | str | None = None


class _Chunk(_Words, gc=False):
    usage: _Usage | None = None
    timings: TimingsDocument | None = None
    prompt_progress: ProgressDocument | None = None


class _ErrorBody(Struct, gc=False):
    error: ErrorDocument | str


_NO_DELTA = _Delta()
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_words = msgspec.json.Decoder(_Words).decode
_decode_error_body = msgspec.json.Decoder(_ErrorBody).decode


def body_of(request: ChatRequest) -> dict[str, object]:
    """Return the body as every engine takes it: the caller's parameters, then ours, which win."""
    body: dict[str, object] = dict(request.params)
    body["model"] = request.model
    body["messages"] = [message_document(message) for message in request.messages]
    body.pop("tools", None)  # ours, also when there are none
    if request.tools:
        body["tools"] = request.tools
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return body


def respond_in_format(constraint: Constraint) -> Mapping[str, object] | None:
    """Return OpenAI's ``response_format``; None where it cannot say the constraint.

    It can only speak of JSON: a choice comes as a string in quotes.
    """
    schema = constraint.json_schema
    if constraint.choices:
        schema = {"type": "string", "enum": list(constraint.choices)}
    if schema is None or constraint.thought is not Thought.NONE:
        return None
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def decode(frame: bytes, events: list[Event]) -> bool:
    """Add the events of one frame to ``events``, several or none; return whether the model has stopped with it.

    Raises:
        MalformedFrame: not the JSON of this dialect.
        EngineRejected: the engine reports an error inside the stream.
    """
    try:
        chunk = _decode_chunk(frame)
    except UNDECODABLE as error:
        chunk = _without_accounts(frame, error)
    if chunk.error is not None:
        raise rejection(chunk.error, _SERVER_ERROR, None)
    has_stopped = _add_choice(chunk.choices[0], events) if chunk.choices else False
    if chunk.prompt_progress is not None:
        add_progress(chunk.prompt_progress, events)
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        add_usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached, events)
    if chunk.timings is not None:
        add_timings(chunk.timings, events)
    return has_stopped


def add_usage(prompt: int, completion: int, cached: int, events: list[Event]) -> None:
    """Add what a request cost, in tokens; an account that cannot be is passed over, as if it had not been told.

    Its numbers go into sums of 64 bits, and a key pays by them.
    """
    if 0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS:
        events.append(Usage(prompt, completion, min(max(cached, 0), prompt)))


def add_timings(told: TimingsDocument, events: list[Event]) -> None:
    """Add an engine's account of its work, unless it cannot be."""
    counts = (told.prompt_n, told.cache_n, told.predicted_n)
    if min(counts) >= 0 and max(counts) <= MOST_TOKENS and _are_times(told.prompt_ms, told.predicted_ms):
        events.append(Timings(told.prompt_n, told.prompt_ms, told.cache_n, told.predicted_n, told.predicted_ms))


def add_progress(told: ProgressDocument, events: list[Event]) -> None:
    """Add how far a prompt has been read, unless that cannot be."""
    if 0 <= told.processed <= MOST_TOKENS and 0 <= told.total <= MOST_TOKENS and _are_times(told.time_ms):
        cached = min(max(told.cache, 0), told.processed)
        events.append(PromptProgress(told.total, cached, told.processed, told.time_ms))


def _are_times(*milliseconds: float) -> bool:
    return all(0 <= each <= MOST_MS for each in milliseconds)


def _without_accounts(frame: bytes, error: Exception) -> _Chunk:
    """Decode a frame without its accounts, one of which cannot be read."""
    try:
        words = _decode_words(frame)
    except UNDECODABLE:
        raise MalformedFrame(f"{error}: {frame[:200]!r}") from error
    return _Chunk(choices=words.choices, error=words.error)


def decode_error(status: int, headers: Mapping[str, str], body: bytes) -> EngineRejected:
    """Return the error that an answer other than a 200 stream stands for, with any body."""
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after[:MAX_RETRY_DIGITS]) if retry_after.isdecimal() else None
    try:
        error = _decode_error_body(body).error
    except UNDECODABLE:
        error = ErrorDocument(message=body[:500].decode("utf-8", "replace").strip() or "no body")
    return rejection(error, status, retry_after_s)


def encode_error(error: EngineRejected) -> bytes:
    """Return a refusal as an engine of OpenAI's surface answers it."""
    told = {
        "message": error.message,
        "type": error.kind or "invalid_request_error",
        "param": None,
        "code": error.status,
    }
    return msgspec.json.encode({"error": told})


def message_document(message: Message) -> dict[str, object]:
    """Return a message as it goes to an engine."""
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    if message.call_id is not None:
        fields["tool_call_id"] = message.call_id
    return fields


def _add_choice(choice: _Choice, events: list[Event]) -> bool:
    if choice.index:
        return False  # a caller's n > 1: one answer is what a turn has
    delta = choice.delta or _NO_DELTA
    if delta.content:
        events.append(TextDelta(delta.content))
    reasoning = delta.reasoning or delta.reasoning_content
    if reasoning:
        events.append(ReasoningDelta(reasoning))
    if delta.tool_calls:
        events.extend(
            ToolCallDelta(call.index or 0, call.id, call.function.name, call.function.arguments or "")
            for call in delta.tool_calls
        )
    if choice.finish_reason:
        events.append(Finished(choice.finish_reason))
        return True
    return False


def rejection(failure: ErrorDocument | str, status: int, retry_after_s: float | None) -> EngineRejected:
    """Return the error that an engine's own words stand for; ``status`` where they name none."""
    error = ErrorDocument(message=failure) if isinstance(failure, str) else failure
    error.message, error.type = error.message[:MAX_ERROR_CHARS], error.type[:MAX_TYPE_CHARS]
    if isinstance(error.code, int) and _LEAST_STATUS <= error.code <= _MOST_STATUS:
        status = error.code
    if status == _SERVER_ERROR and any(words in error.message for words in CLIENTS_FAULTS):
        status = _BAD
    if (
        error.type == OVERFLOW_TYPE
        or error.code == OVERFLOW_CODE
        or (status == _BAD and OVERFLOW_WORDS in error.message)
    ):
        return ContextOverflow(status, error.type, error.message)
    if status == _SERVER_ERROR and FULL_WORDS in error.message:
        return CacheFull(status, error.type, error.message)
    if status in (_TOO_MANY, _UNAVAILABLE):
        return EngineOverloaded(status, error.type, error.message, retry_after_s)
    return EngineRejected(status, error.type, error.message)

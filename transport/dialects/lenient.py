"""Frames and whole answers in other forms than OpenAI's, read for their plain meaning.

Content and thoughts come in parts, arguments as objects, ids as numbers, null for nothing, a message instead of a
delta, calls as the older ``function_call``. The token path decodes OpenAI's own form (``openai.py``) and leaves frames
in any other form to this module.

Sources: recorded streams of some thirty servers; Mistral, TGI, OpenRouter and SGLang, of 2026.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from transport.dialects.refusals import MOST_NESTED, SERVER_ERROR, refusal_in, rejection
from transport.errors import EngineRejected, UnreadableFrame
from transport.events import Event, Finished, ReasoningDelta, RefusalDelta, TextDelta, ToolCallDelta

# Finish reasons that are the engine's failures, from vLLM, SGLang, DeepSeek, Z.ai, OpenRouter and Gemini.
FAILED: Final = frozenset(
    {"error", "internal_error", "server_error", "engine_error", "unknown_error", "network_error", "failed", "failure"}
    | {
        "abort",
        "aborted",
        "cancelled",
        "canceled",
        "timeout",
        "insufficient_system_resource",
        "malformed_function_call",
    }
)
_THOUGHTS: Final = ("reasoning", "reasoning_content", "thinking", "thought", "summary")
_TEXTS: Final = ("text", "content")
_SILENT: Final = frozenset({"reference", "image_url", "image", "audio", "file", "document_url", "reasoning.encrypted"})


def read_answer(document: object, events: list[Event]) -> bool:
    """Add the events of one decoded frame or whole answer; return whether the model has stopped with it.

    Raises:
        EngineRejected: it is an error.
        UnreadableFrame: it is neither an answer nor an error.
    """
    refusal = refusal_in(document)
    if refusal is not None:
        raise rejection(refusal, SERVER_ERROR, None)
    if not isinstance(document, Mapping):
        raise UnreadableFrame(f"it is no object: {_shown(document)}")
    choices = document.get("choices")
    if choices is None:
        return False
    if not isinstance(choices, list):
        raise UnreadableFrame(f"its choices are no list: {_shown(choices)}")
    first = next((each for each in choices if isinstance(each, Mapping) and str(each.get("index") or 0) == "0"), None)
    return first is not None and _read_choice(first, events)


def failure_of(reason: str) -> EngineRejected | None:
    """Return the failure that a finish reason stands for; None if the model stopped by itself."""
    if reason.casefold() not in FAILED:
        return None
    return EngineRejected(SERVER_ERROR, reason, f"the server broke the answer off: finish_reason {reason}")


def thoughts_of(details: object) -> str:
    """Return the thoughts in ``reasoning_details`` or another list of parts."""
    return "".join(_texts_in(details))


def _read_choice(choice: Mapping[str, object], events: list[Event]) -> bool:
    refusal = refusal_in({"error": choice["error"]}) if choice.get("error") else None
    if refusal is not None:
        raise rejection(refusal, SERVER_ERROR, None)
    delta = choice.get("delta") or choice.get("message") or {}
    if not isinstance(delta, Mapping):
        raise UnreadableFrame(f"its delta is no object: {_shown(delta)}")
    thought = next((text for name in _THOUGHTS if (text := "".join(_texts_in(delta.get(name))))), "")
    thought = thought or thoughts_of(delta.get("reasoning_details"))
    if thought:
        events.append(ReasoningDelta(thought))
    _read_content(delta.get("content") if "content" in delta else choice.get("text"), events)
    refused = delta.get("refusal")
    if isinstance(refused, str) and refused:
        events.append(RefusalDelta(refused))
    _read_calls(delta, events)
    return _read_end(choice.get("finish_reason"), events)


def _read_content(content: object, events: list[Event]) -> None:
    if isinstance(content, Mapping):
        content = [content]
    if content is None or content == "":
        return
    if isinstance(content, str):
        events.append(TextDelta(content))
        return
    if not isinstance(content, list):
        raise UnreadableFrame(f"its content is no text: {_shown(content)}")
    for part in content:
        kind = str(part.get("type", "")) if isinstance(part, Mapping) else ""
        text = "".join(_texts_in(part))
        if not text or kind in _SILENT:
            continue
        if kind.startswith(("thinking", "reasoning", "thought")):
            events.append(ReasoningDelta(text))
        else:
            events.append(RefusalDelta(text) if kind == "refusal" else TextDelta(text))


def _texts_in(part: object, nested: int = 0) -> Iterable[str]:
    """Yield the texts of a part, or of a list of parts."""
    if isinstance(part, str):
        yield part
    elif nested > MOST_NESTED:
        return
    elif isinstance(part, list):
        for each in part:
            yield from _texts_in(each, nested + 1)
    elif isinstance(part, Mapping) and part.get("type") not in _SILENT:
        found = next((part[name] for name in (*_TEXTS, *_THOUGHTS, "refusal") if part.get(name)), None)
        yield from _texts_in(found, nested + 1)


def _read_calls(delta: Mapping[str, object], events: list[Event]) -> None:
    for number, call in enumerate(_calls_of(delta)):
        if not isinstance(call, Mapping):
            raise UnreadableFrame(f"a call is no object: {_shown(call)}")
        function = call.get("function")
        named = function if isinstance(function, Mapping) else call if function is None else {}
        index, identity, name = call.get("index"), call.get("id"), named.get("name")
        if not (identity or name or named.get("arguments")):
            continue  # Snowflake sends empty ones beside words
        events.append(
            ToolCallDelta(
                _index_of(index, number),
                str(identity) if isinstance(identity, str | int) and not isinstance(identity, bool) else None,
                name if isinstance(name, str) else None,
                _arguments_of(named.get("arguments", named.get("parameters"))),
            )
        )


def _calls_of(delta: Mapping[str, object]) -> Sequence[object]:
    calls = delta.get("tool_calls")
    if calls is None and isinstance(delta.get("function_call"), Mapping):
        return [{"function": delta["function_call"]}]
    if isinstance(calls, Mapping):
        return [calls]
    if not isinstance(calls, list | None):
        raise UnreadableFrame(f"its calls are no list: {_shown(calls)}")
    return calls or ()


def _index_of(index: object, number: int) -> int:
    if isinstance(index, str) and index.isdecimal() and len(index) < len(str(2**31)):
        return int(index)
    return int(index) if isinstance(index, int | float) and 0 <= index < 2**31 else number


def _arguments_of(arguments: object) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _read_end(reason: object, events: list[Event]) -> bool:
    if isinstance(reason, Mapping):
        kind = reason.get("type")
        reason = kind if isinstance(kind, str) else None
    if not isinstance(reason, str | int) or isinstance(reason, bool) or not reason:
        return False
    failure = failure_of(str(reason))
    if failure is not None:
        raise failure
    events.append(Finished(str(reason)))
    return True


def _shown(value: object) -> str:
    return repr(value)[:200]

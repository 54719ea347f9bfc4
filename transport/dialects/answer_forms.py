"""A whole answer in the form of each API, as a document or as a stream. Pure.

Sources: OpenAI's and Anthropic's API references; the clients of both, ``openai`` 3 and ``anthropic`` 2, which the tests
read these forms with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from transport.dialects.frame_parts import MESSAGES_PATH, RESPONSES_PATH
from transport.dialects.openai import CHAT_PATH, call_document
from transport.errors import UNDECODABLE
from transport.events import Usage
from transport.request import ToolCall

Document = dict[str, Any]
# Kinds of deltas by kinds of blocks, and the fields that hold their words.
DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "input"),
}
DONE: Final = b"data: [DONE]\n\n"


class WholeWords(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a whole answer; ``name`` makes its ids, ``created`` is its time in Unix seconds.

    ``asked`` are the fields of its chat. ``stop_word`` is the stop word that ended it. It may be ``is_cut`` off at its
    bound, or ``is_filtered``: ended by a filter of the engine's.
    """

    name: str
    asked: Mapping[str, Any]
    created: int
    model: str
    text: str
    reasoning: str
    calls: Sequence[ToolCall]
    finish_reason: str
    stop_word: str | None
    usage: Usage
    is_cut: bool = False
    is_filtered: bool = False
    is_refusal: bool = False


def write_document(path: str, words: WholeWords) -> Document:
    """Return an answer as one document."""
    forms: dict[str, Callable[[WholeWords], Document]] = {
        CHAT_PATH: _chat,
        MESSAGES_PATH: _message,
        RESPONSES_PATH: _response,
    }
    return forms[path](words)


def write_stream(path: str, words: WholeWords) -> bytes:
    """Return an answer as the events of a whole stream."""
    if path == CHAT_PATH:
        return b"".join(b"data: %b\n\n" % msgspec.json.encode(each) for each in _chunks(words)) + DONE
    events = _message_events(words) if path == MESSAGES_PATH else _response_events(words)
    return b"".join(b"event: %b\ndata: %b\n\n" % (each["type"].encode(), msgspec.json.encode(each)) for each in events)


# Chats


def _chat(words: WholeWords) -> Document:
    message = {"role": "assistant", "content": words.text if words.text or not words.calls else None}
    message |= _chat_extras(words)
    return {
        "id": f"chatcmpl-{words.name}",
        "object": "chat.completion",
        "created": words.created,
        "model": words.model,
        "choices": [{"index": 0, "message": message, "finish_reason": words.finish_reason, "logprobs": None}],
        "usage": _chat_usage(words.usage),
    }


def _chat_extras(words: WholeWords) -> Document:
    extras: Document = {}
    if words.is_refusal:
        extras |= {"content": None, "refusal": words.text}
    if words.reasoning:  # vLLM calls it by the one name, llama.cpp by the other
        extras |= {"reasoning": words.reasoning, "reasoning_content": words.reasoning}
    if words.calls:
        extras["tool_calls"] = [call_document(call) for call in words.calls]
    return extras


def _chat_usage(usage: Usage) -> Document:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chunks(words: WholeWords) -> Iterator[Document]:
    head = {
        "id": f"chatcmpl-{words.name}",
        "object": "chat.completion.chunk",
        "created": words.created,
        "model": words.model,
    }
    extras = _chat_extras(words)
    calls = extras.get("tool_calls")
    if calls:
        extras["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    delta = {"role": "assistant", "content": words.text, **extras}
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": words.finish_reason}]}
    if (words.asked.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": _chat_usage(words.usage)}


# Anthropic's Messages


def _message(words: WholeWords) -> Document:
    return {
        "id": f"msg_{words.name}",
        "type": "message",
        "role": "assistant",
        "model": words.model,
        "content": _blocks(words) or [{"type": "text", "text": ""}],
        **_stop_of(words),
        "usage": _message_usage(words.usage),
    }


def _stop_of(words: WholeWords) -> Document:
    reason, is_word = "end_turn", words.stop_word is not None and not words.calls
    if words.is_cut:
        reason, is_word = "max_tokens", False
    elif words.is_refusal or words.is_filtered:
        reason, is_word = "refusal", False
    elif words.calls:
        reason = "tool_use"
    elif is_word:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": words.stop_word if is_word else None}


def _blocks(words: WholeWords) -> list[Document]:
    blocks: list[Document] = []
    if words.reasoning:
        blocks.append({"type": "thinking", "thinking": words.reasoning, "signature": ""})
    if words.text:
        blocks.append({"type": "text", "text": words.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call.arguments)}
        for call in words.calls
    ]
    return blocks


def _message_usage(usage: Usage) -> Document:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _message_events(words: WholeWords) -> Iterator[Document]:
    usage = _message_usage(words.usage)
    begun = {**_message(words), "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": {**usage, "output_tokens": 0}}}
    arguments = [call.arguments for call in words.calls]
    for index, block in enumerate(_blocks(words)):
        kind, field = DELTAS[block["type"]]
        is_call = field == "input"
        empty = {**block, field: {} if is_call else ""}
        delta = {"type": kind, "partial_json": arguments.pop(0)} if is_call else {"type": kind, field: block[field]}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _stop_of(words), "usage": usage}
    yield {"type": "message_stop"}


def _input_of(arguments: str) -> object:
    """Return a call's arguments; one that was cut off has none that a program could use."""
    try:
        given = msgspec.json.decode(arguments or "{}")
    except UNDECODABLE:
        return {}
    return given if isinstance(given, dict) else {}


# OpenAI's Responses


def _response(words: WholeWords) -> Document:
    why = "max_output_tokens" if words.is_cut else "content_filter" if words.is_filtered else None
    return {
        **_response_head(words),
        "status": "completed" if why is None else "incomplete",
        "incomplete_details": None if why is None else {"reason": why},
        "output": _items(words),
        "usage": {
            "input_tokens": words.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": words.usage.cached_tokens},
            "output_tokens": words.usage.completion_tokens,
            **({} if words.reasoning else {"output_tokens_details": {"reasoning_tokens": 0}}),  # those are not counted
            "total_tokens": words.usage.prompt_tokens + words.usage.completion_tokens,
        },
    }


def _response_head(words: WholeWords) -> Document:
    choice = words.asked.get("tool_choice", "auto")
    functions = [tool["function"] for tool in words.asked.get("tools") or ()]
    return {
        "id": f"resp_{words.name}",
        "object": "response",
        "created_at": words.created,
        "model": words.model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": words.asked.get("parallel_tool_calls", True),
        "tool_choice": {"type": "function", **choice["function"]} if isinstance(choice, dict) else choice,
        "tools": [{"type": "function", **function} for function in functions],
    }


def _items(words: WholeWords) -> list[Document]:
    items: list[Document] = []
    if words.reasoning:
        content = [{"type": "reasoning_text", "text": words.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{words.name}", "summary": [], "content": content})
    if words.text or not (words.calls or words.reasoning):
        part: Document = {"type": "output_text", "text": words.text, "annotations": []}
        if words.is_refusal:
            part = {"type": "refusal", "refusal": words.text}
        said = {"type": "message", "id": f"msg_{words.name}", "role": "assistant", "content": [part]}
        items.append({**said, "status": "completed"})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{words.name}_{number}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(words.calls)
    ]
    if (words.is_cut or words.is_filtered) and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


def _response_events(words: WholeWords) -> Iterator[Document]:
    head, whole = _response_head(words), _response(words)
    kinds: list[Document] = [
        {"type": "response.created", "response": head},
        {"type": "response.in_progress", "response": head},
    ]
    for index, item in enumerate(whole["output"]):
        kinds += _item_events(index, item)
    kinds.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(kinds):
        yield {**event, "sequence_number": number}


def _item_events(index: int, item: Document) -> Iterator[Document]:
    place = {"output_index": index, "item_id": item["id"]}
    is_call = item["type"] == "function_call"
    empty = {**item, "arguments": ""} if is_call else {**item, "content": []}
    yield {"type": "response.output_item.added", "output_index": index, "item": {**empty, "status": "in_progress"}}
    if is_call:
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **said}
    for number, part in enumerate(item.get("content", ())):
        kind, field = part["type"], "refusal" if part["type"] == "refusal" else "text"
        at = {**place, "content_index": number}
        extra: Document = {"logprobs": []} if kind == "output_text" else {}
        yield {"type": "response.content_part.added", **at, "part": {**part, field: ""}}
        yield {"type": f"response.{kind}.delta", **at, "delta": part[field], **extra}
        yield {"type": f"response.{kind}.done", **at, field: part[field], **extra}
        yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}

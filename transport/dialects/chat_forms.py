"""Requests of Anthropic's Messages and OpenAI's Responses, as chats: engines tell the tokens of a chat alone. Pure.

The fields are mapped as the engines map them. A part that a chat cannot express is refused, never left out: its client
would take an answer to another question for an answer to its own.

Sources: Anthropic's and OpenAI's API references; vLLM 0.32, ``entrypoints/anthropic`` and ``entrypoints/openai``;
llama.cpp, ``tools/server/server-chat.cpp``, of 2026.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from transport.dialects.frame_parts import MESSAGES_PATH, RESPONSES_PATH
from transport.dialects.openai import CHAT_PATH, call_document
from transport.request import ToolCall

Document = dict[str, Any]
BILLING: Final = "x-anthropic-billing-header"  # Claude Code's; its hash changes with each request
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
# Fields for the server, without effect on an answer.
IDLE: Final = frozenset(
    {"metadata", "service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"stream", "include", "betas", "cache_control", "background", "truncation", "store"}
)
# Thoughts are given as they are, so nothing has to be enclosed for a later request.
ENCLOSED: Final = "reasoning.encrypted_content"
# Values that ask for nothing.
NOTHING: Final[tuple[object, ...]] = (None, False, "", [], {}, 0, "disabled")
# Fields that would change what comes back, or what is read, in ways that a recorded answer does not have.
REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    CHAT_PATH: ("functions", "function_call", "audio", "prediction", "web_search_options", "store"),
    MESSAGES_PATH: ("mcp_servers", "container", "context_management"),
    RESPONSES_PATH: ("previous_response_id", "conversation", "prompt", "truncation", "max_tool_calls", "store"),
}
ALWAYS_REFUSED: Final = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "n_probs", "post_sampling_probs", "return_tokens"),
    *("return_token_ids", "return_tokens_as_token_ids", "response_fields", "verbose", "echo", "return_progress"),
    *("timings_per_token", "continue_final_message", "use_beam_search", "best_of"),
)
FORMS: Final = (CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH)


class NoChat(ValueError):
    """A request has a part that a chat, or the record of its answer, cannot express."""


def chat_of(path: str, fields: Mapping[str, Any]) -> Document:
    """Return the fields of a request as those of a chat.

    Raises:
        NoChat: a part of it has no place there.
    """
    for name in (*ALWAYS_REFUSED, *REFUSED[path]):
        if fields.get(name) not in NOTHING:
            raise NoChat(f"{name} is not supported where tokens are recorded")
    if fields.get("n") not in (None, 1):
        raise NoChat("a recorded request has one answer: leave out n")
    if fields.get("include_reasoning") is False:
        raise NoChat("include_reasoning: engines withhold the tokens of thoughts that are left out")
    try:
        chat = _translated(path, fields)
        _check_messages(chat["messages"])
    except (AttributeError, KeyError, TypeError) as error:
        raise NoChat(f"the body has not the form of {path}: {type(error).__name__}: {error}") from error
    if not isinstance(chat.get("stream_options") or {}, dict):
        raise NoChat("stream_options must be an object")
    return {name: value for name, value in chat.items() if name not in IDLE and value is not None}


def _check_messages(messages: object) -> None:
    """Check what a record reads of messages; the rest is for the engine.

    Raises:
        NoChat: they have another form, or end with the beginning of the answer.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise NoChat("messages must be a list of objects, with at least one")
    for message in messages:
        content = message.get("content")
        if not (content is None or isinstance(content, str) or _are_objects(content)):
            raise NoChat("the content of a message must be text or a list of objects")
        calls = message.get("tool_calls") or []
        if not _are_objects(calls):
            raise NoChat("tool_calls must be a list of objects")
        for call in calls:
            _text_of(call["function"], "name")
            _text_of(call["function"], "arguments")
    if messages[-1].get("role") == "assistant":
        raise NoChat("the last message is the assistant's: an answer that is begun is not supported here")


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _text_of(fields: Mapping[str, Any], name: str) -> str:
    text = fields[name]
    if not isinstance(text, str):
        raise NoChat(f"{name} must be text")
    return text


def _translated(path: str, fields: Mapping[str, Any]) -> Document:
    if path == MESSAGES_PATH:
        return _of_messages(fields)
    return _of_responses(fields) if path == RESPONSES_PATH else {**fields}


def _without(fields: Mapping[str, Any], *names: str) -> Document:
    return {name: value for name, value in fields.items() if name not in names}


# Anthropic's Messages


def _of_messages(fields: Mapping[str, Any]) -> Document:
    if fields.get("max_tokens") is None:
        raise NoChat("max_tokens is required")
    chat = _without(
        fields, "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config", "output_format"
    )
    messages = []
    if system := _system_text(fields.get("system")):
        messages.append({"role": "system", "content": system})
    for message in fields["messages"]:
        messages += _of_message(message)
    chat["messages"] = messages
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if fields.get("tools"):
        chat["tools"] = [_tool_of(each) for each in fields["tools"]]
    choice = fields.get("tool_choice")
    if choice:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if choice["type"] == "tool" else CHOICES[choice["type"]]
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    _add_thinking(chat, fields.get("thinking"))
    _add_output(chat, fields.get("output_config") or {}, fields.get("output_format"))
    return chat


def _add_thinking(chat: Document, thinking: Mapping[str, Any] | None) -> None:
    if not thinking:
        return
    if thinking["type"] == "enabled":  # each engine has a name of its own for the budget, and ignores the other
        budget = thinking["budget_tokens"]
        chat |= {"thinking_token_budget": budget, "thinking_budget_tokens": budget}
    elif thinking["type"] == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False, **(chat.get("chat_template_kwargs") or {})}
    elif thinking["type"] != "adaptive":  # the model decides, as it does without a word
        raise NoChat(f"thinking of the type {thinking['type']!r} is not supported where tokens are recorded")


def _add_output(chat: Document, config: Mapping[str, Any], output_format: Mapping[str, Any] | None) -> None:
    if config.keys() - {"format", "effort"}:
        raise NoChat("output_config: only format and effort are supported where tokens are recorded")
    wanted = config.get("format") or output_format
    if wanted:
        schema = {"name": "answer", "schema": wanted["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config.get("effort"):
        chat["reasoning_effort"] = config["effort"]


def _system_text(system: object) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    if not isinstance(system, list):
        raise NoChat("a system prompt must be text or a list of blocks")
    texts = [_text_in(block) for block in system]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _text_in(block: Mapping[str, Any]) -> str:
    if block["type"] not in ("text", "input_text", "output_text"):
        raise NoChat(f"a {block['type']} where only text can stand")
    return _text_of(block, "text")


def _of_message(message: Mapping[str, Any]) -> Iterator[Document]:
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if role == "system":
        yield {"role": role, "content": _system_text(content)}
        return
    parts: list[Document] = []
    calls: list[Document] = []
    thoughts: list[str] = []
    for block in content:
        kind = block["type"]
        if kind == "text":
            parts.append({"type": "text", "text": _text_of(block, "text")})
        elif kind == "image":
            parts.append(_image_of(block["source"]))
        elif kind == "thinking":
            thoughts.append(_text_of(block, "thinking"))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(call_document(ToolCall(id=block["id"], name=block["name"], arguments=arguments)))
        elif kind == "tool_result":
            yield from _result_of(block["tool_use_id"], block.get("content"))
        else:
            raise NoChat(f"a block of the type {kind!r} is not supported where tokens are recorded")
    if parts or calls or thoughts:
        yield _message_of(role, parts, calls, "".join(thoughts))


def _message_of(role: str, parts: Sequence[Document], calls: Sequence[Document], thoughts: str) -> Document:
    """Return a message of several parts; a text alone is sent as such, as clients of chats do."""
    is_plain = len(parts) < 2 and all(part["type"] == "text" for part in parts)  # noqa: PLR2004 - alone
    message: Document = {"role": role, "content": "".join(part["text"] for part in parts) if is_plain else [*parts]}
    if calls:
        message["tool_calls"] = [*calls]
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def _result_of(call: str, content: str | Sequence[Mapping[str, Any]] | None) -> Iterator[Document]:
    """Yield a tool's result, and a user's message with its pictures, which no tool's message can hold."""
    text = {"type": "text", "text": "" if content is None else content}
    blocks: Sequence[Mapping[str, Any]] = [text] if content is None or isinstance(content, str) else content
    pictures = [_image_of(block["source"]) for block in blocks if block["type"] == "image"]
    texts = [_text_in(block) for block in blocks if block["type"] != "image"]
    yield {"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}
    if pictures:
        yield {"role": "user", "content": pictures}


def _image_of(source: Mapping[str, Any]) -> Document:
    is_data = source["type"] == "base64"
    url = f"data:{source['media_type']};base64,{source['data']}" if is_data else source["url"]
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_of(tool: Mapping[str, Any]) -> Document:
    if tool.get("type") not in (None, "custom"):
        raise NoChat(f"the tool type {tool['type']!r} is not supported where tokens are recorded")
    if tool.get("defer_loading"):
        raise NoChat("defer_loading is not supported where tokens are recorded")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool["input_schema"]}
    function["strict"] = tool.get("strict")
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


# OpenAI's Responses


def _of_responses(fields: Mapping[str, Any]) -> Document:
    chat = _without(fields, "input", "instructions", "tools", "tool_choice", "text", "reasoning", "max_output_tokens")
    given = fields["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not _are_objects(items):
        raise NoChat("input must be text or a list of items")
    if {*(fields.get("include") or ())} - {ENCLOSED}:
        raise NoChat(f"include: only {ENCLOSED} is supported where tokens are recorded")
    messages: list[Document] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": _text_of(fields, "instructions")})
    chat["messages"] = messages + _of_items(items)
    if fields.get("max_output_tokens") is not None:
        chat["max_tokens"] = fields["max_output_tokens"]
    if fields.get("tools"):
        chat["tools"] = [_function_of(each) for each in fields["tools"]]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise NoChat(f"the tool choice {choice.get('type')!r} is not supported where tokens are recorded")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    chat["tool_choice"] = choice
    _add_text(chat, fields.get("text") or {})
    reasoning = fields.get("reasoning") or {}
    if reasoning.get("summary") not in (None, "auto"):
        raise NoChat("reasoning.summary: thoughts are given as they are")
    chat["reasoning_effort"] = reasoning.get("effort")
    return chat


def _add_text(chat: Document, text: Mapping[str, Any]) -> None:
    chat["verbosity"] = text.get("verbosity")
    wanted = text.get("format") or {"type": "text"}
    if wanted["type"] == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted["type"] != "text":
        chat["response_format"] = wanted


def _of_items(items: Sequence[Mapping[str, Any]]) -> list[Document]:
    """Return the messages of items: thoughts, words and calls of one answer are one message."""
    messages: list[Document] = []
    thoughts = ""
    is_open = False  # whether the last message is an answer that may have further items
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            said = item.get("content") or item.get("summary") or []
            thoughts += "".join(_text_of(part, "text") for part in said)
            continue
        if thoughts and kind != "function_call" and item.get("role") != "assistant":
            raise NoChat("a reasoning item stands before the answer that it belongs to")
        if kind == "function_call_output":
            messages.extend(_result_of(item["call_id"], item["output"]))
            is_open = False
            continue
        if kind not in ("message", "function_call"):
            raise NoChat(f"an item of the type {kind!r} is not supported where tokens are recorded")
        role = "assistant" if kind == "function_call" else str(item["role"])
        if role != "assistant" or not is_open or kind == "message":
            parts = [] if kind == "function_call" else _parts_of(item["content"])
            messages.append(_message_of("system" if role == "developer" else role, parts, [], thoughts))
            thoughts, is_open = "", role == "assistant"
        if kind == "function_call":
            call = ToolCall(id=item["call_id"], name=item["name"], arguments=item["arguments"])
            messages[-1].setdefault("tool_calls", []).append(call_document(call))
    if thoughts:
        raise NoChat("a reasoning item stands before the answer that it belongs to")
    return messages


def _parts_of(content: str | Sequence[Mapping[str, Any]]) -> list[Document]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise NoChat("the content of a message must be text or a list of objects")
    parts: list[Document] = []
    for part in content:
        if part["type"] == "input_image":
            detail = {} if part.get("detail") is None else {"detail": part["detail"]}
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"], **detail}})
        elif part["type"] == "refusal":
            parts.append({"type": "text", "text": _text_of(part, "refusal")})
        else:
            parts.append({"type": "text", "text": _text_in(part)})
    return parts


def _function_of(tool: Mapping[str, Any]) -> Document:
    if tool["type"] != "function":
        raise NoChat(f"the tool type {tool['type']!r} is not supported where tokens are recorded")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}

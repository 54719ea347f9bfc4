"""Requests of other APIs as chats, and answers in their forms (specification, "Sessions")."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from transport.dialects.answer_forms import WholeWords, write_document, write_stream
from transport.dialects.chat_forms import NoChat, chat_of
from transport.dialects.frame_parts import MESSAGES_PATH, RESPONSES_PATH, FrameParts, Sign
from transport.dialects.openai import CHAT_PATH
from transport.events import Usage
from transport.request import ToolCall

X = {"role": "user", "content": "x"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
WORDS = WholeWords(
    name="1",
    asked={},
    created=7,
    model="m",
    text="Let me see.",
    reasoning="Hm.",
    calls=(ToolCall(id="c1", name="add", arguments='{"a": 1}'), ToolCall(id="c2", name="add", arguments="{}")),
    finish_reason="tool_calls",
    stop_word=None,
    usage=Usage(10, 5, 4),
)


def test_messages_become_a_chat() -> None:
    """As vLLM maps them, compared with its own code on 2026-11-29; llama.cpp's mapping is the same."""
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc=1; h=3"},
            {"type": "text", "text": "be"},
            {"type": "text", "text": " kind", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "let me"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "so?"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "stream": True,
        "top_k": 3,
    }
    assert chat_of(MESSAGES_PATH, body) == {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "let me",
                "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
                "reasoning_content": "hm",
            },
            {"role": "tool", "tool_call_id": "t1", "content": "2"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "so?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}},
                ],
            },
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": ["x"],
        "top_k": 3,
    }


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            {"thinking_token_budget": 5, "thinking_budget_tokens": 5},
        ),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"thinking": {"type": "adaptive"}}, {}),
        (
            {"tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
    ],
)
def test_options_of_messages_keep_their_meaning(change: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Each becomes the option of a chat that asks for the same."""
    plain = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    assert chat_of(MESSAGES_PATH, {**plain, **change}) == {**plain, **wanted}


def test_items_of_responses_become_messages() -> None:
    """Thoughts, words and calls of one answer are one message."""
    body = {
        "input": [
            {"role": "developer", "content": "dev"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c2", "output": "3"},
        ],
        "instructions": "be kind",
        "max_output_tokens": 9,
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert chat_of(RESPONSES_PATH, body) == {
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "system", "content": "dev"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "let me",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", **call}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c2", **call}]},
            {"role": "tool", "tool_call_id": "c2", "content": "3"},
        ],
        "max_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "reasoning_effort": "low",
        "verbosity": "low",
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (MESSAGES_PATH, {}),
        (MESSAGES_PATH, {"messages": 3}),
        (MESSAGES_PATH, {"messages": [3]}),
        (MESSAGES_PATH, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (MESSAGES_PATH, {"messages": [{"role": "user", "content": None}]}),
        (MESSAGES_PATH, {"messages": [], "tools": [{"name": "x"}]}),
        (RESPONSES_PATH, {}),
        (RESPONSES_PATH, {"input": [3]}),
        (RESPONSES_PATH, {"input": [{"type": "function_call"}]}),
        (CHAT_PATH, {"messages": "x"}),
        (CHAT_PATH, {"messages": []}),
        (CHAT_PATH, {"messages": [X], "stream_options": 5}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": {"k": {}}}, X]}),
        (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}, X]}),
        (CHAT_PATH, {"messages": [X, {"role": "assistant", "content": "It is"}]}),
        (MESSAGES_PATH, {"messages": [X]}),
        (MESSAGES_PATH, {"messages": [X], "max_tokens": 3, "system": 5}),
        (MESSAGES_PATH, {"messages": [X], "max_tokens": 3, "system": [{"type": "text", "text": None}]}),
        (MESSAGES_PATH, {"messages": [X], "max_tokens": 3, "thinking": {"type": "other"}}),
        (MESSAGES_PATH, {"messages": [X], "max_tokens": 3, "output_config": {"budget": 3}}),
        (MESSAGES_PATH, {"messages": [X], "max_tokens": 3, "tools": [{"name": "f", "defer_loading": True}]}),
        (RESPONSES_PATH, {"input": {}}),
        (RESPONSES_PATH, {"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]}),
        (RESPONSES_PATH, {"input": "x", "include": ["message.output_text.logprobs"]}),
        (RESPONSES_PATH, {"input": "x", "reasoning": {"summary": "detailed"}}),
        (RESPONSES_PATH, {"input": [X, THOUGHT]}),
        (RESPONSES_PATH, {"input": [X, THOUGHT, X]}),
        (CHAT_PATH, {"messages": [], "top_logprobs": 3}),
    ],
)
def test_a_body_of_another_form_is_refused(path: str, body: dict[str, Any]) -> None:
    """With one error, whatever is wrong with it."""
    with pytest.raises(NoChat):
        chat_of(path, body)


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH])
def test_a_stream_says_the_same_as_the_whole_answer(path: str) -> None:
    """As the reader of continued streams reads it: thought, words, two calls, and an end."""
    parts = FrameParts(path)
    said: dict[str, str] = {}
    labels = []
    for line in write_stream(path, WORDS).decode().splitlines():
        if not line.startswith("data: {"):
            continue
        for part in parts.split(json.loads(line.removeprefix("data: "))):
            if part.sign is Sign.SAYS:
                said[str(part.block)] = said.get(str(part.block), "") + part.holder[part.field]
            elif part.sign is Sign.ENDS:
                labels.append(part.label)
    assert labels
    assert set(said.values()) == {"Hm.", "Let me see.", '{"a": 1}', "{}"}
    whole = json.dumps(write_document(path, WORDS))
    assert all(word in whole for word in ("Hm.", "Let me see.", "c1", "c2"))


@pytest.mark.parametrize(
    ("change", "reason", "word"),
    [
        ({}, "tool_use", None),
        ({"calls": (), "finish_reason": "stop"}, "end_turn", None),
        ({"calls": (), "finish_reason": "stop", "stop_word": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "length", "is_cut": True}, "max_tokens", None),
        ({"finish_reason": "content_filter", "is_filtered": True}, "refusal", None),
        ({"calls": (), "finish_reason": "stop", "is_refusal": True}, "refusal", None),
    ],
)
def test_a_message_says_why_it_stopped(change: dict[str, Any], reason: str, word: str | None) -> None:
    """In Anthropic's words."""
    document = write_document(MESSAGES_PATH, replace(WORDS, **change))
    assert (document["stop_reason"], document["stop_sequence"]) == (reason, word)


@pytest.mark.parametrize(
    ("change", "status", "why"),
    [
        ({}, "completed", None),
        ({"is_cut": True}, "incomplete", {"reason": "max_output_tokens"}),
        ({"is_filtered": True}, "incomplete", {"reason": "content_filter"}),
    ],
)
def test_a_response_says_whether_it_is_complete(change: dict[str, Any], status: str, why: object) -> None:
    """So does its last item."""
    document = write_document(RESPONSES_PATH, replace(WORDS, **change))
    assert (document["status"], document["incomplete_details"], document["output"][-1]["status"]) == (
        status,
        why,
        status,
    )


def test_a_response_has_the_tools_that_it_was_asked_with() -> None:
    """In the form of Responses, not of the chat that the engine got."""
    function = {"name": "add", "parameters": SCHEMA}
    body = {
        "input": "x",
        "tools": [{"type": "function", **function}],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
    }
    document = write_document(RESPONSES_PATH, replace(WORDS, asked=chat_of(RESPONSES_PATH, body)))
    assert {name: document[name] for name in body.keys() & document.keys()} == {
        name: value for name, value in body.items() if name != "input"
    }


def test_a_call_that_was_cut_off_is_no_object() -> None:
    """A whole message has an empty input then; a stream has the letters as they came."""
    cut = replace(WORDS, calls=(ToolCall(id="c", name="f", arguments='{"a": '),), finish_reason="length", is_cut=True)
    assert write_document(MESSAGES_PATH, cut)["content"][-1]["input"] == {}
    assert '{\\"a\\": ' in write_stream(MESSAGES_PATH, cut).decode()

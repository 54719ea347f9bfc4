"""The message stack of a request in its fixed order: BIOS, the caller's system prompt, the conversation. Pure."""

import json
from collections.abc import Sequence

from transport.request import Message, ToolCall
from workers.tools.call_parser import Fallback, ParsedMessage


def stack_messages(bios: str, system: str, conversation: Sequence[Message]) -> tuple[Message, ...]:
    """Return all messages of a request.

    Both system layers stand in one message: many chat templates refuse a second system message, or drop it.
    """
    layers = [layer for layer in (bios, system) if layer]
    head = (Message(role="system", content="\n\n".join(layers)),) if layers else ()
    return (*head, *conversation)


def tool_messages(reading: ParsedMessage, said: str, answered: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
    """Return what the conversation grows by after a message with calls: itself, and each call's result as JSON.

    ``said`` is the message as the model wrote it. Calls that were read from its text are answered as text: an engine
    whose template knows no tools has no place for a tool's message.
    """
    if reading.fallback is None:
        calls = tuple(call for call, _ in answered)
        results = (Message(role="tool", content=result, call_id=call.id) for call, result in answered)
        return (Message(role="assistant", content=reading.text, calls=calls), *results)
    return (Message(role="assistant", content=said), Message(role="user", content=_observed(reading, answered)))


def _observed(reading: ParsedMessage, answered: Sequence[tuple[ToolCall, str]]) -> str:
    if reading.fallback is Fallback.MARKUP:
        return "\n".join(f"<observation>{result}</observation>" for _, result in answered)
    results = [{"name": call.name, "result": json.loads(result)} for call, result in answered]
    return json.dumps({"tool_results": results}, ensure_ascii=False)

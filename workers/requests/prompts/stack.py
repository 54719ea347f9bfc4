"""The message stack of a request in its fixed order: BIOS, the caller's system prompt, the conversation. Pure."""

import json
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from transport.request import Message, ToolCall
from workers.tools.call_parser import Fallback

RECORDED: Final = '{"recorded": true}'  # result of a signal, for templates that want every call answered


class ToolExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the model's with calls, and their results.

    ``written`` is the message as the model wrote it, ``text`` its text without the calls; ``fallback`` says how the
    calls were read from the text, None if they were structured. ``results`` are JSON, one per call; ``note`` is
    Roundhouse's text after them.
    """

    written: str
    text: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]
    fallback: Fallback | None = None
    note: str = ""


def stack_messages(
    bios: str, system: str, conversation: Sequence[Message], exchanges: Iterable[ToolExchange] = ()
) -> tuple[Message, ...]:
    """Return all messages of a request.

    Both system layers are one message: many chat templates refuse a second system message, or drop it.
    """
    layers = [layer for layer in (bios, system) if layer]
    head = (Message(role="system", content="\n\n".join(layers)),) if layers else ()
    grown = (message for exchange in exchanges for message in exchange_messages(exchange))
    return (*head, *conversation, *grown)


def exchange_messages(exchange: ToolExchange) -> tuple[Message, ...]:
    """Return the messages of an exchange: the message with calls, and each call's result as JSON.

    Calls read from text are answered as text: an engine whose template knows no tools has no place for a tool's
    message.
    """
    if exchange.fallback is None:
        last = len(exchange.calls) - 1
        results = (
            Message(role="tool", content=_noted(result, exchange.note if place == last else ""), call_id=call.id)
            for place, (call, result) in enumerate(zip(exchange.calls, exchange.results, strict=True))
        )
        return (Message(role="assistant", content=exchange.text, calls=exchange.calls), *results)
    return (
        Message(role="assistant", content=exchange.written),
        Message(role="user", content=_noted(_observed(exchange), exchange.note)),
    )


def _observed(exchange: ToolExchange) -> str:
    if exchange.fallback is Fallback.MARKUP:
        return "\n".join(f"<observation>{result}</observation>" for result in exchange.results)
    pairs = zip(exchange.calls, exchange.results, strict=True)
    results = [{"name": call.name, "result": json.loads(result)} for call, result in pairs]
    return json.dumps({"tool_results": results}, ensure_ascii=False)


def _noted(content: str, note: str) -> str:
    return f"{content}\n\n{note}" if note else content

"""The message stack of a request in its fixed order: BIOS, the caller's system prompt, the conversation. Pure."""

from collections.abc import Sequence

from transport.request import Message


def stack_messages(bios: str, system: str, conversation: Sequence[Message]) -> tuple[Message, ...]:
    """Return all messages of a request.

    Both system layers stand in one message: many chat templates refuse a second system message, or drop it.
    """
    layers = [layer for layer in (bios, system) if layer]
    head = (Message(role="system", content="\n\n".join(layers)),) if layers else ()
    return (*head, *conversation)

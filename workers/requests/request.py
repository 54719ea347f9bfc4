"""What a caller asks of a worker, and the tools that come with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from transport.request import Message
from workers.tools.call_journal import CallJournal
from workers.tools.definition import ToolDefinition

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: admitted to a slot, answered or failed; it may take several generations of the engine.

    ``job_name`` is the caller's word for it, in every log line and incident. ``params`` reach the engine untouched, but
    for the fields that are ours. ``markup`` says that the model may call tools with ``<tool_request>``.
    ``journal`` remembers calls of tools over a crash; without one none is remembered. Without ``is_watched`` the answer
    is not looked at before it is complete. ``adapter`` is one of the worker's by its name.
    """

    job_name: str
    system: str
    conversation: tuple[Message, ...]
    params: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[ToolDefinition, ...] = ()
    exit_tools: tuple[ToolDefinition, ...] = ()
    markup: bool = False
    journal: CallJournal | None = None
    is_watched: bool = True
    adapter: str | None = None


def user_conversation(user_prompt: str) -> tuple[Message, ...]:
    """Return the conversation that is one prompt of a user."""
    return (Message(role="user", content=user_prompt),)


def parse_tools(documents: Sequence[object]) -> tuple[ToolDefinition, ...]:
    """Return tools of OpenAI definitions; what is a ``ToolDefinition`` already stays as it is.

    Raises:
        InvalidTool: one of them is no definition.
    """
    return tuple(
        document if isinstance(document, ToolDefinition) else ToolDefinition.parse(document) for document in documents
    )

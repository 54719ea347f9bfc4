"""One chat request, as the caller means it, before a dialect puts it on the wire."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call that a model asks for; ``arguments`` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat; an assistant's may hold calls, a tool's answers the call ``call_id``."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


class Thought(StrEnum):
    """The thought before an answer that is constrained."""

    NONE = "none"
    OPTIONAL = "optional"  # a thought in ``<think>``, or none
    OPEN = "open"  # the prompt ends in ``<think>``: the rest of the thought, and its end
    ENDED = "ended"  # the prompt ends so as well, and its thought ends at once


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer, for an engine that can hold its model to it: one of three kinds.

    An answer is one of ``choices``, or all of it matches ``pattern``, or it is JSON that fits ``json_schema``; what
    stands before it is not constrained.
    """

    choices: tuple[str, ...] = ()
    pattern: str | None = None
    json_schema: Mapping[str, object] | None = None
    thought: Thought = Thought.NONE


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat to be continued by the model.

    ``params`` is an open mapping of generation parameters (specification, "Generation parameters"): whatever the
    dialect does not own reaches the engine untouched. ``tools`` are OpenAI tool definitions. Prefixes that an engine
    keeps are shared only within one ``cache_scope``, where an engine knows such a thing; no reader follows the
    stream of what is not ``is_watched``, so that it may come in larger pieces. ``constraint`` is for the engine to
    keep, as far as its dialect can say it.
    """

    model: str
    messages: tuple[Message, ...]
    params: Mapping[str, object] = msgspec.field(default_factory=dict)
    tools: tuple[Mapping[str, object], ...] = ()
    cache_scope: str | None = None
    is_watched: bool = True
    constraint: Constraint | None = None

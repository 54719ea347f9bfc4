"""One chat request, as the caller means it, before a dialect puts it on the wire."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat to be continued by the model.

    ``params`` is an open mapping of generation parameters (seed 002, section 9): whatever the dialect does not own
    reaches the engine untouched.
    """

    model: str
    messages: tuple[Message, ...]
    params: Mapping[str, object] = field(default_factory=dict)

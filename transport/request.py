"""One chat request as its caller means it, before a dialect encodes it."""

import re
from collections.abc import Mapping, Sequence
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
    """One message of a chat; an assistant's may hold calls, and a tool's answers the call ``call_id``."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None


class Thought(StrEnum):
    """The thought that precedes a constrained answer."""

    NONE = "none"
    OPTIONAL = "optional"  # a thought in ``<think>``, or none
    OPEN = "open"  # the prompt ends in ``<think>``: the rest of the thought, and its end
    ENDED = "ended"  # the prompt ends with ``<think>`` too, and the thought ends at once


class TokenDetail(StrEnum):
    """The record of an answer's tokens."""

    IDS = "ids"
    LOGPROBS = "logprobs"  # with the ids


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an answer, for an engine that can enforce it: one of three kinds.

    An answer is one of ``choices``, or matches ``pattern`` as a whole, or is JSON that fits ``json_schema``. Text
    before the answer is not constrained.
    """

    choices: tuple[str, ...] = ()
    pattern: str | None = None
    json_schema: Mapping[str, object] | None = None
    thought: Thought = Thought.NONE


class BegunAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of an answer that the model is to go on with; one without ``text`` is still in its thought."""

    text: str = ""
    reasoning: str = ""

    def is_end_of(self, prompt: str, before: str) -> bool:
        """Whether a rendered ``prompt`` is the one ``before`` this beginning, and then these words as they are.

        Marks of a thought and blanks around it may stand between them.
        """
        if not prompt.startswith(before):
            return False
        words = prompt.removeprefix(before)
        if self.reasoning:
            thought = re.escape(self.reasoning.strip())
            found = re.match(rf"\s*(?:<think>)?\s*{thought}", words)
            if found is None:
                return False
            words = words[found.end() :]
            if not self.text:
                return not words.strip()
            words = re.sub(r"^\s*</think>\s*", "", words)
        return words == self.text


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat for the model to continue.

    ``params`` is an open mapping of generation parameters (specification, "Generation parameters"): those that the
    dialect does not own reach the engine untouched. ``tools`` are OpenAI tool definitions. An engine that knows cache
    scopes shares prefixes only within one ``cache_scope``. Without ``is_watched`` no reader follows the stream, so it
    may come in larger pieces. The engine enforces ``constraint`` as far as its dialect can express it. With ``begun``
    the model goes on with the beginning of its answer. With ``records`` the answer has the ids of its tokens. A
    client's own messages are ``posted`` in the place of ``messages``, and sent as they are.
    """

    model: str
    messages: tuple[Message, ...]
    params: Mapping[str, object] = msgspec.field(default_factory=dict)
    tools: tuple[Mapping[str, object], ...] = ()
    cache_scope: str | None = None
    is_watched: bool = True
    constraint: Constraint | None = None
    begun: BegunAnswer | None = None
    records: TokenDetail | None = None
    posted: Sequence[Mapping[str, object]] | None = None

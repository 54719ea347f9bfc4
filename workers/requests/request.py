"""A caller's request to a worker, and the tools that come with it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NewType, Protocol

import msgspec

from transport.request import Constraint, Message
from workers.outcome import Outcome
from workers.requests.prompts.bios import BiosFrame
from workers.tools.call_journal import CallJournal
from workers.tools.definition import ToolDefinition

RequestId = NewType("RequestId", int)
# Parameters of engines that hold an answer to a form; an author's own stand in place of what Roundhouse would send.
CONSTRAINTS: Final = frozenset(
    {
        "grammar",
        "json_schema",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
)
BOUNDS: Final = frozenset({"max_tokens", "max_completion_tokens", "n_predict", "min_tokens", "n"})


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The constraint of an answer, where the engine takes one.

    ``constraint`` None stands for the caller's own parameters that constrain. ``is_met`` tells whether an answer is
    what was asked for, so that one which was given beside tools, without the constraint, need not be asked for again.
    With ``at_once`` no call of a tool is expected any more.
    """

    constraint: Constraint | None = None
    is_met: Callable[[str], Awaitable[bool]] | None = None
    at_once: bool = False


class SlotHolder(Protocol):
    """The holder of a request's slot, which may lend it to others while its tools run."""

    def begin_tools(self, tools: Sequence[str], context_tokens: int) -> None:
        """Begin the run of tools; without its cache the engine would have to read so many tokens again."""

    async def end_tools(self) -> Outcome | None:
        """Return when the request has a slot again, or how it ends."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: admitted to a slot, answered or failed; it may take several generations of the engine.

    ``job_name`` is the caller's word for it, in every log line and incident. ``params`` reach the engine untouched, but
    for the fields that are ours. ``markup`` says that the model may call tools with ``<tool_request>``.
    ``journal`` remembers calls of tools over a crash; without one none is remembered. Without ``is_watched`` the answer
    is not looked at before it is complete. ``adapter`` is one of the worker's by its name. Without a ``frame`` the BIOS
    is that of the specification's "Worker interface": the time of the request, and what is left of the tool budget.
    Without a ``slot`` the request keeps its own while its tools run. Prefixes are shared only among requests of one
    ``cache_owner``, where its engine knows such a thing; a connection to a server of others is kept for requests of one
    ``owner``.
    """

    job_name: str
    system: str
    conversation: tuple[Message, ...]
    params: Mapping[str, object] = msgspec.field(default_factory=dict)
    tools: tuple[ToolDefinition, ...] = ()
    exit_tools: tuple[ToolDefinition, ...] = ()
    markup: bool = False
    journal: CallJournal | None = None
    is_watched: bool = True
    adapter: str | None = None
    frame: BiosFrame | None = None
    demand: Demand | None = None
    slot: SlotHolder | None = None
    cache_owner: str | None = None
    owner: str | None = None


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

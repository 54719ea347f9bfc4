"""A caller's request to a worker, with its tools."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NewType, Protocol

import msgspec

from transport.request import Constraint, Message, TokenDetail
from workers.outcome import Outcome
from workers.requests.bios_words import BiosFrame
from workers.tools.call_journal import CallJournal
from workers.tools.definition import ToolDefinition

RequestId = NewType("RequestId", int)
# Engine parameters that constrain an answer; the author's own replace the constraint that Roundhouse would send.
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


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The constraint of an answer, for engines that accept one.

    ``constraint`` None stands for the caller's own constraining parameters. ``is_met`` says whether an answer already
    fits, so that one given beside tools, without the constraint, need not be asked for again. With ``at_once`` no more
    tool calls are expected.
    """

    constraint: Constraint | None = None
    is_met: Callable[[str], Awaitable[bool]] | None = None
    at_once: bool = False


class SlotHolder(Protocol):
    """The holder of a request's slot, who may lend it to others while its tools run."""

    def begin_tools(self, tools: Sequence[str], context_tokens: int) -> None:
        """Begin the run of tools; ``context_tokens`` would have to be read again if the cache were lost."""

    async def end_tools(self) -> Outcome | None:
        """Return when the request has a slot again, or the outcome that ends it."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: admitted to a slot, answered or failed; it may take several generations of the engine.

    ``job_name`` is the caller's name for it, in every log line and incident. ``params`` reach the engine untouched,
    except for the fields that are ours. ``markup`` says that the model may call tools with ``<tool_request>``.
    ``journal`` records calls of tools across a crash; without one they are lost. Without ``is_watched`` the answer is
    not read before it is complete. ``adapter`` names one of the worker's. Without a ``frame`` the BIOS is that of the
    specification's "Worker interface": the time of the request, and the rest of the tool budget. Without a ``slot`` the
    request keeps its own while its tools run. An engine that knows scopes shares prefixes only among requests of one
    ``cache_owner``; a connection to an attached server is kept for requests of one ``owner``. With ``records`` the
    answer has the ids of its tokens, and with ``records_logprobs`` their logprobs.
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
    records: TokenDetail | None = None


def user_conversation(user_prompt: str) -> tuple[Message, ...]:
    """Return the conversation that consists of one user prompt."""
    return (Message(role="user", content=user_prompt),)


def parse_tools(documents: Sequence[object]) -> tuple[ToolDefinition, ...]:
    """Return tools for OpenAI definitions; a ``ToolDefinition`` stays as it is.

    Raises:
        InvalidTool: one of them is no definition.
    """
    return tuple(
        document if isinstance(document, ToolDefinition) else ToolDefinition.parse(document) for document in documents
    )

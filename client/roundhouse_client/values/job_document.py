"""A job as it is posted, for type checkers: ``job: JobDocument = {...}`` is checked as it is written.

A plain mapping does as well; the service checks both, and says of each fault where it is.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Required, TypedDict


class ValidationDocument(TypedDict, total=False):
    """The form of an answer: one of ``choices``, ``pattern`` and ``json_schema``."""

    choices: Sequence[str]
    pattern: str
    json_schema: Mapping[str, object]
    retries: int
    constrain: Literal["auto", "off"]


class KeepDocument(TypedDict, total=False):
    """The bound of what is shown of the past: one of ``rounds`` and ``tokens``."""

    rounds: int | None
    tokens: int | None


class SummaryDocument(TypedDict, total=False):
    """The way in which rounds are summed up that are left out: by the agent ``self``, or by another."""

    by: str
    max_tokens: int
    prompt: str | None


class MemoryDocument(TypedDict, total=False):
    """The bound of the past that an agent is shown."""

    keep: Required[Literal["all", "auto"] | KeepDocument]
    summary: SummaryDocument | None


class AgentDocument(TypedDict, total=False):
    """One speaker of a job."""

    id: Required[str]
    model: str
    role: str
    system: str
    params: Mapping[str, object]
    visible_to: Sequence[str] | None
    speak_after_within_round: Sequence[str]
    validation: ValidationDocument | None
    markup: bool
    tools: Sequence[Mapping[str, object]]
    exit_tools: Sequence[Mapping[str, object]]
    on_failure: Literal["end", "skip", "leave"]
    by: Literal["model", "caller"]
    wait_s: float | None
    otherwise: str | None
    memory: MemoryDocument | None


class CastDocument(TypedDict, total=False):
    """An agent's fields that differ in one conversation."""

    system: str
    params: Mapping[str, object]
    model: str
    tools: Sequence[Mapping[str, object]]
    validation: ValidationDocument | None


class ConditionDocument(TypedDict, total=False):
    """A condition that ends a conversation before its rounds are over: one of seven; the first four have an agent."""

    agent: str
    says: Sequence[str]
    matches: str
    field: str
    equals: str | float | bool
    signal: str
    agree: Sequence[str]
    unchanged: int
    answer_tokens: int


class BeforeDocument(TypedDict):
    """A turn of a recorded conversation."""

    agent: str
    round: int


class FromDocument(TypedDict, total=False):
    """The recorded conversation with which one begins: all of it, its first rounds, or up to a turn."""

    job: Required[str]
    conversation: Required[str]
    rounds: int | None
    before: BeforeDocument | None


# ``from`` is a word of Python's, so these are written as a mapping.
_Begun = TypedDict("_Begun", {"from": FromDocument}, total=False)


class ConversationDocument(_Begun, total=False):
    """One conversation of a job; without a prompt it has that of the one which it is ``from``."""

    prompt: str | None
    id: str
    rounds: int
    until: Sequence[ConditionDocument] | None
    variables: Mapping[str, str | float | bool] | None
    agents: Mapping[str, CastDocument]
    weights: Literal["pinned"]
    metadata: Mapping[str, object]


class PromptsDocument(TypedDict, total=False):
    """Words of the author's own in place of Roundhouse's."""

    context: str
    cue: str
    quote: str
    invalid: str
    left: str


class WebhookDocument(TypedDict, total=False):
    """The listener to the job's end, and the name of the secret that the message is signed with."""

    url: Required[str]
    secret: str


class JobDocument(TypedDict, total=False):
    """Agents, and the conversations that they are to hold."""

    agents: Required[Sequence[AgentDocument]]
    conversations: Required[Sequence[ConversationDocument]]
    name: str
    mode: Literal["rounds", "free", "led"]
    leader: str | None
    prompt_at: Literal["start", "queue"]
    view: Literal["own", "shared"]
    system: str
    prompts: PromptsDocument
    rounds: int
    until: Sequence[ConditionDocument]
    memory: MemoryDocument | None
    priority: int
    metadata: Mapping[str, object]
    webhook: WebhookDocument

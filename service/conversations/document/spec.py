"""A job as callers write it.

Source: specification, "Job documents".
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, TypeAdapter, ValidationError, ValidationInfo

from service.conversations.job.job import Mode, OnFailure, PromptAt, SpokenBy, View
from service.conversations.job.validation import folded
from service.conversations.job.variables import written
from service.conversations.job.wording import DEFAULT_ROLE, phrase_fault
from service.formats.faults import Rules, StrictModel, rules
from transport.answer_bound import laid_over
from workers.policy.continuation import Continuation, continuation_of
from workers.tools.schemas import pattern_trouble, schema_trouble

NO_CONTROLS: Final = r"[^\x00-\x1f\x7f-\x9f]"
REFERENCES: Final = "{mcp: SERVER, only: [NAME]} or {python: NAME} names tools that a model has; signals are spelt out"
MOST_EQUALS: Final = 1000
MOST_WAIT_S: Final = 10 * 365 * 86_400.0  # longest wait for a caller
CONDITIONS: Final = ("says", "matches", "field", "signal", "agree", "unchanged", "answer_tokens")
OF_WORDS: Final = frozenset({"says", "matches", "field"})  # conditions on what one agent says
OF_ONE: Final = OF_WORDS | {"signal"}  # conditions that may name one agent
# The name of a job or conversation, which may not exist
Name = Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")]
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$")]


def usable_phrase(text: str | None, info: ValidationInfo) -> str | None:
    """Check a phrase by the name of its field."""
    fault = phrase_fault(str(info.field_name), text) if text is not None else None
    if fault is not None:
        raise ValueError(fault)
    return text


Phrase = Annotated[str | None, AfterValidator(usable_phrase)]


def plain_value(value: object) -> object:
    """Check that the value of a variable or of a condition's field is neither a list nor a mapping."""
    if not isinstance(value, str | int | float):
        raise ValueError("must be text, a number, true or false")  # noqa: TRY004 - pydantic takes a ValueError
    return value


Scalar = Annotated[object, AfterValidator(plain_value)]


def choices_trouble(choices: list[str]) -> str | None:
    """Return the reason why these choices cannot be told apart, or None."""
    distinct = {folded(choice) for choice in choices}
    is_usable = len(distinct) == max(1, len(choices)) and "" not in distinct
    return None if is_usable else "must be given, hold words, and differ by more than letter case and spaces"


FORMS: Final[Mapping[str, Callable[[Any], str | None]]] = {
    "choices": choices_trouble,
    "pattern": pattern_trouble,
    "json_schema": schema_trouble,
}


class ValidationSpec(StrictModel):
    """The form that an answer must have: one of three kinds."""

    choices: list[Annotated[str, Field(min_length=1)]] | None = None
    pattern: str | None = None
    json_schema: dict[str, object] | None = None
    retries: int = Field(default=3, ge=0, le=100, strict=True)
    constrain: Literal["auto", "off"] = "auto"

    @rules
    def _is_one_kind(self) -> Rules:
        given = [name for name in FORMS if getattr(self, name) is not None]
        yield len(given) != 1, "a validation has one of choices, pattern and json_schema"
        trouble = FORMS[given[0]](getattr(self, given[0]))
        yield trouble, f"{given[0]}: {trouble}"


class McpReference(StrictModel):
    """Tools of an MCP server of the agent's model: all, or ``only`` some."""

    mcp: str
    only: list[str] | None = None


class PythonReference(StrictModel):
    """A Python callable of the agent's model."""

    python: str


_REFERENCE: Final = TypeAdapter[McpReference | PythonReference](McpReference | PythonReference)


class KeepSpec(StrictModel):
    """The bound of what is shown of the past, in rounds or in tokens."""

    rounds: int | None = Field(default=None, ge=1, strict=True)
    tokens: int | None = Field(default=None, ge=1, strict=True)

    @rules
    def _is_one_kind(self) -> Rules:
        yield (self.rounds is None) == (self.tokens is None), "all, auto, or one of rounds and tokens"


class SummarySpec(StrictModel):
    """The way in which rounds are summed up that are left out: by the agent itself, or by another one."""

    by: str = "self"
    max_tokens: int = Field(default=200, ge=1, le=100_000, strict=True)
    prompt: str | None = Field(default=None, min_length=1)


class MemorySpec(StrictModel):
    """The bound of the past that an agent is shown."""

    keep: Literal["all", "auto"] | KeepSpec
    summary: SummarySpec | None = None


class RecordSpec(StrictModel):
    """The record of answers' tokens: their ids, and their logprobs beside them."""

    tokens: bool = Field(default=False, strict=True)
    logprobs: bool = Field(default=False, strict=True)

    @rules
    def _is_of_tokens(self) -> Rules:
        yield self.logprobs and not self.tokens, "logprobs stand beside tokens: true"


class GroupSpec(StrictModel):
    """The number of alike conversations in place of one; in the stored document each of them is written out."""

    samples: int = Field(ge=1, le=1024, strict=True)


class SampleSpec(StrictModel):
    """The place of a conversation among those of its group."""

    group: Identifier
    number: int = Field(ge=0, strict=True)
    of: int = Field(ge=1, strict=True)

    @rules
    def _is_one_of_them(self) -> Rules:
        yield self.number >= self.of, f"number: counts from 0, and the group has {self.of}"


class RewardSpec(StrictModel):
    """The source of a conversation's reward: one of three kinds."""

    tool: str | None = None
    agent: str | None = None
    pattern: str | None = None
    python: str | None = None

    @rules
    def _is_one_source(self) -> Rules:
        given = [name for name in ("tool", "agent", "python") if getattr(self, name) is not None]
        yield len(given) != 1, "a reward has one of tool, agent and python"
        yield (self.agent is None) != (self.pattern is None), "agent and pattern stand together"
        trouble = self.pattern is not None and pattern_trouble(self.pattern)
        yield trouble, f"pattern: {trouble}"


class AgentSpec(StrictModel):
    """One speaker of a job."""

    id: Identifier
    role: str = DEFAULT_ROLE
    model: str = Field(default="", json_schema_extra={"minLength": 1})  # the configuration lists the models
    system: str = ""
    params: dict[str, object] = Field(default_factory=dict)
    visible_to: list[str] | None = None
    speak_after_within_round: list[str] = Field(default_factory=list)
    validation: ValidationSpec | None = None
    markup: bool = Field(default=False, strict=True)
    tools: list[object] = Field(default_factory=list)
    exit_tools: list[object] = Field(default_factory=list)
    on_failure: OnFailure = OnFailure.END
    by: SpokenBy = SpokenBy.MODEL
    wait_s: float | None = Field(default=None, gt=0, le=MOST_WAIT_S)
    otherwise: str | None = None
    memory: MemorySpec | None = None
    record: RecordSpec | None = None


class ConditionSpec(StrictModel):
    """A condition that ends a conversation before its rounds are over: one of seven kinds."""

    agent: str | None = None
    says: list[Annotated[str, Field(max_length=1000)]] | None = Field(default=None, min_length=1, max_length=100)
    matches: str | None = None
    field: str | None = Field(default=None, max_length=1000, pattern=r"^[^.]+(\.[^.]+)*$")
    equals: Scalar | None = None
    signal: str | None = None
    agree: list[str] | None = Field(default=None, min_length=2)
    unchanged: int | None = Field(default=None, ge=1, strict=True)
    answer_tokens: int | None = Field(default=None, ge=1, strict=True)

    @rules
    def _is_one_kind(self) -> Rules:
        given = [name for name in CONDITIONS if getattr(self, name) is not None]
        yield len(given) != 1, f"a condition has one of {', '.join(CONDITIONS[:-1])} and {CONDITIONS[-1]}"
        kind, agree = given[0], self.agree or ()
        yield kind in OF_WORDS and self.agent is None, f"{kind} wants an agent beside it"
        yield (self.field is None) != (self.equals is None), "field and equals stand together"
        yield kind not in OF_ONE and self.agent is not None, f"{kind} is of several agents, and has no agent beside it"
        yield not all(map(folded, self.says or ())), "says: a turn that says nothing fulfils no condition"
        yield len(set(agree)) < len(agree), "agree: an agent is named twice"
        is_long = isinstance(self.equals, str) and len(self.equals) > MOST_EQUALS
        yield is_long, f"equals: a text of at most {MOST_EQUALS} characters"
        trouble = self.matches is not None and pattern_trouble(self.matches)
        yield trouble, f"matches: {trouble}"

    @property
    def told(self) -> str:
        """The condition in words."""
        agent = self.agent or "an agent"
        words = {
            "says": f"{agent} says {' or '.join(self.says or ())}",
            "matches": f"{agent} matches {self.matches}",
            "field": f"{agent} says {self.field}: {written(self.equals)}",
            "signal": f"{agent} sends {self.signal}",
            "agree": f"{', '.join(self.agree or ())} agree",
            "unchanged": f"unchanged for {self.unchanged} rounds",
            "answer_tokens": f"answers of {self.answer_tokens} tokens",
        }
        return next(words[kind] for kind in CONDITIONS if getattr(self, kind) is not None)


class CastSpec(StrictModel):
    """An agent's fields that differ in one conversation; others are the job's."""

    system: str = ""
    params: dict[str, object] = Field(default_factory=dict)
    model: str = Field(default="", json_schema_extra={"minLength": 1})
    tools: list[object] = Field(default_factory=list)
    validation: ValidationSpec | None = None

    def applied_to(self, agent: AgentSpec) -> AgentSpec:
        """Return an agent with these fields: parameters are merged by name, other fields are replaced."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if "params" in given:
            given["params"] = laid_over(agent.params, self.params)
        return agent.model_copy(update=given)


Conditions = Annotated[list[ConditionSpec], Field(max_length=32)]


class BeforeSpec(StrictModel):
    """A turn of a recorded conversation."""

    agent: str
    round: int = Field(ge=0, strict=True)


class FromSpec(StrictModel):
    """The recorded conversation with which one begins: all of it, its first rounds, or up to a turn."""

    job: Name
    conversation: Name
    rounds: int | None = Field(default=None, ge=1, strict=True)
    before: BeforeSpec | None = None

    @rules
    def _is_one_kind(self) -> Rules:
        yield self.rounds is not None and self.before is not None, "rounds or before, not both"


class ConversationSpec(StrictModel):
    """One conversation of a job; without a prompt of its own it has that of the one which it is ``from``."""

    id: Identifier | None = None
    prompt: str | None = None
    source: FromSpec | None = Field(default=None, alias="from")
    rounds: int | None = Field(default=None, ge=1, strict=True)
    until: Conditions | None = None
    variables: dict[str, Scalar] | None = None
    agents: dict[str, CastSpec] = Field(default_factory=dict)
    weights: Literal["pinned"] | None = None
    group: GroupSpec | None = None
    sample: SampleSpec | None = None
    max_staleness: int | None = Field(default=None, ge=0, strict=True)
    metadata: dict[str, object] = Field(default_factory=dict)


class PromptsSpec(StrictModel):
    """Words of the author's own in place of Roundhouse's; each is a ``string.Template``."""

    context: Phrase = None
    cue: Phrase = None
    quote: Phrase = None
    invalid: Phrase = None
    left: Phrase = None


class WebhookSpec(StrictModel):
    """The listener to the job's end, and the name of the secret that the message is signed with."""

    url: HttpUrl
    secret: str | None = None


class OverWeightsSpec(StrictModel):
    """Answers that go on with weights that have changed meanwhile."""

    over_weights: Literal[True]


def _known_continuation(given: object) -> object:
    """Check it before the union, which would report a fault once per member; YAML reads on and off as booleans."""
    if given is None or isinstance(given, OverWeightsSpec):
        return given
    known = continuation_of(given)
    return {"over_weights": True} if known is Continuation.OVER_WEIGHTS else known.value


GoesOn = Annotated[Literal["on", "off"] | OverWeightsSpec, BeforeValidator(_known_continuation)]


class JobSpec(StrictModel):
    """A job: agents, and the conversations that they are to hold."""

    # Databases refuse a NUL, and control characters would reach terminals.
    name: str = Field(default="job", min_length=1, max_length=200, pattern=f"^{NO_CONTROLS}*$")
    mode: Mode = Mode.ROUNDS
    leader: str | None = None
    prompt_at: PromptAt = PromptAt.START
    view: View = View.OWN
    continuation: GoesOn | None = None
    system: str = ""
    prompts: PromptsSpec = Field(default_factory=PromptsSpec)
    rounds: int = Field(default=1, ge=1, strict=True)
    until: Conditions = Field(default_factory=list)
    memory: MemorySpec | None = None
    record: RecordSpec | None = None
    group: GroupSpec | None = None
    reward: RewardSpec | None = None
    max_staleness: int | None = Field(default=None, ge=0, strict=True)
    on_stale: Literal["drop", "end"] = "drop"
    agents: list[AgentSpec] = Field(min_length=1)
    conversations: list[ConversationSpec] = Field(min_length=1)
    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000, strict=True)
    metadata: dict[str, object] = Field(default_factory=dict)
    webhook: WebhookSpec | None = None


def agents_of(spec: JobSpec) -> Iterator[tuple[str, AgentSpec | CastSpec]]:
    """Yield the agents of a job and their differences in conversations, with their places."""
    for index, agent in enumerate(spec.agents):
        yield f"agents[{index}]", agent
    for index, conversation in enumerate(spec.conversations):
        for name, given in conversation.agents.items():
            yield f"conversations[{index}].agents.{name}", given


def cast_specs(spec: JobSpec, conversation: ConversationSpec) -> list[AgentSpec]:
    """Return the agents that differ in a conversation, with the differences; unknown names are left out."""
    return [
        conversation.agents[agent.id].applied_to(agent)
        for agent in (spec.agents if conversation.agents else ())
        if agent.id in conversation.agents
    ]


def spoken_with(spec: JobSpec, model: str) -> JobSpec:
    """Return a job whose agents all use one model, except those that a caller speaks for."""
    asked = {"model": model}
    agents = [each if each.by is SpokenBy.CALLER else each.model_copy(update=asked) for each in spec.agents]
    conversations = []
    for conversation in spec.conversations:
        casts = {name: cast for name, cast in conversation.agents.items() if "model" in cast.model_fields_set}
        given = {**conversation.agents, **{name: cast.model_copy(update=asked) for name, cast in casts.items()}}
        conversations.append(conversation.model_copy(update={"agents": given}) if casts else conversation)
    return spec.model_copy(update={"agents": agents, "conversations": conversations})


def is_tool_reference(entry: object) -> bool:
    """Whether a tool is a reference to an MCP server or a Python callable instead of a definition."""
    return isinstance(entry, dict) and "function" not in entry and bool({"mcp", "python"} & entry.keys())


def reference_of(entry: object) -> McpReference | PythonReference | None:
    """Return the reference of an agent's tool, None if its form is wrong."""
    try:
        return _REFERENCE.validate_python(entry)
    except ValidationError:
        return None

"""A job as the rest of the service knows it: valid, complete, unchanging."""

import json
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NamedTuple, NewType

import msgspec
from msgspec.structs import replace

from service.conversations.job.client_request import PostedRequest
from service.conversations.job.memory import Memory
from service.conversations.job.until import Until
from service.conversations.job.validation import Validation
from service.conversations.job.wording import Phrases
from workers.requests.request import CONSTRAINTS
from workers.tools.definition import ToolDefinition

JobId = NewType("JobId", str)
END: Final = "end"  # what a leader says that wants no more of a conversation
TEXT: Final = {"type": "text"}  # the response_format that asks for nothing


class Mode(StrEnum):
    """The order in which the agents of a conversation take turns."""

    ROUNDS = "rounds"
    FREE = "free"
    LED = "led"  # an agent names who speaks next (specification, "Led mode")


class OnFailure(StrEnum):
    """The effect of an agent's failed turn on its conversation (specification, "Failures of agents")."""

    END = "end"  # the conversation fails
    SKIP = "skip"  # the agent is silent in this round
    LEAVE = "leave"  # and from now on


class SpokenBy(StrEnum):
    """The speaker of an agent's turns."""

    MODEL = "model"
    CALLER = "caller"  # a program or a person (specification, "Turns of callers")


class TurnKind(StrEnum):
    """The purpose of a turn."""

    TURN = "turn"
    SUMMARY = "summary"  # of what an agent is shown no more (specification, "Memory")


class PromptAt(StrEnum):
    """In free mode: when an agent's prompt is made, and so what it has heard."""

    START = "start"  # when its turn starts (specification, "Free mode")
    QUEUE = "queue"  # when it is queued for it (specification, "Free mode")


class View(StrEnum):
    """The form in which an agent sees the discussion (specification, "Views")."""

    OWN = "own"  # its own words as the assistant's, those of others as the user's
    SHARED = "shared"  # as one text, the same for all who may see the same


class GroupBy(StrEnum):
    """The trait that turns must share to run on a worker at the same time."""

    PARAMETERS = "parameters"  # adapter and sampling parameters (specification, "Grouping")
    ADAPTER = "adapter"  # llama.cpp decodes one set of adapters at a time


def new_job_id() -> JobId:
    """Return an id that no job has had."""
    return JobId(f"job-{secrets.token_hex(8)}")


class TurnKey(NamedTuple):
    """One agent speaking once in one round of one conversation."""

    job_id: JobId
    conversation_id: str
    agent_id: str
    round: int


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """One speaker; ``visible_to`` None means all, ``waits_for`` holds whom it hears first in the same round.

    ``model`` is one that workers serve; ``adapter`` the one on top of it that this agent asked for by name. Its turns
    take ``slots`` of a worker each, or all that there are. One that a caller speaks ``by`` has no model: its turns are
    awaited for ``wait_s`` seconds, or for ever, and then it says ``otherwise``, or they fail. Without a ``memory``
    it is shown all of the past.
    """

    id: str
    role: str
    model: str
    system: str
    adapter: str | None = None
    params: Mapping[str, object] = msgspec.field(default_factory=dict)
    visible_to: frozenset[str] | None = None
    waits_for: frozenset[str] = frozenset()
    validation: Validation | None = None
    markup: bool = False
    tools: tuple[ToolDefinition, ...] = ()
    exit_tools: tuple[ToolDefinition, ...] = ()
    on_failure: OnFailure = OnFailure.END
    slots: int = 1
    by: SpokenBy = SpokenBy.MODEL
    wait_s: float | None = None
    otherwise: str | None = None
    memory: Memory | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether its author's own parameters hold its answers to a form."""
        given = {name for name in CONSTRAINTS & self.params.keys() if self.params[name]}
        plain = isinstance(self.params.get("response_format"), Mapping) and self.params["response_format"] == TEXT
        return bool(given - {"response_format"} if plain else given)

    def signature(self, by: GroupBy) -> str:
        """Return the signature of an agent's turns: turns with equal signatures may run side by side."""
        params = json.dumps(self.params, sort_keys=True, default=str) if by is GroupBy.PARAMETERS else ""
        return f"{self.adapter or ''} {params}"


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """An agent of whom a conversation has inherited words, and that its job lacks.

    It is read by those to whom it was shown: ``waited_for_by`` those that heard it in its round.
    """

    id: str
    role: str
    visible_to: frozenset[str] | None
    waited_for_by: frozenset[str]


class Heritage(msgspec.Struct, frozen=True, kw_only=True):
    """The turns that a conversation has inherited of a ``source``: of each agent those of rounds below its ``ends``.

    A conversation that begins with nothing has no ``source``.
    ``first`` is each agent's first round of its own (none in ``mode: led``), ``turns`` how many turns the conversation
    does not have for that, ``speakers`` who speaks first. ``origins`` are the conversations in which they were spoken,
    the oldest first; ``alike`` are agents whose memory is that of those from one on. The answers of ``formers`` have
    ``former_tokens`` together. With ``is_lost`` the turns are gone: their owner has deleted them.

    Source: specification, "Begun from a record".
    """

    source: tuple[JobId, str] | None = None
    ends: Mapping[str, int] = {}
    first: Mapping[str, int] = {}
    turns: int = 0
    formers: tuple[Former, ...] = ()
    former_tokens: int = 0
    speakers: tuple[str, ...] = ()
    origins: tuple[tuple[JobId, str], ...] = ()
    alike: Mapping[str, int] = {}
    is_lost: bool = False


# One for all conversations: a hundred thousand may wait at once.
NOBODY: Final[Mapping[str, Agent]] = {}
NO_HERITAGE: Final = Heritage()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """One independent exchange of a job's agents; one that ``is_pinned`` wants the same weights for all its turns.

    It is over with its ``rounds``, or before them with a round in which a condition of ``until`` holds. Its ``prompt``
    has the values of its ``variables``; systems of agents are filled as they are asked. ``cast`` holds the agents that
    differ in it from the job's, by id.
    ``prompt_chars`` is how long its prompt is where that is not kept here. One that was ``posted`` is asked with a
    client's body.
    """

    id: str
    prompt: str
    rounds: int
    until: Until = ()
    variables: Mapping[str, str] | None = None
    cast: Mapping[str, Agent] = msgspec.field(default_factory=lambda: NOBODY)
    is_pinned: bool = False
    prompt_chars: int | None = None
    heritage: Heritage = NO_HERITAGE
    posted: PostedRequest | None = None
    metadata: Mapping[str, object] = msgspec.field(default_factory=dict)

    @property
    def chars(self) -> int:
        """The length of its prompt, in characters."""
        return len(self.prompt) if self.prompt_chars is None else self.prompt_chars

    def with_posted(self, request: PostedRequest) -> "Conversation":
        """Return it with a client's body."""
        return replace(self, posted=request, prompt_chars=request.chars)

    def cast_agent(self, agent: Agent) -> Agent:
        """Return an agent of the job as it is in this conversation."""
        return self.cast.get(agent.id, agent) if self.cast else agent


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """The listener to a job's end; ``secret`` is the name of one that the operator has configured."""

    url: str
    secret: str | None = None

    @property
    def document(self) -> dict[str, object]:
        """The form in which it is stored."""
        return {"url": self.url, "secret": self.secret}


def _models(agents: Iterable[Agent]) -> tuple[str, ...]:
    return tuple({agent.model: None for agent in agents if agent.model})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Agents and the conversations that they hold; ``system`` stands before every agent's own.

    In ``mode: led`` the ``leader`` names who speaks next.
    ``owner`` is the name of the key that it was posted with, None where it belongs to none.
    """

    id: JobId
    name: str
    agents: tuple[Agent, ...]
    conversations: tuple[Conversation, ...]
    mode: Mode = Mode.ROUNDS
    leader: str | None = None
    prompt_at: PromptAt = PromptAt.START
    priority: int = 0
    metadata: Mapping[str, object] = msgspec.field(default_factory=dict)
    webhook: Webhook | None = None
    system: str = ""
    view: View = View.OWN
    prompts: Phrases = msgspec.field(default_factory=Phrases)
    owner: str | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models that its agents use, in whichever conversation."""
        return _models(self.all_agents())

    def all_agents(self) -> Iterator[Agent]:
        """Iterate over the agents, and over those that differ in some conversation."""
        yield from self.agents
        for conversation in self.conversations:
            yield from conversation.cast.values()

    def first_models(self) -> list[tuple[str, ...]]:
        """Return, for each conversation, the models of those who may speak at its very start.

        Where those are callers, any node that has one of the job's models may begin it.
        """
        first = self.first_agents
        common = _models(first) or self.models
        return [
            (_models(map(each.cast_agent, self._first_in(each))) or self.models)
            if each.cast or each.heritage.source
            else common
            for each in self.conversations
        ]

    def _first_in(self, conversation: Conversation) -> tuple[Agent, ...]:
        if conversation.heritage.source is None:
            return self.first_agents
        return tuple(agent for agent in self.agents if agent.id in conversation.heritage.speakers)

    @property
    def first_turns(self) -> Counter[str]:
        """The number of each model's turns that may start at the very start."""
        first = {agent.id: agent.model for agent in self.first_agents}
        plain = [conversation for conversation in self.conversations if conversation.heritage.source is None]
        turns = Counter({model: times * len(plain) for model, times in Counter(first.values()).items()})
        for conversation in self.conversations:
            if conversation.heritage.source is not None:
                turns.update(conversation.cast_agent(agent).model for agent in self._first_in(conversation))
                continue
            for name, agent in conversation.cast.items():
                if name in first:
                    turns[first[name]] -= 1
                    turns[agent.model] += 1
        del turns[""]  # of callers
        return +turns

    @property
    def first_agents(self) -> tuple[Agent, ...]:
        """Those who may speak at the very start."""
        if self.mode is Mode.LED:
            return tuple(agent for agent in self.agents if agent.id == self.leader)
        return tuple(agent for agent in self.agents if not agent.waits_for)

    @property
    def total_turns(self) -> int:
        """The number of the job's turns, unless conditions end conversations before."""
        return sum(map(self.most_turns, self.conversations))

    def most_turns(self, conversation: Conversation) -> int:
        """Return how many turns a conversation has, unless a condition ends it before."""
        whole = (2 if self.mode is Mode.LED else len(self.agents)) * conversation.rounds
        return whole - conversation.heritage.turns

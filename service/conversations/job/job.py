"""A job as the rest of the service uses it: valid, complete, immutable."""

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
from transport.request import TokenDetail
from workers.policy.continuation import Continuation
from workers.requests.request import CONSTRAINTS
from workers.tools.definition import ToolDefinition

JobId = NewType("JobId", str)
END: Final = "end"  # a leader's answer that ends the conversation
TEXT: Final = {"type": "text"}  # the response_format without a constraint


class Mode(StrEnum):
    """The order in which the agents of a conversation take turns."""

    ROUNDS = "rounds"
    FREE = "free"
    LED = "led"  # an agent names the next speaker (specification, "Led mode")


class OnFailure(StrEnum):
    """The effect of an agent's failed turn on its conversation (specification, "Failures of agents")."""

    END = "end"  # the conversation fails
    SKIP = "skip"  # the agent is silent in this round
    LEAVE = "leave"  # the agent is silent from now on


class SpokenBy(StrEnum):
    """The speaker of an agent's turns."""

    MODEL = "model"
    CALLER = "caller"  # a program or a person (specification, "Turns of callers")


class TurnKind(StrEnum):
    """The purpose of a turn."""

    TURN = "turn"
    SUMMARY = "summary"  # a summary of hidden rounds (specification, "Memory")


class PromptAt(StrEnum):
    """The time in free mode at which an agent's prompt is made, which decides what it has heard."""

    START = "start"  # when its turn starts (specification, "Free mode")
    QUEUE = "queue"  # when it is queued for its turn (specification, "Free mode")


class View(StrEnum):
    """The form in which an agent sees the discussion (specification, "Views")."""

    OWN = "own"  # its own words as the assistant's, those of others as the user's
    SHARED = "shared"  # one text, the same for all agents that may read the same words


class GroupBy(StrEnum):
    """The trait that turns must share to run on a worker at the same time."""

    PARAMETERS = "parameters"  # adapter and sampling parameters (specification, "Grouping")
    ADAPTER = "adapter"  # llama.cpp decodes one set of adapters at a time


def new_job_id() -> JobId:
    """Return an id that no other job has."""
    return JobId(f"job-{secrets.token_hex(8)}")


class TurnKey(NamedTuple):
    """The key of a turn: one agent in one round of one conversation."""

    job_id: JobId
    conversation_id: str
    agent_id: str
    round: int


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """One speaker; ``visible_to`` None means all, ``waits_for`` holds the agents that it hears first in its round.

    ``model`` is one that workers serve, ``adapter`` the one on top of it that the agent named. Each of its turns takes
    ``slots`` of a worker, or all that the worker has.

    With ``by`` caller it has no model: each of its turns waits for its caller for ``wait_s`` seconds, or without limit.
    Then it says ``otherwise``, or fails. Without a ``memory`` it is shown all earlier rounds. ``record`` is what is
    recorded of its tokens.
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
    record: TokenDetail | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether its author's parameters constrain its answers."""
        given = {name for name in CONSTRAINTS & self.params.keys() if self.params[name]}
        plain = isinstance(self.params.get("response_format"), Mapping) and self.params["response_format"] == TEXT
        return bool(given - {"response_format"} if plain else given)

    def signature(self, by: GroupBy) -> str:
        """Return the signature of an agent's turns: turns with equal signatures may run side by side."""
        params = json.dumps(self.params, sort_keys=True, default=str) if by is GroupBy.PARAMETERS else ""
        return f"{self.adapter or ''} {params}"


class Former(msgspec.Struct, frozen=True, kw_only=True):
    """An agent with inherited words that the heir's job lacks.

    Agents to which it was visible read it; those in ``waited_for_by`` heard it within its round.
    """

    id: str
    role: str
    visible_to: frozenset[str] | None
    waited_for_by: frozenset[str]


class Heritage(msgspec.Struct, frozen=True, kw_only=True):
    """The turns that a conversation has inherited from a ``source``: each agent's rounds below its ``ends``.

    A conversation that inherits nothing has no ``source``. ``first`` is each agent's first own round, empty with a
    leader. ``turns`` is the number of turns that the conversation lacks because of it. ``speakers`` speak first.
    ``origins`` are the conversations where the turns were spoken, the oldest first. ``alike`` maps agents to the first
    of the origins whose memory is the same as theirs. The answers of ``formers`` have ``former_tokens`` in total. With
    ``is_lost`` the turns are gone, since their owner has deleted them.

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
    """One independent exchange of a job's agents; ``is_pinned`` wants the same weights for all its turns.

    It is over after its ``rounds``, or earlier after a round in which a condition of ``until`` holds. Its ``prompt``
    has the values of its ``variables``; systems of agents are filled in later. ``cast`` holds its agents that differ
    from the job's, by id. ``prompt_chars`` is the length of its prompt if that is not kept here. ``posted`` is a
    client's body that replaces the prompt. It ends once the weights are more than ``stale_after`` versions newer than
    those of its first turn.
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
    stale_after: int | None = None
    metadata: Mapping[str, object] = msgspec.field(default_factory=dict)

    @property
    def chars(self) -> int:
        """The length of its prompt in characters."""
        return len(self.prompt) if self.prompt_chars is None else self.prompt_chars

    def with_posted(self, request: PostedRequest) -> "Conversation":
        """Return the conversation with a client's body."""
        return replace(self, posted=request, prompt_chars=request.chars)

    def cast_agent(self, agent: Agent) -> Agent:
        """Return an agent of the job as it is in this conversation."""
        return self.cast.get(agent.id, agent) if self.cast else agent


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """The listener to a job's end; ``secret`` is the name of one in the configuration."""

    url: str
    secret: str | None = None

    @property
    def document(self) -> dict[str, object]:
        """The stored form."""
        return {"url": self.url, "secret": self.secret}


def _models(agents: Iterable[Agent]) -> tuple[str, ...]:
    return tuple({agent.model: None for agent in agents if agent.model})


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Agents and their conversations; ``system`` comes before every agent's own.

    In ``mode: led`` the ``leader`` names the next speaker. ``owner`` is the name of the key that posted it, None
    without keys. ``continuation`` counts in place of its models' own.
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
    continuation: Continuation | None = None
    prompts: Phrases = msgspec.field(default_factory=Phrases)
    owner: str | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models that its agents use in any conversation."""
        return _models(self.all_agents())

    def all_agents(self) -> Iterator[Agent]:
        """Iterate over the agents, and over those that differ in some conversation."""
        yield from self.agents
        for conversation in self.conversations:
            yield from conversation.cast.values()

    def first_models(self) -> list[tuple[str, ...]]:
        """Return, for each conversation, the models of its possible first speakers.

        If those are callers, any node with one of the job's models may begin it.
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
        """The number of each model's turns that may start at once."""
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
        del turns[""]  # turns of callers
        return +turns

    @property
    def first_agents(self) -> tuple[Agent, ...]:
        """The agents that may speak first."""
        if self.mode is Mode.LED:
            return tuple(agent for agent in self.agents if agent.id == self.leader)
        return tuple(agent for agent in self.agents if not agent.waits_for)

    @property
    def total_turns(self) -> int:
        """The number of the job's turns, unless conditions end conversations early."""
        return sum(map(self.most_turns, self.conversations))

    def most_turns(self, conversation: Conversation) -> int:
        """Return the number of a conversation's turns, unless a condition ends it early."""
        whole = (2 if self.mode is Mode.LED else len(self.agents)) * conversation.rounds
        return whole - conversation.heritage.turns

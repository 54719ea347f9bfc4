"""The part of a stored document that rollouts need, read without parsing the job again. Pure."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec
from msgspec import Struct

from service.conversations.job.variables import fill, written


class _Record(Struct, frozen=True, gc=False):
    tokens: bool = False


class _Cast(Struct, frozen=True, gc=False):
    model: str | None = None


class _Agent(Struct, frozen=True, gc=False):
    id: str
    model: str = ""
    by: str = "model"
    record: _Record | None = None


class Sample(Struct, frozen=True, gc=False):
    """The place of a conversation among those of its group."""

    group: str
    number: int
    of: int


class PostedReward(Struct, frozen=True, gc=False):
    """The source of rewards; see ``RewardSpec``."""

    tool: str | None = None
    agent: str | None = None
    pattern: str | None = None
    python: str | None = None


class _Conversation(Struct, frozen=True, gc=False):
    id: str | None = None
    prompt: str | None = None
    variables: Mapping[str, object] | None = None
    sample: Sample | None = None
    max_staleness: int | None = None
    agents: Mapping[str, _Cast] = {}


class PostedRollouts(Struct, dict=True):
    """A job, as far as rollouts go."""

    agents: Sequence[_Agent]
    conversations: Sequence[_Conversation]
    name: str = "job"
    record: _Record | None = None
    reward: PostedReward | None = None
    max_staleness: int | None = None

    @property
    def are_any(self) -> bool:
        """Whether any agent's tokens are recorded."""
        records = [each.record or self.record for each in self.agents if each.by == "model"]
        return any(record is not None and record.tokens for record in records)

    @cached_property
    def named(self) -> dict[str, _Conversation]:
        """The conversations by id."""
        return {each.id or f"c{place}": each for place, each in enumerate(self.conversations)}

    def model_of(self, agent: str, conversation: _Conversation) -> str | None:
        """Return the model or the adapter of an agent in a conversation."""
        cast = conversation.agents.get(agent)
        own = next((each.model for each in self.agents if each.id == agent), None)
        return own if cast is None or cast.model is None else cast.model

    def prompt_of(self, conversation: _Conversation) -> str:
        """Return a conversation's prompt with its variables; empty for one that has that of its source."""
        values = conversation.variables
        return fill(
            conversation.prompt or "",
            None if values is None else {name: written(value) for name, value in values.items()},
        )

    def limit_of(self, conversation: _Conversation) -> int | None:
        """Return by how many versions a conversation's tokens may be behind."""
        return self.max_staleness if conversation.max_staleness is None else conversation.max_staleness


read_rollouts: Final = msgspec.json.Decoder(PostedRollouts).decode

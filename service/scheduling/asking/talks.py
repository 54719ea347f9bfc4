"""The unfinished conversations of one job: their agents, the words said in each, and the words around them."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from service.conversations.job.job import END, Agent, Conversation, Job, Mode, TurnKey
from service.conversations.job.validation import Validation
from service.conversations.job.wording import ConversationWords
from service.conversations.record.heritage import waiting_for_formers, with_formers
from service.conversations.talk.discussion import Discussion

CHOICE_RETRIES: Final = 3  # retries of a leader's answer without a valid name


class JobTalks:
    """The conversations that prompts and memories read; written by the scheduler alone."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.agents = {agent.id: agent for agent in job.agents}
        self.places = {agent.id: number for number, agent in enumerate(job.agents)}
        self.conversations: dict[str, Conversation] = {}
        self.casts: dict[str, Mapping[str, Agent]] = {}  # by conversation: its agents
        self.words: dict[str, ConversationWords] = {}  # by conversation that has begun
        self._discussions: dict[str, Discussion] = {}
        self.extend(job.conversations)

    def __repr__(self) -> str:
        return f"<JobTalks {self.job.id} conversations={len(self.conversations)}>"

    def extend(self, conversations: Iterable[Conversation]) -> None:
        """Add further conversations of the job."""
        for conversation in conversations:
            self.conversations[conversation.id] = conversation
            cast = {**self.agents, **conversation.cast} if conversation.cast else self.agents
            heritage = conversation.heritage
            if heritage.formers:
                cast = {name: waiting_for_formers(agent, heritage) for name, agent in cast.items()}
            self.casts[conversation.id] = cast

    def discussion(self, conversation_id: str) -> Discussion:
        """Return the words of a conversation."""
        if conversation_id not in self._discussions:
            heritage = self.conversations[conversation_id].heritage
            self._discussions[conversation_id] = Discussion(
                with_formers(self.job, heritage) if heritage.formers else self.job
            )
        return self._discussions[conversation_id]

    def agent(self, key: TurnKey) -> Agent:
        """Return the agent of a turn. A leader may answer only with an agent that it may name."""
        agent = self.casts[key.conversation_id][key.agent_id]
        if self.job.mode is not Mode.LED or agent.id != self.job.leader:
            return agent
        return replace(agent, validation=Validation(retries=CHOICE_RETRIES, choices=self.may_name(key)))

    def may_name(self, key: TurnKey) -> tuple[str, ...]:
        """Return the names that a leader may answer with in a turn, with the word that ends its conversation."""
        left = self.discussion(key.conversation_id).left_before(key.round)
        return (*(name for name in self.agents if name not in {*left, self.job.leader}), END)

    def forget_words(self, conversation_id: str) -> None:
        """Forget the words of a conversation that has ended."""
        self._discussions.pop(conversation_id, None)
        self.words.pop(conversation_id, None)

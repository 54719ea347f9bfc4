"""What the turns of one job are asked: its agents, and what was said in its conversations so far."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime

from service.conversations.discussion import Discussion
from service.conversations.job import Conversation, Job, Mode, PromptAt, TurnKey
from service.conversations.prompt_messages import Rejected, render_conversation, render_rejections, render_told
from service.conversations.transcript import Attempt, Turn, UnfinishedTurn
from workers.outcome import FailureReason
from workers.requests.request import Request
from workers.tools.call_journal import CallJournal


class JobPrompts:
    """A job that has not ended, with the words that its prompts are made of; written by the scheduler alone."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.agents = {agent.id: agent for agent in job.agents}
        self.places = {agent.id: number for number, agent in enumerate(job.agents)}
        self.conversations = {conversation.id: conversation for conversation in job.conversations}
        self._discussions: dict[str, Discussion] = {}
        self._known_tokens: dict[tuple[str, str], int] = {}  # of each agent's last prompt and answer
        self._pins: dict[tuple[str, str], int] = {}  # of conversations that want one version: the first, by model

    def extend(self, conversations: Iterable[Conversation]) -> None:
        """Take further conversations of the job."""
        self.conversations |= {conversation.id: conversation for conversation in conversations}

    def discussion(self, conversation_id: str) -> Discussion:
        """Return the words of a conversation."""
        if conversation_id not in self._discussions:
            self._discussions[conversation_id] = Discussion(self.job)
        return self._discussions[conversation_id]

    def forget(self, conversation_id: str) -> None:
        """Drop the words of a conversation that has ended."""
        self._discussions.pop(conversation_id, None)
        for agent_id in self.agents:
            self._known_tokens.pop((conversation_id, agent_id), None)
        for place in [place for place in self._pins if place[0] == conversation_id]:
            del self._pins[place]

    def pin_weights(self, key: TurnKey, version: int | None) -> str | None:
        """Take the version that a turn was made with; return why it cannot be, where its conversation has another."""
        if version is not None and self.conversations[key.conversation_id].is_pinned:
            self._pins.setdefault((key.conversation_id, self.agents[key.agent_id].model), version)
        return self.check_weights(key, version)

    def check_weights(self, key: TurnKey, version: int | None) -> str | None:
        """Return why a turn cannot be made with a version: its conversation has another."""
        model = self.agents[key.agent_id].model
        pinned = self._pins.get((key.conversation_id, model))
        if pinned is None or version is None:
            return None
        return None if version == pinned else f"pinned to weights {pinned} of {model}, which has {version} by now"

    def compare_cache(self, turn: Turn) -> tuple[int, int]:
        """Return how many tokens the engine could take from its cache for a turn, and how many it took.

        What an agent's last turn held, prompt and answer, stands at the head of its next prompt.
        """
        usage, place = turn.usage, (turn.key.conversation_id, turn.key.agent_id)
        known = self._known_tokens.get(place)
        if usage.prompt_tokens is not None:
            self._known_tokens[place] = usage.prompt_tokens + (usage.completion_tokens or 0)
        if known is None or usage.cached_tokens is None:
            return 0, 0
        return known, min(known, usage.cached_tokens)

    def hear_again(self, turns: Iterable[Turn], unfinished: Iterable[UnfinishedTurn] = ()) -> None:
        """Take the turns of an earlier life of the service, each with what was visible when its prompt was made.

        Of those that are unfinished, the ones whose answers were rejected: they are asked again with what they heard.
        """
        ends: dict[str, list[datetime]] = {}
        for turn in turns:
            conversation_id, agent_id, number = turn.key[1:]
            self.pin_weights(turn.key, turn.weight_version)
            discussion = self.discussion(conversation_id)
            earlier = ends.setdefault(conversation_id, [])
            made_at = turn.queued_at if self.job.prompt_at is PromptAt.QUEUE else _prompted_at(turn.attempts)
            made_at = made_at or turn.started_at
            if self.job.mode is Mode.FREE and made_at is not None:
                discussion.make_prompt(agent_id, number, bisect_right(earlier, made_at))
            discussion.add(agent_id, number, turn.text)
            if turn.finished_at is not None:
                earlier.append(turn.finished_at)
            if self.job.prompt_at is PromptAt.QUEUE:  # with its end the agent was queued again
                discussion.make_prompt(agent_id, number + 1, len(earlier))
        for left in unfinished:
            made_at = _prompted_at(left.attempts)
            if self.job.mode is Mode.FREE and self.job.prompt_at is PromptAt.START and left.rejected and made_at:
                heard = bisect_right(ends.get(left.key.conversation_id, []), made_at)
                self.discussion(left.key.conversation_id).make_prompt(left.key.agent_id, left.key.round, heard)
        if self.job.prompt_at is PromptAt.QUEUE:  # an agent that has not spoken was queued at the very start
            for conversation_id in ends:
                for agent in self.job.agents:
                    self.discussion(conversation_id).make_prompt_once(agent.id, 0, 0)

    def has_tools(self, agent_id: str) -> bool:
        """Whether an agent may call any."""
        return bool(self.agents[agent_id].tools)

    def request(
        self,
        key: TurnKey,
        rejected: Sequence[Rejected],
        addition: str | None = None,
        journal: CallJournal | None = None,
        *,
        is_watched: bool = True,
    ) -> Request:
        """Return what a worker is asked for a turn that starts now; ``addition`` is said to its agent at the end."""
        agent, conversation = self.agents[key.agent_id], self.conversations[key.conversation_id]
        discussion = self.discussion(key.conversation_id)
        if self.job.prompt_at is PromptAt.START and not rejected:  # a re-prompt adds a reason, and nothing else
            discussion.make_prompt(key.agent_id, key.round)
        heard = discussion.heard_by(agent, key.round)
        return Request(
            job_name=f"{self.job.name}/{key.conversation_id}/{key.agent_id}/{key.round}",
            system=agent.system,
            conversation=render_told(
                render_conversation(conversation, agent, key.round, heard) + render_rejections(rejected), addition
            ),
            params=agent.params,
            tools=agent.tools,
            exit_tools=agent.exit_tools,
            markup=agent.markup,
            journal=journal,
            is_watched=is_watched,
            adapter=agent.adapter,
        )


def _prompted_at(attempts: Sequence[Attempt]) -> datetime | None:
    """Return when the newest prompt was made: a rejected answer is asked again with its own, however often."""
    rejected = (each for each in attempts if each.reason == FailureReason.VALIDATION_EXHAUSTED)
    made = next(rejected, attempts[-1] if attempts else None)
    return made.started_at if made is not None else None

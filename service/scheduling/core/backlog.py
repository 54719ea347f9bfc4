"""The work that is left, weighed by the cost of each agent's turns so far.

Weights are in turns of average length. An agent without measurements weighs 1.0. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final

from service.conversations.job.job import Conversation, Job, Mode
from service.conversations.talk.dependencies import dependencies_of
from service.conversations.talk.turn_order import Place
from service.scheduling.core.queue.ready_queue import JobLoad
from workers.policy.pace import Mean

SMALLEST: Final = 0.001  # the least weight, in turns: a turn without cost is still a turn


class Estimates:
    """The cost of turns by model and agent id; jobs of one kind use the same agent ids."""

    def __init__(self) -> None:
        self._all = Mean()
        self._by_agent: dict[tuple[str, str], Mean] = {}

    def __repr__(self) -> str:
        return f"<Estimates agents={len(self._by_agent)} turns={self._all.count} mean={self._all.value:.3f}>"

    def learn(self, model: str, agent_id: str, seconds: float) -> None:
        """Learn the seconds that one turn held its slot."""
        self._all.add(seconds)
        self._by_agent.setdefault((model, agent_id), Mean()).add(seconds)

    def weight(self, model: str, agent_id: str) -> float:
        """Return the cost of one turn of that agent, in turns of average length."""
        known = self._by_agent.get((model, agent_id))
        if known is None or not self._all.value:
            return 1.0
        return max(known.value / self._all.value, SMALLEST)


class JobBacklog:
    """The work left in one job, by the estimates at its last ``refresh``."""

    def __init__(self, job: Job, estimates: Estimates) -> None:
        self._job = job
        self._estimates = estimates
        self._is_stale = True
        self.dependencies = dependencies_of(job)
        # Turns of agents whose model differs in some conversations are counted apart, after those of all agents.
        self._apart: dict[tuple[str, str], int] | None = None
        self.models = tuple({agent.model: None for agent in job.agents if agent.model})
        self._callers = [place for place, agent in enumerate(job.agents) if not agent.model]
        self._turns_left = [0] * len(job.agents)
        # With ``mode: led``, a turn counts as the leader's until the leader has named its speaker.
        self._leader = None if job.leader is None else [agent.id for agent in job.agents].index(job.leader)
        self._rounds_left: dict[str, int] = {}
        self._most_rounds: list[tuple[int, str]] = []
        self.extend(job.conversations)
        self._weights: list[float] = []
        self._tails: list[float] = []  # the longest chain within a round that begins with each agent
        self._later: list[float] = []  # what each further round adds to it

    def __repr__(self) -> str:
        return f"<JobBacklog {self._job.id} turns={sum(self._turns_left)}>"

    def extend(self, conversations: Sequence[Conversation]) -> None:
        """Add conversations in which no turn has been spoken."""
        places, each = (range(len(self._job.agents)), 1) if self._leader is None else ((self._leader,), 2)
        plain = sum(conversation.rounds for conversation in conversations if not conversation.cast)
        for place in places:
            self._turns_left[place] += each * plain
        for conversation in conversations:
            for place in places if conversation.cast else ():
                self._turns_left[self._part(conversation, place)] += each * conversation.rounds
        self._rounds_left |= {conversation.id: conversation.rounds for conversation in conversations}
        self._most_rounds += [(-conversation.rounds, conversation.id) for conversation in conversations]
        heapq.heapify(self._most_rounds)

    def _part(self, conversation: Conversation, agent: int) -> int:
        """Return the index at which the turns of an agent in a conversation are counted."""
        default = self._job.agents[agent]
        model = conversation.cast_agent(default).model
        if model == default.model:
            return agent
        if self._apart is None:
            self._apart = {}
        part = self._apart.setdefault((default.id, model), len(self._turns_left))
        if part == len(self._turns_left):
            self._turns_left.append(0)
            self.models = tuple(dict.fromkeys((*self.models, model)))
            self._is_stale = True
        return part

    @property
    def left_for_models(self) -> int:
        """The number of unfinished turns that models speak."""
        return sum(self._turns_left) - sum(self._turns_left[place] for place in self._callers)

    @property
    def left_by_model(self) -> Counter[str]:
        """The number of each model's turns that have not ended."""
        left: Counter[str] = Counter()
        for agent, turns in zip(self._job.agents, self._turns_left, strict=False):
            if agent.model:
                left[agent.model] += turns
        for (_, model), part in (self._apart or {}).items():
            left[model] += self._turns_left[part]
        return left

    def refresh(self) -> None:
        """Mark the weights as stale; the next read weighs the turns again."""
        self._is_stale = True

    def _weigh(self) -> None:
        agents = self._job.agents
        self._is_stale = False
        of_agents = [self._estimates.weight(agent.model, agent.id) for agent in agents]
        apart = [self._estimates.weight(model, agent_id) for agent_id, model in self._apart or ()]
        self._weights = [*of_agents, *apart]
        if self._job.mode is Mode.FREE:
            self._tails = self._later = of_agents
        elif self._leader is not None:
            named = max(weight for place, weight in enumerate(of_agents) if place != self._leader)
            self._later = [of_agents[self._leader] + named] * len(agents)
            self._tails = of_agents
            self._tails[self._leader] += named
        else:
            self._tails = self.dependencies.tails(of_agents)
            # An upper bound: agents who hear no others have shorter chains
            self._later = [max(self._tails)] * len(agents)

    def path(self, place: Place, rounds: int) -> float:
        """Return the longest chain that begins with a turn in a conversation of ``rounds``, with the job's cast."""
        if self._is_stale:
            self._weigh()
        return self._tails[place.agent] + (rounds - place.round - 1) * self._later[place.agent]

    def name_speaker(self, conversation: Conversation, agent: int) -> None:
        """Count a turn for the agent that the leader named, no longer for the leader."""
        if self._leader is not None and agent != self._leader:
            self._turns_left[self._part(conversation, self._leader)] -= 1
            self._turns_left[self._part(conversation, agent)] += 1

    def count_end(self, conversation: Conversation, agent: int, *, is_earlier: bool = False) -> None:
        """Count the end of one turn; ``is_earlier`` is true if it was spoken in an earlier life of the service.

        A turn of an earlier life was never counted for a named agent, so it counts as the leader's.
        """
        of = self._leader if is_earlier and self._leader is not None else agent
        self._turns_left[self._part(conversation, of) if conversation.cast else of] -= 1

    def drop_turns(self, conversation: Conversation, spoken: Sequence[int], named: int | None) -> None:
        """Remove the turns that agents have left in a conversation that is over.

        ``spoken`` counts the ended turns of each agent. ``named`` is the agent that the leader named and that has not
        spoken.
        """
        rounds = conversation.rounds
        if self._leader is None:
            for agent, said in enumerate(spoken):
                self._turns_left[self._part(conversation, agent) if conversation.cast else agent] -= rounds - said
            return
        self._turns_left[self._part(conversation, self._leader)] -= 2 * rounds - sum(spoken) - (named is not None)
        if named is not None:
            self._turns_left[self._part(conversation, named)] -= 1

    def note_rounds(self, conversation_id: str, rounds_left: int) -> None:
        """Set the rounds that a conversation has left; 0 if it has ended."""
        if self._rounds_left[conversation_id] != rounds_left:
            self._rounds_left[conversation_id] = rounds_left
            heapq.heappush(self._most_rounds, (-rounds_left, conversation_id))

    def load(self, model: str) -> JobLoad:
        """Return the remaining load of the job, as the queue of one model sees it."""
        if self._is_stale:
            self._weigh()
        costs = [left * weight for left, weight in zip(self._turns_left, self._weights, strict=True)]
        of_model = [cost for cost, agent in zip(costs, self._job.agents, strict=False) if agent.model == model]
        if self._apart is not None:
            of_model += [costs[part] for (_, each), part in self._apart.items() if each == model]
        while -self._most_rounds[0][0] != self._rounds_left[self._most_rounds[0][1]]:
            heapq.heappop(self._most_rounds)
        path = -self._most_rounds[0][0] * max(self._later)
        return JobLoad(
            priority=self._job.priority, work=sum(costs), model_work=sum(of_model), path=path, owner=self._job.owner
        )

"""The order of speaking: in rounds, or freely (specification, "Rounds mode" and "Free mode"). Pure.

An agent's place is its index in the job, so that nothing here compares names. Every answer is a list of turns that get
ready, in the order in which they do.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import NamedTuple, Protocol

from service.conversations.job import Job, Mode


class Place(NamedTuple):
    """One turn of a conversation: the agent's index in the job, and the round."""

    agent: int
    round: int


class WaitingTurn(NamedTuple):
    """One turn that waits for others to speak, for whom, and in which round they are to."""

    place: Place
    waits_for: tuple[int, ...]
    in_round: int


class SpeakingOrder(Protocol):
    """The turn-taking of one conversation."""

    @property
    def is_over(self) -> bool:
        """Whether everybody has spoken in every round."""

    @property
    def rounds_completed(self) -> int:
        """The number of rounds in which everybody has spoken."""

    def resume(self, spoken: Sequence[Place]) -> list[Place]:
        """Begin, or go on after ``spoken`` in the order in which they were; return the turns that are ready."""

    def end_turn(self, place: Place) -> list[Place]:
        """End a turn; return the turns that are ready because of it."""

    def waiting(self) -> Iterator[WaitingTurn]:
        """Iterate over the turns that wait for others: those of the present round, and the next one's first."""


def speaking_order(job: Job, dependencies: "Dependencies", rounds: int) -> SpeakingOrder:
    """Return the turn-taking of a conversation of ``job``."""
    if job.mode is Mode.FREE or len(job.agents) == 1:  # one agent has nobody to wait for: both orders are the same
        return FreeOrder(len(job.agents), rounds)
    return RoundsOrder(dependencies, rounds)


def dependencies_of(job: Job) -> "Dependencies":
    """Return whom the agents of ``job`` wait for."""
    places = {agent.id: number for number, agent in enumerate(job.agents)}
    return _dependencies(tuple(tuple(sorted(places[other] for other in agent.waits_for)) for agent in job.agents))


class Dependencies:
    """Whom each agent waits for within a round: of agents' places, sorted. Immutable, so jobs of one shape share it."""

    def __init__(self, waits_for: tuple[tuple[int, ...], ...]) -> None:
        self.waits_for = waits_for
        self.masks = tuple(_mask(waited) for waited in self.waits_for)
        self.everybody = _mask(range(len(self.waits_for)))
        followers: list[list[int]] = [[] for _ in self.waits_for]
        for agent, waited in enumerate(self.waits_for):
            for other in waited:
                followers[other].append(agent)
        self.followers = tuple(map(tuple, followers))
        self._last_first = self._order()

    def tails(self, weights: Sequence[float]) -> list[float]:
        """Return, for each agent, the weight of the longest chain within a round that begins with it."""
        tails = [0.0] * len(self.waits_for)
        for agent in self._last_first:
            tails[agent] = weights[agent] + max((tails[other] for other in self.followers[agent]), default=0.0)
        return tails

    def _order(self) -> tuple[int, ...]:
        """Return the agents such that each comes after all that wait for it."""
        return tuple(TopologicalSorter(dict(enumerate(self.followers))).static_order())


_dependencies = lru_cache(maxsize=64)(Dependencies)  # a request of a client is a job of its own, all of one shape


def _mask(agents: Iterable[int]) -> int:
    return sum(1 << agent for agent in agents)


def _agents(mask: int) -> list[int]:
    return [agent for agent in range(mask.bit_length()) if mask >> agent & 1]


class RoundsOrder:
    """Rounds: an agent speaks after those it waits for, and a round begins when the last one has ended.

    Sets of agents are bits of a number: a hundred thousand conversations may wait at once.
    """

    __slots__ = ("_dependencies", "_pending", "_round", "_rounds", "_spoken")

    def __init__(self, dependencies: Dependencies, rounds: int) -> None:
        self._dependencies = dependencies
        self._rounds = rounds
        self._round = 0
        self._spoken = 0  # of this round
        self._pending = 0  # who waits for others in it

    def __repr__(self) -> str:
        return f"<RoundsOrder {self._round}/{self._rounds} spoken={_agents(self._spoken)}>"

    @property
    def is_over(self) -> bool:
        """Whether the last round has ended."""
        return self._round == self._rounds

    @property
    def rounds_completed(self) -> int:
        """The number of rounds that have ended."""
        return self._round

    def resume(self, spoken: Sequence[Place]) -> list[Place]:
        """Begin, or go on in the first round that has not ended."""
        heard: dict[int, int] = {}
        for place in spoken:
            heard[place.round] = heard.get(place.round, 0) | 1 << place.agent
        while not self.is_over and heard.get(self._round) == self._dependencies.everybody:
            self._round += 1
        self._spoken = heard.get(self._round, 0)
        return self._open()

    def end_turn(self, place: Place) -> list[Place]:
        """Take a turn's end: others may have waited for it, or the whole round has."""
        self._spoken |= 1 << place.agent
        if self._spoken == self._dependencies.everybody:
            self._round += 1
            self._spoken = 0
            return self._open()
        return self._release(self._dependencies.followers[place.agent])

    def waiting(self) -> Iterator[WaitingTurn]:
        """Iterate over the turns that wait in this round, and for its end."""
        for agent in _agents(self._pending):
            absent = self._dependencies.masks[agent] & ~self._spoken
            yield WaitingTurn(Place(agent, self._round), tuple(_agents(absent)), self._round)
        if self._round + 1 < self._rounds:
            silent = self._dependencies.everybody & ~self._spoken
            yield WaitingTurn(Place(0, self._round + 1), tuple(_agents(silent)), self._round)

    def _open(self) -> list[Place]:
        if self.is_over:
            return []
        self._pending = self._dependencies.everybody & ~self._spoken
        return self._release(_agents(self._pending))

    def _release(self, agents: Iterable[int]) -> list[Place]:
        masks = self._dependencies.masks
        free = [agent for agent in agents if self._pending >> agent & 1 and not masks[agent] & ~self._spoken]
        self._pending &= ~_mask(free)
        return [Place(agent, self._round) for agent in free]


class FreeOrder:
    """Free mode: an agent that has spoken goes to the back of the queue, until each has had all its turns.

    Source: specification, "Free mode".
    """

    __slots__ = ("_rounds", "_spoken")

    def __init__(self, agents: int, rounds: int) -> None:
        self._rounds = rounds
        self._spoken = [0] * agents

    def __repr__(self) -> str:
        return f"<FreeOrder rounds={self._rounds} spoken={self._spoken}>"

    @property
    def is_over(self) -> bool:
        """Whether everybody has had all its turns."""
        return min(self._spoken) == self._rounds

    @property
    def rounds_completed(self) -> int:
        """The number of turns that everybody has had."""
        return min(self._spoken)

    def resume(self, spoken: Sequence[Place]) -> list[Place]:
        """Queue all agents: those that never spoke in their order, then the others, the longest silent first."""
        last = {place.agent: number for number, place in enumerate(spoken)}
        for place in spoken:
            self._spoken[place.agent] = max(self._spoken[place.agent], place.round + 1)
        queue = sorted(range(len(self._spoken)), key=lambda agent: (last.get(agent, -1), agent))
        return [Place(agent, self._spoken[agent]) for agent in queue if self._spoken[agent] < self._rounds]

    def end_turn(self, place: Place) -> list[Place]:
        """Take a turn's end: its agent goes to the back of the queue."""
        self._spoken[place.agent] = place.round + 1
        return [Place(place.agent, place.round + 1)] if place.round + 1 < self._rounds else []

    def waiting(self) -> Iterator[WaitingTurn]:
        """Iterate over the agents' next turns: each waits for its own present one."""
        for agent, spoken in enumerate(self._spoken):
            if spoken + 1 < self._rounds:
                yield WaitingTurn(Place(agent, spoken + 1), (agent,), spoken)

"""The agents that a turn waits for, in its round and in the one before (specification, "Rounds mode"). Pure."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import Final

from service.conversations.job.job import Job


def dependencies_of(job: Job) -> "Dependencies":
    """Return the dependencies of a job's agents."""
    if len(job.agents) == 1:  # as in each request at the front door
        return _ALONE
    places = {agent.id: number for number, agent in enumerate(job.agents)}
    heard_by_all = mask_of(places[agent.id] for agent in job.agents if agent.visible_to is None)
    read = [heard_by_all | 1 << place for place in places.values()]
    for agent in job.agents:
        for listener in agent.visible_to or ():
            read[places[listener]] |= 1 << places[agent.id]
    waits_for = tuple(tuple(sorted(places[other] for other in agent.waits_for)) for agent in job.agents)
    return _dependencies(waits_for, tuple(read))


class Dependencies:
    """The agents that each agent waits for, as sorted indexes. Immutable, so jobs of one shape share it.

    A turn ``waits_for`` these agents in its round. ``read`` is a mask of the agents that it reads in earlier rounds.
    """

    def __init__(self, waits_for: tuple[tuple[int, ...], ...], read: tuple[int, ...]) -> None:
        self.waits_for = waits_for
        self.read = read
        self.masks = tuple(map(mask_of, waits_for))
        self.count = len(waits_for)
        self.everybody = mask_of(range(self.count))
        followers: list[list[int]] = [[] for _ in waits_for]
        for agent, waited in enumerate(waits_for):
            for other in waited:
                followers[other].append(agent)
        self.followers = tuple(map(tuple, followers))
        self._last_first = self._order()
        circles: dict[int, list[int]] = {}
        for agent, mask in enumerate(self.read):
            circles.setdefault(mask, []).append(agent)
        # Agents that read the same agents wait for the same round, so one look decides for all of them.
        self.circles = tuple((mask, tuple(agents)) for mask, agents in circles.items())
        self.circles_of = tuple(
            tuple((mask, agents) for mask, agents in self.circles if mask >> agent & 1)
            for agent in range(len(waits_for))
        )

    def tails(self, weights: Sequence[float]) -> list[float]:
        """Return, for each agent, the weight of the longest chain within a round that begins with it."""
        tails = [0.0] * len(self.waits_for)
        for agent in self._last_first:
            tails[agent] = weights[agent] + max((tails[other] for other in self.followers[agent]), default=0.0)
        return tails

    def after_all(self, agents: Collection[int], without: int) -> int:
        """Return a mask of those that speak after all of these agents, in a round without ``without``."""
        mask, after, before = mask_of(agents), 0, [0] * len(self.waits_for)
        for agent in reversed(self._last_first):
            if without >> agent & 1:
                continue
            for other in self.waits_for[agent]:
                if not without >> other & 1:
                    before[agent] |= before[other] | 1 << other
            after |= (before[agent] & mask == mask) << agent
        return after

    def _order(self) -> tuple[int, ...]:
        """Return the agents ordered so that each comes after all that wait for it."""
        return tuple(TopologicalSorter(dict(enumerate(self.followers))).static_order())


_dependencies = lru_cache(maxsize=64)(Dependencies)  # jobs posted one by one often have one shape


def mask_of(agents: Iterable[int]) -> int:
    """Return agents as bits of a number."""
    return sum(1 << agent for agent in agents)


def agents_of(mask: int) -> list[int]:
    """Return the agents of a mask."""
    return [agent for agent in range(mask.bit_length()) if mask >> agent & 1]


_ALONE: Final = Dependencies(((),), (1,))

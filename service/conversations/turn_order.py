"""The order of speaking: in rounds, or freely (specification, "Rounds mode" and "Free mode"). Pure.

An agent's place is its index in the job, so that nothing here compares names. Every answer is a list of turns that get
ready, in the order in which they do.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import NamedTuple

from service.conversations.job import Conversation, Job, Mode
from service.conversations.until import NOTHING, Ending, Ends, EndsOfLed, TurnDigest


class Place(NamedTuple):
    """One turn of a conversation: the agent's index in the job, and the round."""

    agent: int
    round: int


class WaitingTurn(NamedTuple):
    """One turn that waits for others to speak, for whom, and in which round they are to."""

    place: Place
    waits_for: tuple[int, ...]
    in_round: int


def speaking_order(
    job: Job, names: Sequence[str], dependencies: "Dependencies", conversation: Conversation
) -> "SpeakingOrder":
    """Return the turn-taking of a conversation of ``job``, whose agents have these ``names``."""
    if job.mode is Mode.LED and job.leader is not None:
        return LedOrder(names, job.leader, conversation)
    ends = Ends(conversation.until, names) if conversation.until else None
    if job.mode is Mode.FREE or len(job.agents) == 1:  # one agent has nobody to wait for: both orders are the same
        return FreeOrder(len(job.agents), conversation.rounds, ends)
    return RoundsOrder(dependencies, conversation.rounds, ends)


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

    def after_all(self, agents: Collection[int], without: int) -> int:
        """Return who speaks after all of these agents, as a mask, in a round of which those ``without`` are no part."""
        mask, after, before = _mask(agents), 0, [0] * len(self.waits_for)
        for agent in reversed(self._last_first):
            if without >> agent & 1:
                continue
            for other in self.waits_for[agent]:
                if not without >> other & 1:
                    before[agent] |= before[other] | 1 << other
            after |= (before[agent] & mask == mask) << agent
        return after

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

    Sets of agents are bits of a number: a hundred thousand conversations may wait at once. Turns that wait for all that
    have fulfilled a condition are ``_barred``: they never exist, so whatever else is judged in that round does not
    depend on who was quicker.
    """

    __slots__ = ("_absent", "_barred", "_dependencies", "_ends", "_pending", "_round", "_rounds", "_spoken", "ending")

    def __init__(self, dependencies: Dependencies, rounds: int, ends: Ends | None = None) -> None:
        self._dependencies = dependencies
        self._rounds = rounds
        self._ends = ends
        self._round = 0
        self._absent = 0  # who has left
        self._spoken = 0  # of this round
        self._pending = 0  # who waits for others in it
        self._barred = 0  # who never speaks in it
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<RoundsOrder {self._round}/{self._rounds} spoken={_agents(self._spoken)}>"

    @property
    def is_over(self) -> bool:
        """Whether the last round has ended, or one with which a condition holds."""
        return self._round == self._rounds or self.ending is not None

    @property
    def is_deserted(self) -> bool:
        """Whether every agent has left."""
        return self._absent == self._dependencies.everybody

    @property
    def rounds_completed(self) -> int:
        """The number of rounds that have ended."""
        return self._round + (self.ending is not None)

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Begin, or go on in the first round that has not ended."""
        heard: dict[int, list[tuple[int, TurnDigest]]] = {}
        for place, digest in spoken.items():
            heard.setdefault(place.round, []).append((place.agent, digest))
        while not self.is_over and (said := heard.pop(self._round, None)) is not None:
            for agent, digest in said:
                self._take(agent, digest)
            if not self._end_round():
                break
        return self._open()

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Take a turn's end: others may have waited for it, or the whole round has."""
        self._take(place.agent, digest)
        if self._end_round():
            return self._open()
        return self._release(self._dependencies.followers[place.agent])

    def open_rounds(self, agent: int) -> range:
        """Return all rounds, up to the one in which a condition holds where one does; none once it left."""
        if self._absent >> agent & 1:
            return range(0)
        if self._ends is None or not self._ends.any_fulfilled:
            return range(self._rounds)
        return range(self._round + (not self._barred >> agent & 1))

    def awaited_turns(self) -> Iterator[WaitingTurn]:
        """Iterate over the turns that wait in this round, and for its end."""
        for agent in _agents(self._pending):
            awaited = self._dependencies.masks[agent] & ~self._silent
            yield WaitingTurn(Place(agent, self._round), tuple(_agents(awaited)), self._round)
        if self._round + 1 < self._rounds:
            awaited = self._dependencies.everybody & ~self._silent
            first = next(iter(_agents(self._dependencies.everybody & ~self._absent)), 0)
            yield WaitingTurn(Place(first, self._round + 1), tuple(_agents(awaited)), self._round)

    @property
    def _silent(self) -> int:
        """The agents that say nothing more in this round, as a mask."""
        return self._spoken | self._barred | self._absent

    def _take(self, agent: int, digest: TurnDigest) -> None:
        self._spoken |= 1 << agent
        self._absent |= digest.leaves << agent
        if self._ends is None:
            return
        for fulfilling in self._ends.count_turn(agent, self._round, digest):
            # Whoever had left before this round is waited for by nobody in it.
            self._barred |= self._dependencies.after_all(fulfilling, without=self._absent & ~self._spoken)
        self._pending &= ~self._barred

    def _end_round(self) -> bool:
        """End the round if everybody has spoken who will; return whether it has ended."""
        if self._silent != self._dependencies.everybody:
            return False
        if self._ends is not None:
            self.ending = self._ends.end_round(self._round)
        if self.ending is None:
            self._spoken = self._barred = 0
            self._round += 1
        return True

    def _open(self) -> list[Place]:
        if self.is_over:
            return []
        self._pending = self._dependencies.everybody & ~self._silent
        return self._release(_agents(self._pending))

    def _release(self, agents: Iterable[int]) -> list[Place]:
        masks, silent = self._dependencies.masks, self._silent
        free = [agent for agent in agents if self._pending >> agent & 1 and not masks[agent] & ~silent]
        self._pending &= ~_mask(free)
        return [Place(agent, self._round) for agent in free]


class FreeOrder:
    """Free mode: an agent that has spoken goes to the back of the queue, until each has had all its turns.

    Source: specification, "Free mode".
    """

    __slots__ = ("_absent", "_ends", "_rounds", "_spoken", "ending")

    def __init__(self, agents: int, rounds: int, ends: Ends | None = None) -> None:
        self._rounds = rounds
        self._ends = ends
        self._spoken = [0] * agents
        self._absent = 0  # who has left
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<FreeOrder rounds={self._rounds} spoken={self._spoken}>"

    @property
    def is_over(self) -> bool:
        """Whether everybody has had all its turns, or a condition holds."""
        return min(self._spoken) == self._rounds or self.ending is not None

    @property
    def is_deserted(self) -> bool:
        """Whether every agent has left."""
        return self._absent == (1 << len(self._spoken)) - 1

    @property
    def rounds_completed(self) -> int:
        """The number of turns that everybody has had, who has not left."""
        return min(self._spoken)

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Queue all agents: those that never spoke in their order, then the others, the longest silent first."""
        if not spoken:
            return [Place(agent, 0) for agent in range(len(self._spoken))]
        last = {place.agent: number for number, place in enumerate(spoken)}
        for place, digest in spoken.items():
            self._take(place, digest)
        queue = sorted(range(len(self._spoken)), key=lambda agent: (last.get(agent, -1), agent))
        return [Place(agent, self._spoken[agent]) for agent in queue if self._goes_on(agent)]

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Take a turn's end: its agent goes to the back of the queue."""
        if self._ends is None and not digest.leaves:
            self._spoken[place.agent] = place.round + 1
            return [Place(place.agent, place.round + 1)] if place.round + 1 < self._rounds else []
        self._take(place, digest)
        return [Place(place.agent, self._spoken[place.agent])] if self._goes_on(place.agent) else []

    def open_rounds(self, agent: int) -> range:
        """Return all rounds, or those that an agent has spoken in once a condition holds; none once it left."""
        if self._absent >> agent & 1:
            return range(0)
        return range(self._rounds if self.ending is None else self._spoken[agent])

    def awaited_turns(self) -> Iterator[WaitingTurn]:
        """Iterate over the agents' next turns: each waits for its own present one."""
        for agent, spoken in enumerate(self._spoken):
            if spoken + 1 < self._rounds:
                yield WaitingTurn(Place(agent, spoken + 1), (agent,), spoken)

    def _goes_on(self, agent: int) -> bool:
        return self.ending is None and self._spoken[agent] < self._rounds

    def _take(self, place: Place, digest: TurnDigest) -> None:
        """Take a turn; what has run on beside the one with which a condition held changes nothing any more."""
        ended = min(self._spoken)
        self._spoken[place.agent] = max(self._spoken[place.agent], self._rounds if digest.leaves else place.round + 1)
        self._absent |= digest.leaves << place.agent
        if self._ends is None or self.ending is not None:
            return
        is_fulfilled = bool(self._ends.count_turn(place.agent, place.round, digest))
        for number in range(ended, min(self._spoken)):  # several, where one that lagged behind has left
            self.ending = self.ending or self._ends.end_round(number)
        if is_fulfilled and self.ending is None:
            self.ending = self._ends.first_fulfilled()


class LedOrder:
    """Led: the leader names who speaks next, or that nobody does; its choice and that turn are a round.

    Source: specification, "Led mode".
    """

    __slots__ = ("_absent", "_ends", "_leader", "_names", "_round", "_rounds", "chosen", "ending")

    def __init__(self, names: Sequence[str], leader: str, conversation: Conversation) -> None:
        self._names = names
        self._leader = names.index(leader)
        self._rounds = conversation.rounds
        self._ends = EndsOfLed(conversation.until, names) if conversation.until else None
        self._round = 0
        self.chosen: int | None = None  # of this round, once the leader has spoken
        self._absent: set[int] = set()  # who has left
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<LedOrder {self._round}/{self._rounds} next={self.next_place}>"

    @property
    def is_over(self) -> bool:
        """Whether the last round has ended, or the leader or a condition has ended it."""
        return self._round == self._rounds or self.ending is not None

    @property
    def is_deserted(self) -> bool:
        """Whether everybody has left whom the leader could name."""
        return len(self._absent) == len(self._names) - 1

    @property
    def rounds_completed(self) -> int:
        """The number of rounds that have ended."""
        return self._round + (self.ending is not None)

    @property
    def next_place(self) -> Place:
        """The turn that is spoken now."""
        return Place(self._leader if self.chosen is None else self.chosen, self._round)

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Begin, or go on with the first turn that has not ended."""
        while not self.is_over and self.next_place in spoken:
            self._take(self.next_place, spoken[self.next_place])
        return [] if self.is_over else [self.next_place]

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Take a turn's end: whoever was named speaks, or the leader does."""
        self._take(place, digest)
        return [] if self.is_over else [self.next_place]

    def open_rounds(self, agent: int) -> range:
        """Return this round for whoever is to speak now, and none for others."""
        is_next = not (self.is_over or self.is_deserted) and agent == self.next_place.agent
        return range(self._round, self._round + is_next)

    def awaited_turns(self) -> Iterator[WaitingTurn]:
        """Iterate over the leader's next turn: it waits for the present one."""
        if not self.is_over and self._round + 1 < self._rounds:
            yield WaitingTurn(Place(self._leader, self._round + 1), (self.next_place.agent,), self._round)

    def _take(self, place: Place, digest: TurnDigest) -> None:
        ends = self._ends
        if place.agent != self._leader:
            self._absent |= {place.agent} if digest.leaves else set()
            self.chosen = None
            if ends is not None:
                ends.count_turn(place.agent, place.round, digest)
                self.ending = ends.end_round(self._round)
            self._round += self.ending is None
        elif ends is not None and ends.count_choice(place.agent, place.round, digest):
            self.ending = ends.end_round(self._round)  # whoever was named waits for this, and never speaks
        elif digest.chosen is None:
            self.ending = Ending(leader=self._names[self._leader], round=self._round)
        else:
            self.chosen = self._names.index(digest.chosen)


SpeakingOrder = RoundsOrder | FreeOrder | LedOrder  # the turn-taking of one conversation

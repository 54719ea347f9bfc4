"""The speaking order: in rounds, free, or led (specification, "Rounds mode" and "Free mode"). Pure.

An agent's place is its index in the job, so that nothing here compares names. Each result is a list of turns that
become ready, in order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from service.conversations.job.job import Conversation, Job, Mode
from service.conversations.job.until import NOTHING, Ending, Ends, EndsOfLed, TurnDigest
from service.conversations.talk.dependencies import Dependencies, agents_of, mask_of


class Place(NamedTuple):
    """One turn of a conversation: the agent's index in the job, and the round."""

    agent: int
    round: int


class WaitingTurn(NamedTuple):
    """One turn that waits for other agents to speak in a round."""

    place: Place
    waits_for: tuple[int, ...]
    in_round: int


def speaking_order(
    job: Job, names: Sequence[str], dependencies: Dependencies, conversation: Conversation
) -> "SpeakingOrder":
    """Return the speaking order of a conversation of ``job``, whose agents have these ``names``."""
    if job.mode is Mode.LED and job.leader is not None:
        return LedOrder(names, job.leader, conversation)
    ends = Ends(conversation.until, names, conversation.heritage.former_tokens) if conversation.until else None
    if job.mode is Mode.FREE or len(job.agents) == 1:  # a single agent waits for no other: both orders are the same
        return FreeOrder(len(job.agents), conversation.rounds, ends)
    return RoundsOrder(dependencies, conversation.rounds, ends)


class RoundsOrder:
    """Rounds: a turn waits for the turns that its prompt shows, and for those of the round before that conditions read.

    Sets of turns are bits of a number, round after round from the first that has not ended, since a hundred thousand
    conversations may wait at once. ``_barred`` are turns that wait for all agents that have fulfilled a condition: they
    never exist, so the other conditions of that round do not depend on timing. No agent is ahead of that round, since
    each turn waits for all turns of the round before that conditions read.
    """

    __slots__ = (
        "_absent",
        "_barred",
        "_begun",
        "_dependencies",
        "_ends",
        "_judged",
        "_round",
        "_rounds",
        "_spoken",
        "ending",
    )

    def __init__(self, dependencies: Dependencies, rounds: int, ends: Ends | None = None) -> None:
        self._dependencies = dependencies
        self._rounds = rounds  # lowered to the round in which a condition holds
        self._ends = ends
        self._judged = 0 if ends is None else mask_of(ends.judged)  # agents whose turns conditions read
        self._round = 0
        self._absent = 0  # agents that have left
        self._spoken = 0  # turns of this and later rounds
        self._begun = 0  # turns that were ready
        self._barred = 0  # agents that never speak in the last round
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<RoundsOrder {self._round}/{self._rounds} spoken={agents_of(self._spoken)}>"

    @property
    def is_over(self) -> bool:
        """Whether the last round has ended, or one in which a condition holds."""
        return self._round == self._rounds

    @property
    def is_deserted(self) -> bool:
        """Whether every agent has left."""
        return self._absent == self._dependencies.everybody

    @property
    def rounds_completed(self) -> int:
        """The number of rounds that have ended for all agents."""
        return self._round

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Begin, or go on with all turns that wait for no unfinished one."""
        for place in sorted(spoken, key=lambda place: place.round):
            self._begun |= self._bit(place)
            self._take(place, spoken[place])
            self._end_rounds()
        agents = range(self._dependencies.count)
        return [place for agent in agents for place in self._release((agent,), self._next_round(agent))]

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Record a turn's end; return the turns that waited for it, in its round and in the next."""
        self._take(place, digest)
        agent, number = place
        of, silent = self._dependencies, self._silent_in(number)
        free = self._release(of.followers[agent], number) if of.followers[agent] else []
        readers = self._readers(agent, silent)
        if number == self._round and silent == of.everybody:
            self._end_rounds()
        return free + self._release(readers, number + 1) if readers else free

    def _readers(self, agent: int, silent: int) -> Sequence[int]:
        """Return the agents that waited for an agent's turn and for no other of its round."""
        of, judged = self._dependencies, self._judged
        circles = of.circles if judged >> agent & 1 else of.circles_of[agent]
        if len(circles) == 1:  # all read all
            return () if (circles[0][0] | judged) & ~silent else circles[0][1]
        return sorted(reader for read, agents in circles if not (read | judged) & ~silent for reader in agents)

    def open_rounds(self, agent: int) -> range:
        """Return all rounds, or those up to the one in which a condition holds; none once the agent has left."""
        if self._absent >> agent & 1:
            return range(0)
        return range(self._rounds - (self._barred >> agent & 1))

    def due_turns(self) -> Iterator[Place]:
        """Iterate over the unfinished turns whose order has come."""
        due, number = self._begun & ~self._spoken, self._round
        while due:
            yield from (Place(agent, number) for agent in agents_of(due & self._dependencies.everybody & ~self._absent))
            due, number = due >> self._dependencies.count, number + 1

    def awaited_turns(self) -> Iterator[WaitingTurn]:
        """Iterate over the next turn of each agent that waits for others, in the round before or in its own."""
        for agent in agents_of(self._dependencies.everybody & ~self._absent):
            number = self._next_round(agent)
            if number >= self.open_rounds(agent).stop:
                continue
            for earlier, waited in ((number - 1, self._read_by(agent)), (number, self._dependencies.masks[agent])):
                missing = waited & ~self._silent_in(earlier) if earlier >= self._round else 0
                if missing:
                    yield WaitingTurn(Place(agent, number), tuple(agents_of(missing)), earlier)
                    break

    def _read_by(self, agent: int) -> int:
        return self._dependencies.read[agent] | self._judged

    def _next_round(self, agent: int) -> int:
        """Return the first round in which an agent's turn was never ready."""
        number = self._round
        while self._begun & self._bit(Place(agent, number)):
            number += 1
        return number

    def _bit(self, place: Place) -> int:
        return 1 << (place.round - self._round) * self._dependencies.count + place.agent

    def _silent_in(self, number: int) -> int:
        """Return a mask of the agents that say nothing more in an unfinished round."""
        everybody = self._dependencies.everybody
        spoken = self._spoken >> (number - self._round) * self._dependencies.count & everybody
        return spoken | self._absent | (self._barred if number == self._rounds - 1 else 0)

    def _take(self, place: Place, digest: TurnDigest) -> None:
        agent, number = place
        self._spoken |= self._bit(place)
        self._absent |= digest.leaves << agent
        if self._ends is None or not self._judged >> agent & 1:
            return
        for fulfilling in self._ends.count_turn(agent, number, digest):
            self._rounds = number + 1
            # Agents that left before this round are not waited for in it.
            spoken = self._spoken >> (number - self._round) * self._dependencies.count
            self._barred |= self._dependencies.after_all(fulfilling, without=self._absent & ~spoken)

    def _end_rounds(self) -> None:
        """End each round in which all agents that will speak have spoken."""
        of = self._dependencies
        while not self.is_over and not self.is_deserted and self._silent_in(self._round) == of.everybody:
            ending = self._ends.end_round(self._round) if self._ends is not None else None
            if ending is not None and ending.round == self._round:
                self.ending, self._rounds = ending, self._round + 1
            self._spoken >>= of.count
            self._begun >>= of.count
            self._round += 1

    def _release(self, agents: Iterable[int], number: int) -> list[Place]:
        """Return the turns of these agents in a round that are ready now and were not before."""
        if not self._round <= number < self._rounds:
            return []
        of, silent = self._dependencies, self._silent_in(number)
        before = of.everybody if number == self._round else self._silent_in(number - 1)
        shift = (number - self._round) * of.count
        never = self._begun >> shift | silent  # ready, ended, left or barred
        free: list[Place] = []
        for agent in agents:
            if never >> agent & 1 or of.masks[agent] & ~silent or (of.read[agent] | self._judged) & ~before:
                continue
            self._begun |= 1 << shift + agent
            free.append(Place(agent, number))
        return free


class FreeOrder:
    """Free mode: an agent that has spoken goes to the back of the queue, until each has had all its turns.

    Source: specification, "Free mode".
    """

    __slots__ = ("_absent", "_ends", "_rounds", "_spoken", "ending")

    def __init__(self, agents: int, rounds: int, ends: Ends | None = None) -> None:
        self._rounds = rounds
        self._ends = ends
        self._spoken = [0] * agents
        self._absent = 0  # agents that have left
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<FreeOrder rounds={self._rounds} spoken={self._spoken}>"

    @property
    def is_over(self) -> bool:
        """Whether all agents have had all their turns, or a condition holds."""
        return min(self._spoken) == self._rounds or self.ending is not None

    @property
    def is_deserted(self) -> bool:
        """Whether every agent has left."""
        return self._absent == (1 << len(self._spoken)) - 1

    @property
    def rounds_completed(self) -> int:
        """The number of turns that each remaining agent has had."""
        return min(self._spoken)

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Queue all agents: those that never spoke in order, then the others, the longest silent first."""
        if not spoken:
            return [Place(agent, 0) for agent in range(len(self._spoken))]
        last = {place.agent: number for number, place in enumerate(spoken)}
        for place, digest in spoken.items():
            self._take(place, digest)
        queue = sorted(range(len(self._spoken)), key=lambda agent: (last.get(agent, -1), agent))
        return [Place(agent, self._spoken[agent]) for agent in queue if self._goes_on(agent)]

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Record a turn's end: its agent goes to the back of the queue."""
        if self._ends is None and not digest.leaves:
            self._spoken[place.agent] = place.round + 1
            return [Place(place.agent, place.round + 1)] if place.round + 1 < self._rounds else []
        self._take(place, digest)
        return [Place(place.agent, self._spoken[place.agent])] if self._goes_on(place.agent) else []

    def open_rounds(self, agent: int) -> range:
        """Return all rounds, or an agent's spoken ones once a condition holds; none once it has left."""
        if self._absent >> agent & 1:
            return range(0)
        return range(self._rounds if self.ending is None else self._spoken[agent])

    def due_turns(self) -> Iterator[Place]:
        """Iterate over each agent's present turn: in free mode it waits for no other agent."""
        yield from (Place(agent, spoken) for agent, spoken in enumerate(self._spoken) if self._goes_on(agent))

    def awaited_turns(self) -> Iterator[WaitingTurn]:
        """Iterate over the agents' next turns: each waits for the agent's present one."""
        for agent, spoken in enumerate(self._spoken):
            if spoken + 1 < self._rounds:
                yield WaitingTurn(Place(agent, spoken + 1), (agent,), spoken)

    def _goes_on(self, agent: int) -> bool:
        return self.ending is None and self._spoken[agent] < self._rounds

    def _take(self, place: Place, digest: TurnDigest) -> None:
        """Record a turn; turns that ran on after a condition held change nothing."""
        ended = min(self._spoken)
        self._spoken[place.agent] = max(self._spoken[place.agent], self._rounds if digest.leaves else place.round + 1)
        self._absent |= digest.leaves << place.agent
        if self._ends is None or self.ending is not None:
            return
        is_fulfilled = bool(self._ends.count_turn(place.agent, place.round, digest))
        for number in range(ended, min(self._spoken)):  # several rounds, if an agent that lagged behind has left
            self.ending = self.ending or self._ends.end_round(number)
        if is_fulfilled and self.ending is None:
            self.ending = self._ends.first_fulfilled()


class LedOrder:
    """Led mode: the leader names the next speaker or ends the conversation; its choice and the named turn are a round.

    Source: specification, "Led mode".
    """

    __slots__ = ("_absent", "_ends", "_leader", "_names", "_round", "_rounds", "chosen", "ending")

    def __init__(self, names: Sequence[str], leader: str, conversation: Conversation) -> None:
        self._names = names
        self._leader = names.index(leader)
        self._rounds = conversation.rounds
        self._ends = EndsOfLed(conversation.until, names) if conversation.until else None
        self._round = 0
        self.chosen: int | None = None  # the agent named in this round
        self._absent: set[int] = set()  # agents that have left
        self.ending: Ending | None = None

    def __repr__(self) -> str:
        return f"<LedOrder {self._round}/{self._rounds} next={self.next_place}>"

    @property
    def is_over(self) -> bool:
        """Whether the last round has ended, or the leader or a condition has ended the conversation."""
        return self._round == self._rounds or self.ending is not None

    @property
    def is_deserted(self) -> bool:
        """Whether all agents that the leader could name have left."""
        return len(self._absent) == len(self._names) - 1

    @property
    def rounds_completed(self) -> int:
        """The number of rounds that have ended."""
        return self._round + (self.ending is not None)

    @property
    def next_place(self) -> Place:
        """The turn whose order has come."""
        return Place(self._leader if self.chosen is None else self.chosen, self._round)

    def replay(self, spoken: Mapping[Place, TurnDigest]) -> list[Place]:
        """Begin, or go on with the first unfinished turn."""
        while not self.is_over and self.next_place in spoken:
            self._take(self.next_place, spoken[self.next_place])
        return [] if self.is_over else [self.next_place]

    def end_turn(self, place: Place, digest: TurnDigest = NOTHING) -> list[Place]:
        """Record a turn's end: the named agent speaks next, or the leader."""
        self._take(place, digest)
        return [] if self.is_over else [self.next_place]

    def open_rounds(self, agent: int) -> range:
        """Return this round for the agent that speaks now, and none for others."""
        is_next = not (self.is_over or self.is_deserted) and agent == self.next_place.agent
        return range(self._round, self._round + is_next)

    def due_turns(self) -> Iterator[Place]:
        """Iterate over the one turn whose order has come."""
        if not self.is_over:
            yield self.next_place

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
            self.ending = ends.end_round(self._round)  # the named agent waits for this turn, and never speaks
        elif digest.chosen is None:
            self.ending = Ending(leader=self._names[self._leader], round=self._round)
        else:
            self.chosen = self._names.index(digest.chosen)


SpeakingOrder = RoundsOrder | FreeOrder | LedOrder  # the speaking order of one conversation

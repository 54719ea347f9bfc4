"""What each turn of an agent may have heard when it was asked.

Source: specification, "Visibility", "Free mode", "Led mode", "Turns of callers".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, islice, product

from tests.reference.hearing import Place, Spoken, heard, heard_freely
from tests.reference.heirs import Inherited, Known
from tests.reference.job import END, Agent, Document
from tests.reference.prompts import Heard, Opening
from tests.reference.wire import AskedTurn

NEAR = (-1, 0, 1, 2)  # turns that were heard more than is known
MOST_TRIED = 300  # ways in which inherited turns may have heard others


def heard_before(
    known: Known, agent: Agent, rounds: int, spoken: Spoken, *, is_told: bool
) -> Iterator[tuple[int, ...]]:
    """Yield how much may have been heard in each inherited turn; the next turn shows it for one that said nothing.

    With ``is_told`` there is one answer: what was heard there.
    """
    counts = []
    for number in range(rounds):
        heard_there = known.hearing.get((agent.id, number), frozenset[Place]())
        counts.append(sum(place in heard_there for place in spoken))
    yield tuple(counts)
    if not is_told and known.talk.mode == "free":
        inherited = sum(turn["inherited"] is not None for turn in known.turns)
        near = product(*([count + step for step in NEAR if 0 <= count + step <= inherited] for count in counts))
        yield from islice(sorted(near, key=partial(_distance, counts)), MOST_TRIED)
        yield from islice(combinations_with_replacement(range(inherited + 1), rounds), MOST_TRIED)


def _distance(counts: Sequence[int], others: Sequence[int]) -> int:
    return sum(abs(count - other) for count, other in zip(counts, others, strict=True))


@dataclass(frozen=True, slots=True)
class AskedTurns:
    """The turns of a conversation in which words were heard in one order."""

    known: Known
    inherited: Inherited
    spoken: Spoken
    before: tuple[int, ...]  # how much was heard of in each inherited turn

    def of(self, agent: Agent, turns: Sequence[Document], openings: Sequence[Sequence[Opening]]) -> list[AskedTurn]:
        """Return an agent's turns, each with what it may have heard."""
        made: list[AskedTurn] = []
        for turn, shown in zip(turns, openings, strict=True):
            number, as_asked = turn["round"], self._as_asked(agent, turn["round"])
            if self.known.talk.mode == "free":
                hears = partial(self._heard_freely, agent, number, self.before)
                made.append(AskedTurn(turn, as_asked, hears, self._choices(agent, turn, turns), shown))
            else:
                words = heard(self.known.talk, agent, number, self.spoken)
                made.append(AskedTurn(turn, as_asked, partial(_always, words), (0,), shown))
        return made

    def _choices(self, agent: Agent, turn: Document, turns: Sequence[Document]) -> Sequence[int]:
        """Return how much of the record a turn may have heard: from its place in the queue to its end."""
        order, number = list(self.spoken), turn["round"]
        last, own = (agent.id, number - 1), (agent.id, number)
        begun = order.index(last) + 1 if last in order else len(order)
        if turn is turns[0] and last not in order:  # it is queued as the conversation begins
            begun = len(self.inherited.turns) if number else 0
        # The record does not show when it was queued after a failed turn, or as a new agent.
        is_told = self.spoken.get(last) or (not number and self.known.talk.source is None)
        if self.known.talk.prompt_at == "queue" and is_told:
            return (begun,)
        return range(begun, (order.index(own) if own in order else len(order)) + 1)

    def _heard_freely(self, agent: Agent, number: int, before: tuple[int, ...], upto: tuple[int, ...]) -> list[Heard]:
        return heard_freely(self.known.talk, agent, number, self.spoken, (*before, *upto))

    def _as_asked(self, agent: Agent, number: int) -> Agent:
        """Return an agent as it is asked: a leader names one of the present agents, or ends the conversation."""
        talk = self.known.talk
        if agent.id != talk.leader:
            return agent
        left = {name for (name, at), words in self.spoken.items() if words is None and at < number}
        names = [name for name in talk.agents if name != agent.id and name not in left]
        return replace(agent, validation={"choices": [*names, END]})


def _always(words: list[Heard], _: tuple[int, ...]) -> list[Heard]:
    return words

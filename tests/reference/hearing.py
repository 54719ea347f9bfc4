"""Which words an agent hears in a turn, and in which order.

Source: specification, "Visibility", "Prompt composition", "Views", "Free mode", "Led mode".
"""

from collections.abc import Iterator, Mapping, Sequence
from graphlib import TopologicalSorter

from tests.reference.job import Agent, Document, Talk
from tests.reference.prompts import Heard

Place = tuple[str, int]  # an agent's id, and a round
Spoken = Mapping[Place, str | None]  # in the order of the record; None: with that turn its agent has left


def spoken_in(talk: Talk, turns: Sequence[Document]) -> dict[Place, str | None]:
    """Return the words of ended turns in order; a failed turn said none."""
    spoken: dict[Place, str | None] = {}
    for turn in turns:
        agent = talk.agents[turn["agent"]]
        if turn["state"] == "completed":
            spoken[agent.id, turn["round"]] = turn["text"]
        elif turn["state"] == "failed":
            spoken[agent.id, turn["round"]] = None if agent.on_failure == "leave" else ""
    return spoken


def in_turn(talk: Talk) -> list[Agent]:
    """Return the agents, each after those that it waits for."""
    order = list(talk.agents)
    graph = {each.id: sorted(each.after, key=order.index) for each in talk.agents.values()}
    return [talk.agents[name] for name in TopologicalSorter(graph).static_order()]


def heard(talk: Talk, agent: Agent, number: int, spoken: Spoken, first: int = 0) -> list[Heard]:
    """Return the words that an agent hears in its turn of a round, in rounds and in led mode.

    Of the rounds before ``first`` it hears only who has left.
    """
    places = [place for place in _order(talk, agent, number) if place in spoken]
    return [
        Heard(talk.agents[name], at, spoken[name, at]) for name, at in places if at >= first or spoken[name, at] is None
    ]


def _order(talk: Talk, agent: Agent, number: int) -> Iterator[Place]:
    everybody = list(talk.agents.values())
    if talk.mode == "led":
        leaders = [each for each in everybody if each.id == talk.leader]
        others = [each for each in everybody if each.id != talk.leader]
        for at in range(number + 1):
            speakers = [*leaders, *(others if at < number else ())]
            heard_now = [each for each in speakers if at < number or each.id != agent.id]
            yield from ((each.id, at) for each in heard_now if each.shows(agent.id))
        return
    if talk.view == "shared":
        everybody = in_turn(talk)
        audible = everybody
    else:
        waited = [each for each in everybody if each.id in agent.after]
        audible = [*waited, agent, *(each for each in everybody if each.id != agent.id and each not in waited)]
    for at in range(number):
        yield from ((each.id, at) for each in audible if each.shows(agent.id))
    yield from ((each.id, number) for each in everybody if each.id in agent.after)


def heard_freely(
    talk: Talk, agent: Agent, number: int, spoken: Spoken, upto: Sequence[int], first: int = 0
) -> list[Heard]:
    """Return the same in free mode; ``upto`` is how many turns it had heard in each of its turns so far."""
    record = list(spoken.items())
    words: list[Heard] = []
    if talk.view == "shared":
        told = record[: upto[number]]
        words = [Heard(talk.agents[name], at, text) for (name, at), text in told if talk.agents[name].shows(agent.id)]
    else:
        begun = 0
        for turn in range(number + 1):
            for (name, at), text in record[begun : max(begun, upto[turn])]:
                if name != agent.id and talk.agents[name].shows(agent.id):
                    words.append(Heard(talk.agents[name], at, text))
            begun = max(begun, upto[turn])
            if turn < number and (own := spoken.get((agent.id, turn))) is not None:
                words.append(Heard(agent, turn, own))
    return [each for each in words if each.round >= first or each.text is None]

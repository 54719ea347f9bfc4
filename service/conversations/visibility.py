"""Who reads what (specification, "Visibility"). Pure.

``visible_to`` says who reads an agent's words in later rounds; an agent that waits for another within a round reads
what that one said in it, whatever ``visible_to`` says (specification, "Visibility"). An agent always sees its own
words.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from service.conversations.job import Agent, Job

Spoken = Mapping[tuple[str, int], str]  # the words of (agent, round), of the turns that are completed


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """What one agent said in one round."""

    agent: str
    round: int
    text: str


def visible_before(job: Job, listener: Agent, round_number: int, spoken: Spoken) -> tuple[Utterance, ...]:
    """Return the words that ``listener`` may read in ``round_number``, in a stable order.

    The order is the one in which it could have heard the words: before each of its own turns the words of the agents
    that it waits for, after it those of the others. So the discussion in a later prompt extends that in an earlier one.
    """
    return _said(_audible_before(job, listener, round_number), spoken)


def shared_before(job: Job, listener: Agent, round_number: int, spoken: Spoken) -> tuple[Utterance, ...]:
    """Return the same as one text for all: in the order of the rounds, and within one of who waits for whom."""
    return _said(_shared_order(job, listener, round_number), spoken)


def _audible_before(job: Job, listener: Agent, round_number: int) -> Iterator[tuple[str, int]]:
    """Yield the turns that ``listener`` may read of, in its own order."""
    waited = [agent for agent in job.agents if agent.id in listener.waits_for]
    others = [agent for agent in job.agents if agent.id not in listener.waits_for and agent.id != listener.id]
    for number in range(round_number):
        for speaker in (*waited, listener, *others):
            if is_visible_later(speaker, listener.id):
                yield speaker.id, number
    for speaker in waited:
        yield speaker.id, round_number


def _shared_order(job: Job, listener: Agent, round_number: int) -> Iterator[tuple[str, int]]:
    order = _in_turn(job)
    for number in range(round_number):
        for speaker in order:
            if is_visible_later(speaker, listener.id):
                yield speaker.id, number
    for speaker in order:
        if speaker.id in listener.waits_for:
            yield speaker.id, round_number


def _said(turns: Iterable[tuple[str, int]], spoken: Spoken) -> tuple[Utterance, ...]:
    return tuple(
        Utterance(agent=agent, round=number, text=spoken[agent, number])
        for agent, number in turns
        if (agent, number) in spoken
    )


def _in_turn(job: Job) -> list[Agent]:
    """Return the agents so that each comes after those that it waits for."""
    agents = {agent.id: agent for agent in job.agents}
    graph = {agent.id: sorted(agent.waits_for, key=list(agents).index) for agent in job.agents}
    return [agents[name] for name in TopologicalSorter(graph).static_order()]


def is_visible_later(speaker: Agent, listener_id: str) -> bool:
    """Whether ``listener_id`` may read in later rounds what ``speaker`` says."""
    return speaker.id == listener_id or speaker.visible_to is None or listener_id in speaker.visible_to

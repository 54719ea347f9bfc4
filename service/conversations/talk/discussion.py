"""The words of one conversation so far, and what each agent has heard of them at its prompts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter

import msgspec

from service.conversations.job.job import Agent, Job, Mode, View

# The words of (agent, round) for completed turns; None if the agent has left.
Spoken = Mapping[tuple[str, int], str | None]


class Utterance(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one agent in one round; None says that it has left."""

    agent: str
    round: int
    text: str | None


def visible_before(
    job: Job, listener: Agent, round_number: int, spoken: Spoken, rounds: Sequence[int] | None = None
) -> tuple[Utterance, ...]:
    """Return the words that ``listener`` may read in ``round_number``, in a stable order.

    The order is one in which it could have heard them: before each of its own turns the words of agents that it waits
    for, after it those of others. ``rounds`` are the earlier rounds to read; None is all.
    """
    past = range(round_number) if rounds is None else rounds
    return _said(_audible_before(job, listener, round_number, past), spoken)


def shared_before(
    job: Job, listener: Agent, round_number: int, spoken: Spoken, rounds: Sequence[int] | None = None
) -> tuple[Utterance, ...]:
    """Return the same as one text for all: by round, and within a round in the order of waiting."""
    past = range(round_number) if rounds is None else rounds
    return _said(_shared_order(job, listener, round_number, past), spoken)


def _audible_before(job: Job, listener: Agent, round_number: int, past: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the turns that ``listener`` may read, in its own order."""
    if job.mode is Mode.LED:
        yield from _led_before(job, listener, round_number, past)
        return
    waited = [agent for agent in job.agents if agent.id in listener.waits_for]
    others = [agent for agent in job.agents if agent.id not in listener.waits_for and agent.id != listener.id]
    audible = [each for each in (*waited, listener, *others) if is_visible_later(each, listener.id)] if past else ()
    for number in past:
        for speaker in audible:
            yield speaker.id, number
    for speaker in waited:
        yield speaker.id, round_number


def _led_before(job: Job, listener: Agent, round_number: int, past: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the turns of each round: the leader's choice, then the named agent's."""
    leaders = [agent for agent in job.agents if agent.id == job.leader]
    others = [agent for agent in job.agents if agent.id != job.leader]
    for number in (*past, round_number):
        for speaker in (*leaders, *(others if number < round_number else ())):
            is_now = speaker.id == listener.id and number == round_number
            if is_visible_later(speaker, listener.id) and not is_now:
                yield speaker.id, number


def _shared_order(job: Job, listener: Agent, round_number: int, past: Sequence[int]) -> Iterator[tuple[str, int]]:
    if job.mode is Mode.LED:
        yield from _led_before(job, listener, round_number, past)
        return
    order = _in_turn(job)
    audible = [each for each in order if is_visible_later(each, listener.id)] if past else ()
    for number in past:
        for speaker in audible:
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
    """Return the agents ordered so that each comes after those that it waits for."""
    agents = {agent.id: agent for agent in job.agents}
    graph = {agent.id: sorted(agent.waits_for, key=list(agents).index) for agent in job.agents}
    return [agents[name] for name in TopologicalSorter(graph).static_order()]


def is_visible_later(speaker: Agent, listener_id: str) -> bool:
    """Whether ``listener_id`` may read in later rounds what ``speaker`` says."""
    return speaker.id == listener_id or speaker.visible_to is None or listener_id in speaker.visible_to


class Discussion:
    """The discussion of one conversation, in the order in which words become visible; written by the scheduler alone.

    ``job`` has all agents whose words may be in it (``heritage.with_formers``).
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spoken: dict[tuple[str, int], str | None] = {}
        self._left: dict[str, int] = {}  # by agent that has left: the round
        self._heard: dict[tuple[str, int], int] = {}  # by turn: the number of visible turns when its prompt was made

    def __repr__(self) -> str:
        return f"<Discussion {len(self._spoken)} turns>"

    def add(self, agent_id: str, round_number: int, words: str | None) -> None:
        """Add the words of a turn; None says that its agent has left with it."""
        self._spoken[agent_id, round_number] = words
        if words is None:
            self._left[agent_id] = round_number

    def make_prompt(self, agent_id: str, round_number: int, heard: int | None = None) -> None:
        """Fix the turns that a turn hears (free mode): all visible ones, or the first ``heard``."""
        self._heard[agent_id, round_number] = len(self._spoken) if heard is None else heard

    def make_prompt_once(self, agent_id: str, round_number: int, heard: int | None = None) -> None:
        """Fix the turns that a turn hears, unless that was done."""
        if (agent_id, round_number) not in self._heard:
            self.make_prompt(agent_id, round_number, heard)

    def heard_by(self, agent: Agent, round_number: int, first: int = 0) -> tuple[Utterance, ...]:
        """Return the words that an agent may read in its turn; later turns extend earlier ones.

        Rounds before ``first`` only contribute the agents that have left.
        """
        heard: Iterable[Utterance]
        is_shared = self._job.view is View.SHARED
        if self._job.mode is Mode.FREE:
            heard = self._heard_as_one(agent, round_number) if is_shared else self._heard_freely(agent, round_number)
        else:
            # Hidden rounds are skipped: a simulation may have thousands.
            left = sorted({at for at in self._left.values() if at < first}) if first else []
            rounds = [*left, *range(first, round_number)] if first else None
            before = shared_before if is_shared else visible_before
            heard = before(self._job, agent, round_number, self._spoken, rounds)
        return tuple(each for each in heard if each.round >= first or each.text is None) if first else tuple(heard)

    def left_before(self, round_number: int) -> frozenset[str]:
        """Return the agents that had left before a round."""
        return frozenset(agent for agent, at in self._left.items() if at < round_number)

    def heard_turns(self, agent_id: str, round_number: int) -> int | None:
        """Return the number of turns visible when a turn's prompt was made (free mode), None without it."""
        return self._heard.get((agent_id, round_number)) if self._job.mode is Mode.FREE else None

    def _heard_as_one(self, listener: Agent, round_number: int) -> Iterator[Utterance]:
        """Yield the discussion in the order in which it became visible."""
        spoken = list(self._spoken.items())
        speakers = {agent.id: agent for agent in self._job.agents}
        for (agent_id, of_round), words in spoken[: self._heard.get((listener.id, round_number), len(spoken))]:
            if is_visible_later(speakers[agent_id], listener.id):
                yield Utterance(agent=agent_id, round=of_round, text=words)

    def _heard_freely(self, listener: Agent, round_number: int) -> Iterator[Utterance]:
        """Yield the discussion as the listener met it: words said while it spoke come after its own."""
        spoken = list(self._spoken.items())
        speakers = {agent.id: agent for agent in self._job.agents}
        at = 0
        for number in range(round_number + 1):
            # Without words, a turn's prompt is unknown: what it had heard is heard by the next one too.
            unknown = len(spoken) if number == round_number else at
            upto = max(at, self._heard.get((listener.id, number), unknown))
            for (agent_id, of_round), words in spoken[at:upto]:
                if agent_id != listener.id and is_visible_later(speakers[agent_id], listener.id):
                    yield Utterance(agent=agent_id, round=of_round, text=words)
            at = upto
            own = self._spoken.get((listener.id, number))
            if own is not None and number < round_number:
                yield Utterance(agent=listener.id, round=number, text=own)

"""The words of one conversation so far, and what each agent has heard of them when."""

from collections.abc import Iterator

from service.conversations.job import Agent, Job, Mode, View
from service.conversations.visibility import (
    Utterance,
    is_visible_later,
    shared_before,
    visible_before,
)


class Discussion:
    """Written by the scheduler alone, in the order in which words become visible."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spoken: dict[tuple[str, int], str] = {}
        self._heard: dict[tuple[str, int], int] = {}  # how much was visible when the prompt of a turn was made

    def __repr__(self) -> str:
        return f"<Discussion {len(self._spoken)} turns>"

    def add(self, agent_id: str, round_number: int, words: str) -> None:
        """Take what a turn has said."""
        self._spoken[agent_id, round_number] = words

    def make_prompt(self, agent_id: str, round_number: int, heard: int | None = None) -> None:
        """Fix what a turn hears (free mode): all that is visible now, or so many turns of it."""
        self._heard[agent_id, round_number] = len(self._spoken) if heard is None else heard

    def make_prompt_once(self, agent_id: str, round_number: int, heard: int | None = None) -> None:
        """Fix what a turn hears, unless that was done."""
        if (agent_id, round_number) not in self._heard:
            self.make_prompt(agent_id, round_number, heard)

    def heard_by(self, agent: Agent, round_number: int) -> tuple[Utterance, ...]:
        """Return the words that an agent may read in its turn; a later turn's words extend an earlier one's."""
        is_shared = self._job.view is View.SHARED
        if self._job.mode is Mode.FREE:
            return tuple(
                self._heard_as_one(agent, round_number) if is_shared else self._heard_freely(agent, round_number)
            )
        if is_shared:
            return shared_before(self._job, agent, round_number, self._spoken)
        return visible_before(self._job, agent, round_number, self._spoken)

    def heard_turns(self, agent_id: str, round_number: int) -> int | None:
        """Return how many turns were visible when the prompt of a turn was made (free mode), None where it was not."""
        return self._heard.get((agent_id, round_number)) if self._job.mode is Mode.FREE else None

    def _heard_as_one(self, listener: Agent, round_number: int) -> Iterator[Utterance]:
        """Yield the discussion in the order in which it became visible."""
        spoken = list(self._spoken.items())
        speakers = {agent.id: agent for agent in self._job.agents}
        for (agent_id, of_round), words in spoken[: self._heard.get((listener.id, round_number), len(spoken))]:
            if is_visible_later(speakers[agent_id], listener.id):
                yield Utterance(agent=agent_id, round=of_round, text=words)

    def _heard_freely(self, listener: Agent, round_number: int) -> Iterator[Utterance]:
        """Yield the discussion as the listener met it: what came while it spoke comes after its own words."""
        spoken = list(self._spoken.items())
        speakers = {agent.id: agent for agent in self._job.agents}
        at = 0
        for number in range(round_number + 1):
            upto = max(at, self._heard.get((listener.id, number), len(spoken)))
            for (agent_id, of_round), words in spoken[at:upto]:
                if agent_id != listener.id and is_visible_later(speakers[agent_id], listener.id):
                    yield Utterance(agent=agent_id, round=of_round, text=words)
            at = upto
            own = self._spoken.get((listener.id, number))
            if own is not None and number < round_number:
                yield Utterance(agent=listener.id, round=number, text=own)

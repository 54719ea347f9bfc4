"""The memories of one job's agents: the rounds that each is shown, their tokens, and the summaries of earlier ones."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from string import Template
from typing import Final

import anyio
from msgspec.structs import replace

from service.conversations.job.job import Agent, Conversation, Mode, PromptAt, TurnKey, View
from service.conversations.job.memory import CHARS_A_TOKEN, MARGIN, Cuts, first_shown
from service.conversations.job.states import TurnState
from service.conversations.job.wording import Wording
from service.conversations.record.heritage import is_own_memory, open_to, with_formers
from service.conversations.record.transcript import Turn
from service.conversations.talk.discussion import Utterance, is_visible_later
from service.conversations.talk.prompt_messages import agent_request, opened
from service.conversations.talk.prompt_record import PromptRecord
from service.scheduling.asking.talks import JobTalks
from service.store.records import MemoryCut
from transport.answer_bound import NAMES, bounds_in
from workers.requests.request import CONSTRAINTS, Request
from workers.spec import WorkerSpec

EVERYBODY: Final = ""  # stands for all agents as the reader of a shared view
SUM_UP: Final = 96  # tokens of the request for a summary
COUNTS: Final = 64  # prompts of one conversation with counted tokens
AROUND: Final = 8  # tokens around a turn's words in a prompt: its speaker, and the template
# Parameters for an agent's answers that have no meaning, or do harm, in a summary.
OF_ANSWERS: Final = frozenset({*CONSTRAINTS, *NAMES, "min_tokens", "tool_choice", "parallel_tool_calls", "stop"})

# The agents whose words one may read in later rounds, and within a round
Hearing = tuple[frozenset[str], frozenset[str]]


class PastTokens:
    """The estimated tokens of the turns of one job, and of the past that each agent is shown; part of its memories."""

    def __init__(self, of: JobTalks) -> None:
        self._of = of
        self._sizes: dict[str, dict[tuple[str, int], int]] = {}  # by conversation, and by agent and round
        self._hearings: dict[tuple[str, str], Hearing] = {}  # by conversation and agent
        self._counted: dict[str, dict[tuple[int, int, Hearing], Counter[int]]] = {}  # by conversation, see shown
        self._asked: dict[tuple[str, str], tuple[int, int]] = {}  # round and tokens of an agent's last prompt

    def __repr__(self) -> str:
        return f"<PastTokens of {len(self._sizes)} conversations>"

    def forget_conversation(self, conversation_id: str) -> None:
        """Forget a conversation that has ended."""
        self._sizes.pop(conversation_id, None)
        self._counted.pop(conversation_id, None)
        for agent_id in self._of.agents:
            self._asked.pop((conversation_id, agent_id), None)
            self._hearings.pop((conversation_id, agent_id), None)

    def note_size(self, turn: Turn) -> None:
        """Record the tokens of a turn and of its prompt; a turn with which its agent leaves has none."""
        self._forget_counts(turn.key)
        if turn.leaves:
            return
        key, usage = turn.key, turn.usage
        counted = None if turn.tool_calls or turn.thinking else usage.completion_tokens
        words = len(turn.text) // CHARS_A_TOKEN if counted is None else counted
        self._sizes.setdefault(key.conversation_id, {})[key.agent_id, key.round] = words + AROUND
        # After tool calls the engine's counts are sums over all requests of the turn.
        if usage.prompt_tokens is not None and not turn.tool_calls:
            self._asked[key.conversation_id, key.agent_id] = key.round, usage.prompt_tokens

    def shown(self, agent: Agent, conversation_id: str, number: int, first: int) -> Counter[int]:
        """Count the tokens of each round that an agent is shown in its turn of round ``number``.

        Shared views cache the count per audience. Free mode cannot, since timing decides who heard what.
        """
        if self._of.job.view is not View.SHARED or self._of.job.mode is Mode.FREE:
            return self._count_shown(agent, conversation_id, number, first)
        counted = self._counted.setdefault(conversation_id, {})
        place = (number, first, self._hearing_of(agent, conversation_id))
        if place not in counted:
            if len(counted) >= COUNTS:
                counted.clear()
            counted[place] = self._count_shown(agent, conversation_id, number, first)
        return counted[place]

    def _count_shown(self, agent: Agent, conversation_id: str, number: int, first: int) -> Counter[int]:
        sizes, shown = self._sizes.get(conversation_id, {}), Counter[int]()
        for each in self._of.discussion(conversation_id).heard_by(agent, number, first):
            if each.round >= first:
                shown[each.round] += sizes.get((each.agent, each.round), 0)
        return shown

    def beside_past(self, agent: Agent, key: TurnKey, cuts: Cuts) -> int:
        """Return the tokens of an agent's last prompt beside the past that it showed; 0 until an engine counted one."""
        at, asked = self._asked.get((key.conversation_id, agent.id), (-1, 0))
        return asked - self.shown(agent, key.conversation_id, at, cuts.shown_in(at)).total() if asked else 0

    def _forget_counts(self, key: TurnKey) -> None:
        """Forget the counts of prompts that show a turn which has just ended."""
        counted = self._counted.get(key.conversation_id, {})
        is_led = self._of.job.mode is Mode.LED  # there the named agent hears the leader's choice
        for place in list(counted):
            number, _, (_, within) = place
            if number > key.round or (number == key.round and (is_led or key.agent_id in within)):
                del counted[place]

    def _hearing_of(self, agent: Agent, conversation_id: str) -> Hearing:
        """Return the agents whose words one may read later, and within a round: equal results mean equal prompts."""
        place = conversation_id, agent.id
        if place not in self._hearings:
            speakers = with_formers(self._of.job, self._of.conversations[conversation_id].heritage).agents
            audible = frozenset(each.id for each in speakers if is_visible_later(each, agent.id))
            self._hearings[place] = audible, agent.waits_for
        return self._hearings[place]


class Memories:
    """The memories of one job; written by the scheduler alone. Without any memory nothing is recorded."""

    def __init__(self, of: JobTalks) -> None:
        self._of = of
        self._tokens = PastTokens(of)
        self.note_size = self._tokens.note_size
        self.are_any = any(agent.memory is not None for agent in of.job.agents)
        self._cuts: dict[tuple[str, str], Cuts] = {}  # by conversation and reader
        self._summaries: dict[tuple[str, str], dict[int, str]] = {}  # by conversation and reader, and by round
        self._locks: dict[tuple[str, str], anyio.Lock] = {}  # by conversation and reader

    def __repr__(self) -> str:
        return f"<Memories of {len(self._cuts)} readers>"

    def forget_conversation(self, conversation_id: str) -> None:
        """Forget a conversation that has ended."""
        self._tokens.forget_conversation(conversation_id)
        for agent_id in (EVERYBODY, *self._of.agents):
            for kept in (self._cuts, self._summaries, self._locks):
                kept.pop((conversation_id, agent_id), None)

    def hear_again(self, turn: Turn) -> None:
        """Restore a turn of an earlier life, or an inherited one, with the window of its prompt.

        That of a failed turn holds on too: an heir knows of it from nothing else.
        """
        if not self.are_any:
            return
        if turn.is_heard:
            self.note_size(turn)
        if not self._is_its_own(turn):
            return
        prompt = turn.attempts[-1].prompt if turn.attempts else None
        if prompt is not None:
            self._cuts_of(turn.key).decide(turn.key.round, prompt.from_round, turn.key.agent_id)

    def _is_its_own(self, turn: Turn) -> bool:
        """Whether a turn had the window that it would have here: an heir's memory may differ from its source's."""
        return is_own_memory(turn, self._of.conversations[turn.key.conversation_id].heritage)

    def shown_from(self, key: TurnKey) -> int:
        """Return the first round that a turn is shown."""
        return self._cuts_of(key).shown_in(key.round)

    def resume(self, cuts: Iterable[MemoryCut]) -> None:
        """Restore the cuts of turns that have not ended."""
        for cut in cuts:
            self._cuts_of(cut.key).decide(cut.key.round, cut.from_round)

    def lock(self, key: TurnKey) -> anyio.Lock:
        """Return the lock of a reader's cuts: in a shared view several turns would decide at once."""
        reader = self._reader(key)
        return self._locks.setdefault((reader.conversation_id, reader.agent_id), anyio.Lock())

    def plan(self, key: TurnKey, spec: WorkerSpec) -> MemoryCut | None:
        """Return the cut that a turn needs before it is asked; None if its window stays or is already decided."""
        agent = self._of.agent(key)
        cuts = self._cuts_of(key)
        if agent.memory is None or cuts.is_decided(key.round, agent.id):
            return None
        if self._of.job.prompt_at is PromptAt.START:
            self._of.discussion(key.conversation_id).make_prompt_once(key.agent_id, key.round)
        before = cuts.shown_in(key.round)
        # The first decision holds for all readers; later words may not fit the context of one that is shown more.
        readers = [agent] if cuts.is_any_decided(key.round) else self._readers(agent, key)
        first = max(self._first_shown(reader, key, spec, before) for reader in readers)
        if first > before:
            return MemoryCut(key=self._reader(key), from_round=first)
        cuts.decide(key.round, before, agent.id)
        return None

    def _readers(self, agent: Agent, key: TurnKey) -> list[Agent]:
        """Return the agents whose window this decision sets: all of a shared view with a memory.

        The context is known only for the agent's own model.
        """
        if self._of.job.view is not View.SHARED:
            return [agent]
        left = self._of.discussion(key.conversation_id).left_before(key.round)
        return [
            each
            for each in self._of.casts[key.conversation_id].values()
            if each.memory is not None and each.model and (each.model == agent.model or not each.memory.is_auto)
            if each.id not in left
        ]

    def _first_shown(self, agent: Agent, key: TurnKey, spec: WorkerSpec, before: int) -> int:
        """Return the first round that an agent should be shown in its turn; so far it is ``before``."""
        assert agent.memory is not None  # noqa: S101 - only those who have one
        key = key._replace(agent_id=agent.id)
        shown = self._tokens.shown(agent, key.conversation_id, key.round, before)
        room = self._room(agent, key, spec, sum(size for at, size in shown.items() if at >= key.round))
        if agent.memory.summary is not None:  # a summary is requested after all of the window
            last = max((size for at, size in shown.items() if at < key.round), default=0)
            room = max(0, room - max(0, agent.memory.summary.max_tokens + SUM_UP - spec.most_answer) - last)
        return first_shown(agent.memory, shown, before, key.round, room)

    def take_cut(self, cut: MemoryCut, summary: Turn | None = None) -> None:
        """Apply a stored cut, with the summary of the rounds before it."""
        self._cuts_of(cut.key).decide(cut.key.round, cut.from_round)
        if summary is not None:
            self.hear_summary(summary)

    def hear_summary(self, turn: Turn) -> None:
        """Apply a stored summary."""
        if turn.state is TurnState.COMPLETED and turn.text.strip() and self._is_its_own(turn):
            reader = self._reader(turn.key)
            self._summaries.setdefault((reader.conversation_id, reader.agent_id), {})[reader.round] = turn.text

    def summary_request(
        self, key: TurnKey, until: int, asked_at: datetime, spec: WorkerSpec
    ) -> tuple[Request, PromptRecord]:
        """Return the request for a summary of the rounds below ``until``, and the record of its prompt."""
        reader = self._of.agent(key)
        assert reader.memory is not None  # noqa: S101 - it has decided on it
        assert reader.memory.summary is not None  # noqa: S101
        author = self.summarizer(key)
        wanted, wording = reader.memory.summary, self._of.words[key.conversation_id].models[author.model]
        asked = wanted.prompt or Template(wording.sum_up).safe_substitute(words=wanted.max_tokens * 2 // 3)
        before = self._cuts_of(key).shown_in(key.round - 1)
        given = spec.defaults_beside(author.params)
        defaults = {name: value for name, value in given.items() if name not in CONSTRAINTS}
        record = PromptRecord(
            heard=self._of.discussion(key.conversation_id).heard_turns(key.agent_id, key.round),
            addition=asked,
            defaults=defaults,
            changes=dict.fromkeys({"max_tokens", *bounds_in(defaults)}, wanted.max_tokens),
            from_round=before,
            is_summed=self.summary_before(key, before) is not None,
        )
        place = (self.opened(key, record, wording), author, key.round)
        words = self._of.words[key.conversation_id]
        said = self.summed(key, range(before, until))
        return agent_request(self._of.job, place, words, said, (), record, asked_at), record

    def opened(self, key: TurnKey, record: PromptRecord, wording: Wording) -> Conversation:
        """Return a turn's conversation, opened with the summary or the note that replaces hidden rounds."""
        conversation = self._of.conversations[key.conversation_id]
        # The request for a summary includes the summary before it.
        known = self.summary_before(key, record.from_round) if record.is_summed else None
        return opened(conversation, wording, record.from_round, known)

    def summary_before(self, key: TurnKey, from_round: int) -> str | None:
        """Return the summary of the rounds before ``from_round``, for a turn's reader; None without one."""
        reader = self._reader(key)
        known = self._summaries.get((reader.conversation_id, reader.agent_id), {})
        made = self._cuts_of(key).decided_for(from_round)
        newest = max((at for at in known if made is not None and at in made), default=None)
        return None if newest is None else known[newest]

    def summarizer(self, key: TurnKey) -> Agent:
        """Return the agent that writes a turn's summary: its own or another, without tools and constraints."""
        reader = self._of.agent(key)
        by = reader.memory.summary.by if reader.memory is not None and reader.memory.summary is not None else None
        author = reader if by is None else self._of.casts[key.conversation_id][by]
        params = {name: value for name, value in author.params.items() if name not in OF_ANSWERS}
        return replace(author, params=params, tools=(), exit_tools=(), validation=None)

    def summed(self, key: TurnKey, rounds: range) -> Sequence[Utterance]:
        """Return the words that a summary is made of.

        They are those of its reader, or in a shared view those that all agents may read.
        """
        agent = self._of.agent(key)
        said = self._of.discussion(key.conversation_id).heard_by(agent, key.round, rounds.start)
        heard = [each for each in said if each.round < rounds.stop]
        if self._of.job.view is not View.SHARED:
            return heard
        speakers = with_formers(self._of.job, self._of.conversations[key.conversation_id].heritage).agents
        open_ = open_to({each.id: each for each in speakers}, self._of.agents)
        return [each for each in heard if each.agent in open_]

    def _room(self, agent: Agent, key: TurnKey, spec: WorkerSpec, present: int) -> int:
        """Return the tokens left for the past beside the rest of the prompt and the longest answer."""
        # Words of other models were counted by their tokenizers, so the rest of the prompt may look too small.
        conversation = self._of.conversations[key.conversation_id]
        least = (len(self._of.job.system) + len(agent.system) + len(conversation.prompt)) // CHARS_A_TOKEN
        base = max(least, self._tokens.beside_past(agent, key, self._cuts_of(key)))
        return max(0, spec.context - spec.longest_answer(agent.params) - base - present - MARGIN)

    def _reader(self, key: TurnKey) -> TurnKey:
        return key._replace(agent_id=EVERYBODY) if self._of.job.view is View.SHARED else key

    def _cuts_of(self, key: TurnKey) -> Cuts:
        reader = self._reader(key)
        return self._cuts.setdefault((reader.conversation_id, reader.agent_id), Cuts())

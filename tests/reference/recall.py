"""What an agent is shown of the past, and the summaries of the rest.

Source: specification, "Memory". The record says where a cut by tokens is: only the engine counts them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template

from tests.reference.asked_turns import heard_before
from tests.reference.hearing import heard, heard_freely, spoken_in
from tests.reference.heirs import Known
from tests.reference.job import Agent, Document
from tests.reference.prompts import NOW, SOME_TIME, TOLD, Heard, Message, Model, Opening, Prompts
from tests.reference.wire import OURS, Asked, difference
from tests.reference.words import words_of

SUMMARY_TOKENS = 200


@dataclass(slots=True)
class Recall:
    """The memories of one conversation's agents."""

    known: Known
    models: Mapping[str, Model]
    is_told: bool = True  # how much was heard of in inherited turns
    faults: list[str] = field(default_factory=list)

    def openings(self, agent: Agent, turns: Sequence[Document]) -> list[list[Opening]]:
        """Return what each turn is not shown; the record has the cuts, which are judged where they are certain.

        In a shared view another turn may cut the past of a round after this one was asked; it is asked again with less.
        """
        made: list[list[Opening]] = []
        first = 0
        for turn in turns:
            told, number = turn["memory"], turn["round"]
            at = told["from_round"] if told is not None else 0
            if turn["state"] == "cancelled":
                at = max(at, first)
            elif at != self._expected(agent, number, first, at):
                self.faults.append(f"{agent.id} is shown rounds from {at} on in round {number}, from {first} before")
            first = at
            earlier = self._cuts_till(number, first) if self.known.talk.view == "shared" else []
            firsts = [*earlier, first]
            made.append([Opening(each, self._summary(agent, each) if each else None) for each in firsts])
        return made

    def _cuts_till(self, number: int, first: int) -> list[int]:
        told = [turn["memory"] for turn in self._all if turn["kind"] == "turn" and turn["round"] <= number]
        return sorted(
            {each["from_round"] if each else 0 for each in told if not each or each["from_round"] < first} - {first}
        )

    def _expected(self, agent: Agent, number: int, first: int, told: int) -> int:
        """Return from which round on a turn must be shown the past, as far as that is certain."""
        keep = (agent.memory or {}).get("keep", "all")
        if keep == "all":
            return 0
        is_own = self.known.talk.view == "own" and self.known.talk.source is None
        if is_own and isinstance(keep, dict) and "rounds" in keep:
            return first if number - first <= keep["rounds"] else number - math.ceil(keep["rounds"] / 3)
        return told if first <= told <= number else first

    def _summary(self, agent: Agent, first: int) -> str | None:
        """Return the summary that stands for the rounds before one: its reader's, or in a shared view the one for all.

        It was made in the round in which the first turn was shown so little.
        """
        is_shared = self.known.talk.view == "shared"
        of_reader = [turn for turn in self._all if is_shared or turn["agent"] == agent.id]
        cut = [turn for turn in of_reader if turn["memory"] is not None and turn["memory"]["from_round"] == first]
        since = min(turn["round"] for turn in cut if turn["kind"] == "turn")
        found = [turn for turn in of_reader if turn["kind"] == "summary" and turn["round"] == since]
        found = [turn for turn in found if turn["inherited"] is None] or found  # an heir may have summed up again
        made = [turn["text"] for turn in found if turn["state"] == "completed" and turn["text"].strip()]
        return made[-1] if made else None

    @property
    def _all(self) -> list[Document]:
        return list(self.known.transcript["turns"])

    # What summaries are made of

    def is_of_summary(self, asked: Asked) -> bool:
        """Return whether a request is for a summary."""
        asks = {_ask_of(agent) for agent in self.known.talk.agents.values()} - {None}
        return any(str(asked.body["messages"][-1]["content"]).endswith(str(ask)) for ask in asks)

    def check_summaries(self, asked: Sequence[Asked], is_lost: Callable[[Asked], bool]) -> list[str]:
        """Return the faults in the requests for summaries, and in the summaries themselves."""
        faults: list[str] = []
        own = [turn for turn in self._all if turn["kind"] == "summary" and turn["inherited"] is None]
        answers: dict[int, set[str]] = {}
        for each in asked:
            found = [place for place, turn in enumerate(own) if self._is_asked_so(turn, each)]
            for place in found:
                said = words_of(self._author(own[place]), (each.answer or {}).get("content", ""))
                answers.setdefault(place, set()).add(said)
            if not found and each.answer is not None and not is_lost(each):
                faults.append(f"{each.agent} is asked for a summary in other words: {each.body['messages']}")
        for place, turn in enumerate(own):
            if turn["state"] == "completed" and turn["text"] not in answers.get(place, ()):
                faults.append(
                    f"the summary of {turn['agent']} in round {turn['round']} was not said so: {turn['text']!r}"
                )
        return faults

    def _author(self, summary: Document) -> Agent:
        agent = self.known.talk.agents[summary["agent"]]
        by = (agent.memory or {}).get("summary", {}).get("by", "self")
        is_own = self.known.talk.view == "shared" or by == "self"
        return agent if is_own else self.known.talk.agents[by]

    def _is_asked_so(self, summary: Document, asked: Asked) -> bool:
        reader, author = self.known.talk.agents[summary["agent"]], self._author(summary)
        if asked.agent != author.id:
            return False
        prompts = Prompts(
            self.known.talk, replace(author, tools=(), exit_tools=(), validation=None), self._model(author)
        )
        wanted = prompts.summary_params() | {
            "max_tokens": (reader.memory or {})["summary"].get("max_tokens", SUMMARY_TOKENS)
        }
        if wanted != {name: value for name, value in asked.body.items() if name not in OURS}:
            return False
        seen = [_without_clock(message) for message in asked.body["messages"]]
        ask = _ask_of(reader) or ""
        return any(
            difference(prompts.messages(summary["round"], words, opening, addition=ask), seen) is None
            for opening, words in self._summed(summary, reader)
        )

    def _model(self, agent: Agent) -> Model:
        return self.models[agent.model]

    def _summed(self, summary: Document, reader: Agent) -> Iterator[tuple[Opening, list[Heard]]]:
        """Yield what a summary may be made of: the last one, and the words of the rounds up to a cut."""
        talk, spoken = self.known.talk, spoken_in(self.known.talk, self.known.turns)
        is_shared = talk.view == "shared"
        turns = [turn for turn in self.known.turns if is_shared or turn["agent"] == reader.id]
        cuts = {turn["memory"]["from_round"] for turn in turns if turn["memory"] is not None}
        number, told = summary["round"], summary["memory"]
        begun = 0 if told is None else told["from_round"]
        if all(turn["round"] != number for turn in turns):  # a condition has left out the turn that was cut
            cuts |= set(range(begun + 1, number + 1))
        opening = Opening(begun, self._summary(reader, begun) if begun else None)
        for end in sorted(cut for cut in cuts if cut > begun):
            heards = (
                [heard(talk, reader, number, spoken, begun)]
                if talk.mode != "free"
                else self._heard_freely(reader, number, begun)
            )
            for words in heards:
                yield opening, [each for each in words if each.round < end and self._is_open(each.agent)]

    def _heard_freely(self, reader: Agent, number: int, first: int) -> Iterator[list[Heard]]:
        spoken = spoken_in(self.known.talk, self.known.turns)
        for before in heard_before(self.known, reader, number, spoken, is_told=self.is_told):
            for count in range(len(spoken) + 1):
                yield heard_freely(self.known.talk, reader, number, spoken, [*before, count], first)

    def _is_open(self, speaker: Agent) -> bool:
        """Whether a summary may have its words: in a shared view those that all may read."""
        talk = self.known.talk
        readers = [each.id for each in talk.agents.values() if not each.is_former]
        return talk.view != "shared" or all(speaker.shows(reader) for reader in readers)


def _without_clock(message: Message) -> Message:
    return {**message, "content": NOW.sub(SOME_TIME, message["content"])} if message["role"] == "system" else message


def _ask_of(agent: Agent) -> str | None:
    summary = (agent.memory or {}).get("summary")
    if summary is None:
        return None
    words = summary.get("max_tokens", SUMMARY_TOKENS) * 2 // 3
    return summary.get("prompt") or Template(TOLD["sum_up"]).substitute(words=words)

"""A plain implementation of the specification of jobs, which checks a job's transcripts and its engines' requests.

It sees documents, requests with their answers, and transcripts. It imports nothing of the program, and knows of no
scheduler: it walks through each conversation turn by turn, as if it were alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.reference.asked_turns import AskedTurns, heard_before
from tests.reference.course import Course
from tests.reference.hearing import Spoken, spoken_in
from tests.reference.heirs import Inherited, Known, Sources, inherit, origin_of, places
from tests.reference.job import Agent, Document, Talk, talks_of
from tests.reference.prompts import Model
from tests.reference.recall import Recall
from tests.reference.wire import Asked, Results, Standing, Wire, calls_in
from tests.reference.words import is_valid, without_thoughts, words_of


@dataclass(slots=True)
class Reading:
    """The check of one conversation; ``faults`` are where it differs from the specification."""

    known: Known
    inherited: Inherited
    models: Mapping[str, Model]
    results: Results
    asked: Sequence[Asked]
    sources: Sources
    faults: list[str] = field(default_factory=list)

    @property
    def talk(self) -> Talk:
        return self.known.talk

    def read(self) -> list[str]:
        """Return all differences."""
        self._check_heritage()
        self._check_course()
        if not self.faults:  # prompts are made of these words
            self._check_requests()
        return [f"{self.known.job}/{self.talk.id}: {fault}" for fault in self.faults]

    # Which turns there are

    def _check_heritage(self) -> None:
        talk = self.talk
        found = {(t["agent"], t["round"]): t for t in self.known.turns if t["inherited"] is not None}
        wanted = {(t["agent"], t["round"]): t for t in self.inherited.turns}
        if found.keys() != wanted.keys():
            self.faults.append(f"it has inherited {sorted(found)}, and not {sorted(wanted)}")
            return
        if talk.source is None:
            return
        source = self.sources[talk.source["job"], talk.source["conversation"]]
        for place, turn in wanted.items():
            as_it_was = {name: turn[name] for name in ("text", "state", "signals", "role", "thinking", "tool_calls")}
            if any(found[place][name] != value for name, value in as_it_was.items()):
                self.faults.append(f"the turn of {place} was not inherited as it was spoken")
            if found[place]["inherited"] != origin_of(source, turn):
                self.faults.append(f"the turn of {place} was spoken in {origin_of(source, turn)}")

    def _check_course(self) -> None:
        transcript, talk = self.known.transcript, self.talk
        course = Course(talk, self.known.turns, self.inherited.joined, self.inherited.former_tokens)
        course.walk()
        self.faults += course.faults
        state = "completed" if course.failed_by is None else "failed"
        if transcript["state"] != state:
            self.faults.append(f"it is {transcript['state']}, and not {state}")
            return
        there = [(turn["agent"], turn["round"]) for turn in self.known.turns]
        if len(set(there)) != len(there):
            self.faults.append(f"turns stand twice: {there}")
        left = sorted(course.left, key=lambda name: there.index((name, course.left[name])))
        if transcript["left"] != left:
            self.faults.append(f"{transcript['left']} have left, and not {left}")
        own = {place for place in there if not talk.agents[place[0]].is_former}
        if state == "completed":
            if own != course.must:
                self.faults.append(f"turns too many or too few: {sorted(own ^ course.must)}")
            if transcript["ended_by"] != course.ended_by:
                self.faults.append(f"it was ended by {transcript['ended_by']}, and not by {course.ended_by}")
            return
        assert course.failed_by is not None
        if transcript["reason"] != course.failed_by["reason"] or transcript["ended_by"] is not None:
            self.faults.append(f"it failed with {transcript['reason']}, and not with {course.failed_by['reason']}")
        if talk.mode == "rounds" and not self.talk.until:
            every = {
                (each.id, n)
                for each in talk.agents.values()
                if not each.is_former
                for n in range(self.inherited.joined.get(each.id, 0), talk.rounds)
                if n <= course.left.get(each.id, n)
            } | {(t["agent"], t["round"]) for t in self.inherited.turns if not talk.agents[t["agent"]].is_former}
            if every != own:
                self.faults.append(
                    f"of a conversation that failed turns are too many or too few: {sorted(every ^ own)}"
                )

    # Requests

    def _check_requests(self) -> None:
        recall = Recall(self.known, self.models, is_told=self._is_told())
        of_summaries = [each for each in self.asked if recall.is_of_summary(each)]
        clocks: set[str] = set()
        for agent in self.talk.agents.values():
            if agent.is_former:
                continue
            turns = [t for t in self.known.turns if t["agent"] == agent.id and t["inherited"] is None]
            turns.sort(key=lambda turn: turn["round"])
            asked = [each for each in self.asked if each.agent == agent.id and each not in of_summaries]
            if agent.by == "caller":
                self._check_caller(agent, turns, asked)
                continue
            wire, order = self._follow(agent, turns, asked)
            self.faults += wire.faults
            clocks |= wire.clocks
            if not wire.faults:
                self._note_hearing(agent, turns, wire, order)
                for place, turn in enumerate(turns):
                    self._check_turn(agent, turn, wire, wire.ends.get(place, []))
        self.faults += [] if self.faults else recall.check_summaries(of_summaries, self._is_lost)
        if len(clocks) > 1:
            self.faults.append(f"its BIOS tells several times: {clocks}")

    def _follow(self, agent: Agent, turns: Sequence[Document], asked: Sequence[Asked]) -> tuple[Wire, Spoken]:
        """Follow an agent's requests; words are heard in the order of the record."""
        recall, order = Recall(self.known, self.models, is_told=self._is_told()), spoken_in(self.talk, self.known.turns)
        openings = recall.openings(agent, turns)
        found: Wire | None = None
        rounds = turns[0]["round"] if turns else 0
        for before in heard_before(self.known, agent, rounds, order, is_told=self._is_told()):
            asked_turns = AskedTurns(self.known, self.inherited, order, before).of(agent, turns, openings)
            wire = Wire(self.talk, agent, self.models[agent.model], asked_turns, self.results, self._may_be_unknown)
            wire.follow(asked)
            found = wire if found is None or not wire.faults else found
            if not wire.faults:
                break
        assert found is not None
        self.faults += recall.faults
        return found, order

    def _may_be_unknown(self, asked: Asked) -> bool:
        return self._is_lost(asked) or self._is_dropped(asked)

    def _is_dropped(self, asked: Asked) -> bool:
        """Return whether a request may be of a turn that a condition left out: on a slot then, and not completed there.

        In free mode turns on slots run to their ends; one whose attempt fails, or whose answer is not valid, ends too.
        """
        ended_by, agent = self.known.transcript["ended_by"], self.talk.agents[asked.agent]
        if self.talk.mode != "free" or not isinstance(ended_by, dict):
            return False
        decider = self.talk.agents.get(ended_by.get("agent") or "")
        decided = [each.done_at for each in self.asked if decider is not None and each.agent == decider.id]
        if decided and asked.at > max(decided):
            return False
        if asked.answer is None:
            return True
        (calls, words), exits = calls_in(agent, asked.answer), {tool["function"]["name"] for tool in agent.exit_tools}
        return any(name not in exits for name, _ in calls) or not is_valid(agent.validation, words)

    def _is_told(self) -> bool:
        """Return whether the prompts of its source show how much was heard in each inherited turn.

        After a restart, of a turn that was tried again, and beside callers, the times in a source's record, by which an
        heir goes, need not be those of its prompts. And what an agent was not shown there does not tell what it had
        heard of.
        """
        if self.talk.source is None:
            return True
        is_once = all(len(turn["attempts"]) <= 1 and turn["by"] != "caller" for turn in self.inherited.turns)
        if any(each.life > 1 for each in self.asked) or not is_once:
            return False
        there = self.sources[self.talk.source["job"], self.talk.source["conversation"]].talk.agents
        here = self.talk.agents
        return all(there[name].visible_to == here[name].visible_to for name in there.keys() & here.keys())

    def _is_lost(self, asked: Asked) -> bool:
        """Return whether a request may follow an answer that was lost with an earlier run of the service.

        Such an answer was complete and is not recorded; a later run has asked again.
        """
        last = max((each.life for each in self.asked), default=0)
        before = [e for e in self.asked if e.life == asked.life and e.answer is not None and e.done_at <= asked.at]
        return asked.life < last and any(self._times_recorded(each) < self._times_said(each) for each in before)

    def _times_recorded(self, asked: Asked) -> int:
        text = (asked.answer or {}).get("content")
        turns = [turn for turn in self.known.transcript["turns"] if turn["inherited"] is None]
        attempts = [each for turn in turns if turn["agent"] == asked.agent for each in turn["attempts"]]
        return sum(each["text"] == text for each in attempts)

    def _times_said(self, asked: Asked) -> int:
        said_by = [each.answer for each in self.asked if each.agent == asked.agent and each.answer is not None]
        return sum(each["content"] == (asked.answer or {})["content"] for each in said_by)

    def _note_hearing(self, agent: Agent, turns: Sequence[Document], wire: Wire, order: Spoken) -> None:
        """Keep what each turn had heard, for heirs."""
        places = list(order)
        for place, turn in enumerate(turns):
            if ends := wire.ends.get(place):
                self.known.hearing[agent.id, turn["round"]] = frozenset(places[: ends[-1].upto[place]])

    def _check_caller(self, agent: Agent, turns: Sequence[Document], asked: Sequence[Asked]) -> None:
        if asked:
            self.faults.append(f"{agent.id} is a caller, and an engine was asked")
        for turn in turns:
            if turn["by"] != "caller" or turn["attempts"] or turn["tool_calls"] or turn["signals"]:
                self.faults.append(f"{agent.id} is a caller, and its turn says otherwise")
            if turn["state"] == "completed" and not is_valid(agent.validation, turn["text"], by_model=False):
                self.faults.append(f"{agent.id} has said {turn['text']!r}, which is not valid")

    def _check_turn(self, agent: Agent, turn: Document, wire: Wire, ends: Sequence[Standing]) -> None:
        """Check a turn's record against its engine's answer."""
        place = f"{agent.id} in round {turn['round']}"
        if turn["by"] != "model" or turn["role"] != agent.role:
            self.faults.append(f"{place} is told as {turn['by']} and {turn['role']}")
        verdicts = [(each, *wire.verdict(each)) for each in ends]
        if turn["state"] == "completed":
            standing = [(each, text) for each, verdict, text in verdicts if verdict == "valid"]
            if not standing or all(not self._is_as_said(agent, turn, each, text) for each, text in standing):
                self.faults.append(f"{place} is recorded as {turn['text']!r}, and has not said that")
        elif turn["state"] == "failed" and turn["reason"] == "validation_exhausted":
            retries = (agent.validation or {"retries": 3}).get("retries", 3)
            if not any(verdict == "invalid" and len(each.rejected) == retries for each, verdict, _ in verdicts):
                self.faults.append(f"{place} has not given {retries + 1} answers that are not valid")
        elif turn["state"] == "failed" and not any(
            verdict == "fails" and text == turn["reason"] for _, verdict, text in verdicts
        ):
            self.faults.append(f"{place} failed with {turn['reason']}: {turn['detail']}")
        rejected = [each["text"] for each in turn["attempts"] if each["reason"] == "invalid_answer"]
        said_so = [text for _, verdict, text in verdicts if verdict == "invalid"]
        if [text for text in rejected if text not in said_so]:
            self.faults.append(f"{place}: {rejected} were refused, and {said_so} are not valid")

    def _is_as_said(self, agent: Agent, turn: Document, at: Standing, text: str) -> bool:
        assert at.said is not None
        assert at.said.answer is not None
        reasoning = [at.said.answer.get("reasoning") or ""]
        thoughts, words = [without_thoughts(text)[1]], words_of(agent, text)
        thinking = "\n\n".join(each for each in (*reasoning, *thoughts) if each)
        is_thought = bool(at.exchanges) or at.is_forced or turn["thinking"] == thinking
        calls = sum(len(results) for _, results in at.exchanges)
        # The attempt after the one that made a call may have been refused before any request of it was kept.
        marks = {each["at_tokens"] for each in turn["continued"]}
        return (
            (turn["text"] == words)
            and (marks == set(at.marks) or (marks > set(at.marks) and bool(at.exchanges)))
            and is_thought
            and turn["usage"]["completion_tokens"] == at.tokens
            and len(turn["tool_calls"]) >= calls
        )


def read_job(
    job: str,
    document: Document,
    transcripts: Mapping[str, Document],
    asked: Sequence[Asked],
    models: Mapping[str, Model],
    results: Results,
    sources: Sources,
) -> tuple[list[str], dict[tuple[str, str], Known]]:
    """Return all differences of a job, and its conversations for those that begin with them."""
    faults: list[str] = []
    known: dict[tuple[str, str], Known] = {}
    talks = talks_of(document, {place: each.talk for place, each in sources.items()})
    for talk in talks.values():
        inherited, own = Inherited(), talk
        if talk.source is not None:
            own, inherited = inherit(talk, sources[talk.source["job"], talk.source["conversation"]])
        each = Known(job, own, transcripts[talk.id], inherited.joined)
        if talk.source is not None:
            there, taken = (
                sources[talk.source["job"], talk.source["conversation"]].hearing,
                set(places(inherited.turns)),
            )
            each.hearing.update({place: told & taken for place, told in there.items() if place in taken})
        known[job, talk.id] = each
        requests = [request for request in asked if request.conversation == talk.id]
        faults += Reading(each, inherited, models, results, requests, sources).read()
    return faults, known

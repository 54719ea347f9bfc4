"""Which turns a conversation must have, and how it must end: a walk through its record, round by round.

Source: specification, "Rounds mode", "Free mode", "Led mode", "Ends", "Failures of agents".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.reference.hearing import Place, in_turn
from tests.reference.job import END, Agent, Document, Talk
from tests.reference.words import choice_in, fulfils, judged_words, plain, said


@dataclass
class Course:
    """The walk; ``faults`` are where the record differs, ``joined`` is in which round each agent of an heir begins."""

    talk: Talk
    turns: Sequence[Document]  # turns of the record, without summaries
    joined: Mapping[str, int]
    former_tokens: int = 0
    faults: list[str] = field(default_factory=list)
    must: set[Place] = field(default_factory=set)  # the turns that the walk has come by
    held: dict[int, tuple[str | None, int]] = field(default_factory=dict)  # conditions, by whom and in which round
    left: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    ended_by: Any = None
    failed_by: Document | None = None  # the turn with which it failed

    def __post_init__(self) -> None:
        self._by_place = {(turn["agent"], turn["round"]): turn for turn in self.turns}
        self.tokens = self.former_tokens
        self._still = 0

    def walk(self) -> None:
        """Go through all rounds."""
        if self.talk.mode == "free":
            self._walk_freely()
        elif self.talk.mode == "led":
            self._walk_led()
        else:
            self._walk_rounds()
        if self.ended_by is None and self.failed_by is None:
            self.ended_by = "rounds"

    # One turn

    def _take(self, agent: Agent, number: int) -> Document | None:
        """Take a turn that must have been spoken; return it, None where the walk ends with it."""
        self.must.add((agent.id, number))
        turn = self._by_place.get((agent.id, number))
        if turn is None:
            self.faults.append(f"{agent.id} has no turn in round {number}")
            return None
        if turn["state"] == "completed":
            self.tokens += (turn["usage"]["completion_tokens"] or 0) if turn["kind"] == "turn" else 0
            return turn
        if turn["state"] == "failed" and self._is_silence(agent, turn):
            if agent.on_failure == "leave":
                self.left[agent.id] = number
            return turn
        if turn["state"] == "failed":
            self.failed_by = self.failed_by or turn
        return None

    def _was_not_there(self, agent: Agent, number: int) -> bool:
        """Return whether an heir's agent has no turn in a round, since its source did not have it."""
        return number < self.joined.get(agent.id, 0) and (agent.id, number) not in self._by_place

    def _of(self, turn: Document) -> Agent:
        return self.talk.agents[turn["agent"]]

    def _is_silence(self, agent: Agent, turn: Document) -> bool:
        is_of_all = turn["reason"] in ("cancelled", "internal")
        return turn["inherited"] is not None or (agent.on_failure != "end" and not is_of_all)

    def _hold(self, agent: Agent, number: int, turn: Document) -> list[set[str]]:
        """Record which conditions a turn fulfils by itself; return whose turns fulfil each."""
        if turn["state"] != "completed" or turn["inherited"] is not None:
            return []
        found = [place for place, each in enumerate(self.talk.until) if fulfils(each, agent, turn)]
        for place in found:  # the first one in the job is recorded
            by = self.held.get(place, (agent.id, number))[0] or agent.id
            self.held[place] = min(by, agent.id, key=list(self.talk.agents).index), number
        return [{agent.id} for _ in found]

    def _words(self, turn: Document | None, agent: Agent) -> str:
        return "" if turn is None or turn["state"] != "completed" else plain(judged_words(agent, turn["text"]))

    def _judge_round(self, number: int, *, is_unchanged: bool, is_own: bool) -> None:
        """Judge the conditions that apply at the end of a round."""
        self._still = self._still + 1 if is_unchanged else 0
        for place, each in enumerate(self.talk.until if is_own else ()):
            is_still = "unchanged" in each and self._still >= each["unchanged"]
            if is_still or ("answer_tokens" in each and self.tokens >= each["answer_tokens"]):
                self.held[place] = (None, number)
        self.ended_by = self._first_held()

    def _first_held(self) -> Document | None:
        """Return the first listed of the conditions that hold."""
        if not self.held:
            return None
        place = min(self.held)
        agent, number = self.held[place]
        return {"until": place, "agent": agent, "round": number}

    # Rounds

    def _walk_rounds(self) -> None:
        everybody = {each.id for each in self.talk.agents.values() if not each.is_former}
        before: dict[str, str] | None = None
        is_own = False  # whether any turn so far is the conversation's own
        for number in range(self.talk.rounds):
            fulfilled: list[set[str]] = []
            words: dict[str, str] = {}
            absent, last_leave, is_stopped = set(self.left), None, False
            for agent in in_turn(self.talk):
                if agent.is_former or agent.id in absent or self._was_not_there(agent, number):
                    continue
                if any(by <= self._awaited(agent, absent) for by in fulfilled):
                    continue
                turn = self._take(agent, number)
                if turn is None:
                    is_stopped = True
                    continue
                last_leave = turn if agent.id in self.left else last_leave
                is_own = is_own or turn["inherited"] is None
                if said_now := self._words(turn, agent):
                    words[agent.id] = said_now
                fulfilled += self._hold(agent, number, turn) + self._agree(agent, number, words, turn)
            if is_stopped:  # others may have been rounds ahead
                ends = (t for t in self.turns if t["state"] == "failed" and not self._is_silence(self._of(t), t))
                self.failed_by = self.failed_by or next(ends, None)
                return
            if set(self.left) >= everybody:
                self.failed_by = last_leave
                return
            self._judge_round(number, is_unchanged=before == words, is_own=is_own)
            before = words
            if self.ended_by is not None:
                return

    def _awaited(self, agent: Agent, absent: set[str]) -> set[str]:
        """Return all that an agent waits for in a round, directly and indirectly; absent agents are not waited for."""
        found: set[str] = set()
        more = {name for name in agent.after if name not in absent}
        while more:
            found |= more
            more = {n for name in more for n in self.talk.agents[name].after if n not in absent} - found
        return found

    def _agree(self, agent: Agent, number: int, words: Mapping[str, str], turn: Document) -> list[set[str]]:
        """Return by whom it is fulfilled that all say the same, once the last of them has said it."""
        fulfilled: list[set[str]] = []
        for place, each in enumerate(self.talk.until):
            names = each.get("agree", ())
            there = [self._by_place.get((name, number), turn) for name in names]
            if agent.id not in names or all(each["inherited"] is not None for each in there):
                continue  # inherited words count, and end nothing by themselves
            if all(words.get(name) for name in names) and len({words[name] for name in names}) == 1:
                self.held[place] = (None, number)
                fulfilled.append(set(names))
        return fulfilled

    # Led

    def _walk_led(self) -> None:
        leader, others = self.talk.agents[self.talk.leader or ""], set(self.talk.agents) - {self.talk.leader}
        last: dict[str, str] = {}
        for number in range(self.talk.rounds):
            choice = self._take(leader, number)
            if choice is None:
                return
            if self._hold(leader, number, choice):
                self._judge_round(number, is_unchanged=False, is_own=True)
                return
            named = self._named(leader, choice)
            if named in (None, END):
                self.ended_by = {"leader": leader.id, "round": number}
                if named is None:
                    self.faults.append(f"the leader names nobody in round {number}, and its turn is completed")
                return
            agent = self.talk.agents[named or END]
            turn = self._take(agent, number)
            if turn is None:
                return
            if set(self.left) >= others:
                self.failed_by = turn
                return
            words = self._words(turn, agent)
            is_unchanged = last.get(agent.id, "") == words
            if words:
                last[agent.id] = words
            self._hold(agent, number, turn)
            self._agree(agent, number, last, turn)
            self._judge_round(number, is_unchanged=is_unchanged, is_own=turn["inherited"] is None)
            if self.ended_by is not None:
                return

    def _named(self, leader: Agent, choice: Document) -> str | None:
        """Return the agent that a leader named: in an inherited round the one that spoke."""
        spoke: list[str] = [turn["agent"] for turn in self.turns if turn["round"] == choice["round"]]
        if choice["inherited"] is not None and len(spoke) > 1:
            return next(name for name in spoke if name != leader.id)
        names = [name for name in self.talk.agents if name != leader.id and name not in self.left]
        return choice_in([*names, END], said(choice["text"]))

    # Freely

    def _walk_freely(self) -> None:
        """Walk in the order of the record: it decides."""
        everybody = [each.id for each in self.talk.agents.values() if not each.is_former]
        had = {name: self.joined.get(name, 0) for name in everybody}
        words: dict[int, dict[str, str]] = {}
        first_own, ends = self.talk.rounds, 0
        for turn in self.turns:
            agent, number = self.talk.agents[turn["agent"]], turn["round"]
            if agent.is_former or turn["state"] == "cancelled":
                continue
            if self.ended_by is not None:
                self._run_on(agent, turn)
                continue
            if self._take(agent, number) is None:
                return
            had[agent.id] = self.talk.rounds if agent.id in self.left else max(had[agent.id], number + 1)
            said_now, of_round = self._words(turn, agent), words.setdefault(number, {})
            of_round |= {agent.id: said_now} if said_now else {}
            first_own = min(first_own, number) if turn["inherited"] is None else first_own
            fulfilled = self._hold(agent, number, turn) + self._agree(agent, number, of_round, turn)
            if set(self.left) >= set(everybody):
                self.failed_by = turn
                return
            while ends < min(had.values()) and self.ended_by is None:
                is_unchanged = ends > 0 and words.get(ends, {}) == words.get(ends - 1, {})
                self._judge_round(ends, is_unchanged=is_unchanged, is_own=first_own <= ends)
                ends += 1
            if fulfilled and self.ended_by is None:
                self.ended_by = self._first_held()
        if self.ended_by is None and self.failed_by is None:
            self.must |= {(name, number) for name in everybody for number in range(had[name], self.talk.rounds)}
            if missing := [name for name in everybody if had[name] < self.talk.rounds]:
                self.faults.append(f"{missing} have not had all their turns")

    def _run_on(self, agent: Agent, turn: Document) -> None:
        """Take a turn that was on its slot when a condition held: it runs to its end, and may fail the conversation."""
        self.must.add((agent.id, turn["round"]))
        if turn["state"] != "failed" or self.failed_by is not None:
            return
        if not self._is_silence(agent, turn):
            self.failed_by = turn
        elif agent.on_failure == "leave":
            self.left[agent.id] = turn["round"]

"""Whether the requests of one agent in one conversation are those that its turns require, in order.

Source: specification, "Prompts that were asked", "Answer validation", "Constraints", "Tool loop", "Call journal", "Half
an answer".
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.reference.job import Agent, Document, Talk
from tests.reference.prompts import ANY_REASON, JOURNAL, NOW, SOME_TIME, Heard, Message, Model, Opening, Prompts
from tests.reference.words import is_valid

OURS = ("model", "messages", "tools", "stream", "stream_options", "return_progress")
STUCK = 3
THOUGHT = r'thought ::= ([^<] | "<" [^/] | "</" [^t])* "</think>" [ \t\n]*'
_REQUEST = re.compile(r'<tool_request name="([^"]+)">(.*?)</tool_request>', re.DOTALL)
Results = Callable[[str, Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to an engine: ``answer`` is its complete answer, None if it was cut off.

    ``life`` is the service's, ``at`` and ``done_at`` are seconds; ``tokens`` those of the answer. A request that goes
    on with half an answer has the ``body`` of a request for all of it, a whole answer, and ``half_tokens``.
    """

    conversation: str
    agent: str
    body: Document
    answer: Document | None
    life: int
    at: float
    done_at: float
    tokens: int = 0
    half_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn that may have been asked: what it has heard, by how much of the record that was in this turn and before.

    ``choices`` are how much it may have heard of: in free mode the record does not say it.
    """

    turn: Document
    agent: Agent  # as it is in this turn: a leader may name other agents in each
    heard: Callable[[tuple[int, ...]], list[Heard]]
    choices: Sequence[int]
    openings: Sequence[Opening]  # the last one is the record's; in a shared view a retry may be shown less than it was


@dataclass(frozen=True, slots=True)
class Standing:
    """An agent's position between two requests."""

    place: int = -1  # place of its turn
    upto: tuple[int, ...] = ()  # how much of the record was heard of in each turn
    rejected: tuple[tuple[str, str], ...] = ()
    exchanges: tuple[tuple[Document, tuple[Any, ...]], ...] = ()
    is_forced: bool = False  # asked once more, for the answer that was wanted
    spent: int = 0  # tokens of earlier answers of the attempt
    words: str = ""  # words of the newest answer that has any
    said: Asked | None = None  # the last request
    marks: tuple[int, ...] = ()  # tokens of earlier attempts after which its answer went on

    @property
    def tokens(self) -> int:
        return self.spent + (self.said.tokens if self.said else 0)


@dataclass(slots=True)
class Wire:
    """Follows the requests of one agent."""

    talk: Talk
    agent: Agent
    model: Model
    turns: Sequence[AskedTurn]
    results: Results
    is_lost: Callable[[Asked], bool]  # whether a request may have been made of words that a kill took away
    faults: list[str] = field(default_factory=list)
    clocks: set[str] = field(default_factory=set)
    ends: dict[int, list[Standing]] = field(default_factory=dict)  # positions after each whole answer, by turn
    _known: list[tuple[str, Document]] = field(default_factory=list)  # calls that were made in the turn

    def follow(self, asked: Sequence[Asked]) -> None:
        """Go through the requests."""
        at = Standing()
        for number, each in enumerate(asked):
            fault, found = None, None
            for option in self._options(at, each):
                fault_here = self._differs(option, each)
                if fault_here is None:
                    found = option
                    break
                fault = fault or fault_here
            if found is None and self.is_lost(each):
                continue
            if found is None:
                what = fault or "nothing more was to be asked"
                self.faults.append(f"request {number} of {self.agent.id} in {self.talk.id}: {what}")
                return
            if found.place != at.place:
                self._known = []
            at = replace(found, said=each)
            if each.answer is not None:
                self.ends.setdefault(at.place, []).append(at)

    # What may come next

    def _options(self, at: Standing, asked: Asked) -> Iterator[Standing]:
        last = at.said
        if last is None:
            yield from self._begun(at)
            return
        if asked.half_tokens:  # its end never arrived, whatever the engine has written
            yield from self._asked_again(at, asked)
            return
        # An engine that dies before it has told the tokens of an answer is asked for all of it again.
        is_again = last.answer is None or last.life != asked.life or self.agent.is_recorded
        if last.answer is not None:
            verdict, detail = self.verdict(at)
            is_again = is_again or verdict in ("calls", "again")  # the next request may never have reached its engine
            if verdict == "calls":
                results = tuple(self.results(name, arguments) for name, arguments in detail)
                self._known += [call for call in detail if call not in self._known]
                exchanges = (*at.exchanges, (last.answer, results))
                after = replace(at, exchanges=exchanges, spent=at.tokens, words=self._words(at))
                yield after
                if at.is_forced:  # the next attempt is not
                    yield replace(after, is_forced=False)
            elif verdict == "again":
                yield replace(at, is_forced=True, spent=at.tokens, words=self._words(at))
            elif verdict == "invalid" and self._may_retry(at):
                rejected = (*at.rejected, (detail, ANY_REASON))
                yield Standing(at.place, at.upto, rejected, said=last)
            else:
                yield from self._begun(at)
        if is_again:
            yield from self._asked_again(at, asked)

    def _asked_again(self, at: Standing, asked: Asked) -> Iterator[Standing]:
        last = at.said
        assert last is not None
        if at.exchanges:  # the next attempt goes on after the calls that have results
            is_kept = last.answer is not None and last.life == asked.life and not asked.half_tokens
            spent = at.tokens if is_kept else at.spent
            yield replace(at, is_forced=False, spent=spent, marks=(*at.marks, spent + asked.half_tokens))
        elif asked.half_tokens and at.is_forced:  # its tokens come after those of the answer before
            yield replace(at, is_forced=False, marks=(*at.marks, at.spent + asked.half_tokens))
        kept = range(len(at.rejected), -1, -1) if last.life != asked.life else (len(at.rejected),)
        for count in kept:
            marks = (*at.marks, asked.half_tokens) if asked.half_tokens else ()
            same = Standing(at.place, at.upto, at.rejected[:count], said=last, marks=marks)
            yield same
            if not count and not asked.half_tokens:  # half an answer goes on with the prompt that it answers
                yield from (replace(same, upto=(*at.upto[:-1], n)) for n in self.turns[at.place].choices)
        if last.answer is None:
            yield from self._begun(at)

    def _begun(self, at: Standing) -> Iterator[Standing]:
        upto = at.upto
        for later in range(at.place + 1, len(self.turns)):
            yield from (Standing(place=later, upto=(*upto, each)) for each in self.turns[later].choices)
            if self.turns[later].turn["state"] not in ("failed", "cancelled"):
                return
            upto = (*upto, self.turns[later].choices[0])

    def _may_retry(self, at: Standing) -> bool:
        retries: int = (self.turns[at.place].agent.validation or {}).get("retries", 3)
        return len(at.rejected) < retries

    def verdict(self, at: Standing) -> tuple[str, Any]:
        """Return the verdict on the last answer, which was complete, and the calls that run, or the words."""
        assert at.said is not None
        assert at.said.answer is not None
        calls, text = calls_in(self.agent, at.said.answer)
        exits = {tool["function"]["name"] for tool in self.agent.exit_tools}
        running = [(name, arguments) for name, arguments in calls if name not in exits]
        if running:
            if self.iterations_left(at) <= 0:
                return "fails", "tool_budget"
            known = {tool["function"]["name"] for tool in self.agent.tools}
            return ("calls", running) if all(name in known for name, _ in running) else ("fails", "tool_unknown")
        agent = self.turns[at.place].agent
        is_held = Prompts(self.talk, agent, self.model).is_held
        if is_held and not self._is_last(at) and not is_valid(agent.validation, text):
            return "again", text
        words = text or at.words
        return ("valid" if is_valid(agent.validation, words) else "invalid"), words

    def _words(self, at: Standing) -> str:
        """Return the words of the newest answer of an attempt that has any, whose words the attempt's are."""
        assert at.said is not None
        assert at.said.answer is not None
        return calls_in(self.agent, at.said.answer)[1] or at.words

    def iterations_left(self, at: Standing) -> int:
        tail = [(calls_in(self.agent, answer)[0], results) for answer, results in at.exchanges[-STUCK:]]
        is_stuck = len(tail) == STUCK and all(each == tail[0] for each in tail)
        return 0 if is_stuck else max(0, self.model.iterations - len(at.exchanges))

    def _is_last(self, at: Standing) -> bool:
        """Return whether only an answer is expected."""
        has_tools = bool(self.agent.tools or self.agent.exit_tools)
        return not has_tools or bool(at.rejected) or at.is_forced or self.iterations_left(at) <= 0

    # Expected requests

    def _differs(self, at: Standing, asked: Asked) -> str | None:
        faults = [self._differs_from(at, opening, asked) for opening in reversed(self.turns[at.place].openings)]
        return None if None in faults else faults[0]

    def _differs_from(self, at: Standing, opening: Opening, asked: Asked) -> str | None:
        if asked.half_tokens and self.talk.continuation == "off":
            return "it goes on with half an answer"
        turn = self.turns[at.place]
        prompts = Prompts(self.talk, turn.agent, self.model)
        is_again = turn.turn["round"], len(at.rejected)
        rejected = at.rejected[-1] if at.rejected else None
        heard = [each for each in turn.heard(at.upto) if each.round >= opening.first or each.text is None]
        messages = prompts.messages(is_again[0], heard, opening, rejected, is_told=prompts.is_told)
        seen = [self._without_clock(each) for each in asked.body["messages"]]
        grown: list[Message] = []
        for number, (answer, results) in enumerate(at.exchanges):
            left = self.iterations_left(replace(at, exchanges=at.exchanges[: number + 1]))
            grown += prompts.exchange(answer, results, left)
        seen = self._without_journal(seen, len(messages) - 1)
        fault = difference([*messages, *grown], seen)
        if fault is not None:
            return f"round {is_again[0]}, after {is_again[1]} rejections: {fault}"
        wanted = prompts.params(len(at.rejected), is_constrained=self._is_last(at))
        given = {name: value for name, value in asked.body.items() if name not in OURS}
        if wanted.get("grammar") and asked.half_tokens:  # it begins with the rest of a thought
            rule = wanted["grammar"].removeprefix("root ::= ").strip()
            wanted["grammar"] = "..." if rule == "..." else f"root ::= thought answer\nanswer ::= {rule}\n{THOUGHT}\n"
        if wanted.get("grammar") == "..." and given.get("grammar"):
            wanted["grammar"] = given["grammar"]
        if given != wanted:
            return f"round {is_again[0]}: its parameters are {given}, and not {wanted}"
        if asked.body.get("tools", []) != prompts.tools():
            return f"round {is_again[0]}: its tools are {asked.body.get('tools')}"
        return None if asked.body["model"] == self.agent.model else f"it is asked of {asked.body['model']}"

    def _without_clock(self, message: Message) -> Message:
        if message["role"] != "system":
            return message
        self.clocks |= set(NOW.findall(message["content"]))
        return {**message, "content": NOW.sub(SOME_TIME, message["content"])}

    def _without_journal(self, seen: list[Message], last: int) -> list[Message]:
        """Remove the text about calls that the turn has made before."""
        if not self.agent.tools or last >= len(seen) or JOURNAL not in seen[last]["content"]:
            return seen
        text, _, told = seen[last]["content"].partition(JOURNAL)
        lines = [re.fullmatch(r"- (\w+)\((\{.*?\})\): (.+)", line) for line in told.strip().splitlines()]
        for line in lines:
            if line is None or (line[1], json.loads(line[2])) not in self._known:
                self.faults.append(f"{self.agent.id} in {self.talk.id} is told of a call that it never made: {told}")
        return [*seen[:last], {**seen[last], "content": text.removesuffix("\n\n")}, *seen[last + 1 :]]


def calls_in(agent: Agent, answer: Document) -> tuple[list[tuple[str, Document]], str]:
    """Return the calls of an answer, signals among them, and its text without them."""
    text = answer["content"]
    if answer.get("tool_calls"):
        return [(each["name"], json.loads(each["arguments"])) for each in answer["tool_calls"]], text
    if not (agent.tools or agent.exit_tools):
        return [], text
    if agent.markup:
        found = _REQUEST.findall(text)
        return [(name, json.loads(arguments)) for name, arguments in found], _REQUEST.sub("", text) if found else text
    try:
        told = json.loads(text)
    except ValueError:
        return [], text
    if not isinstance(told, dict) or "tool_calls" not in told:
        return [], text
    return [(each["name"], each["arguments"]) for each in told["tool_calls"]], ""


def difference(wanted: Sequence[Message], seen: Sequence[Message]) -> str | None:
    """Return where two lists of messages differ, None where they do not."""
    for number, (one, other) in enumerate(zip(wanted, seen, strict=False)):
        if not _alike(one, other):
            return f"message {number} is {other!r}, and not {one!r}"
    return None if len(wanted) == len(seen) else f"it has {len(seen)} messages, and not {len(wanted)}"


def _alike(wanted: Message, seen: Message) -> bool:
    if wanted.keys() != seen.keys() or any(wanted[k] != seen[k] for k in wanted if k != "content"):
        return False
    before, mark, behind = wanted["content"].partition(ANY_REASON)
    text = seen["content"]
    if not mark:
        return bool(before == text)
    return text.startswith(before) and text.endswith(behind) and len(text) > len(before) + len(behind)

"""What a conversation inherits from a record. Source: specification, "Begun from a record"."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.reference.hearing import Place
from tests.reference.job import Document, Talk


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation as it is recorded: ``joined`` is in which round each of its agents began."""

    job: str
    talk: Talk  # with the agents of its inherited words
    transcript: Document
    joined: Mapping[str, int] = field(default_factory=dict)
    hearing: dict[Place, frozenset[Place]] = field(default_factory=dict)  # in free mode: what each turn had heard of

    @property
    def turns(self) -> list[Document]:
        return [turn for turn in self.transcript["turns"] if turn["kind"] == "turn"]


Sources = Mapping[tuple[str, str], Known]  # by job and conversation


@dataclass(frozen=True, slots=True)
class Inherited:
    """The turns that an heir begins with, and the round in which each of its own agents begins."""

    turns: Sequence[Document] = ()
    joined: Mapping[str, int] = field(default_factory=dict)
    former_tokens: int = 0


def inherit(talk: Talk, source: Known) -> tuple[Talk, Inherited]:
    """Return an heir with the agents whose words it has, and what it inherits."""
    assert talk.source is not None
    heard = _heard(source)
    ends = {name: source.joined.get(name, 0) for name in source.talk.agents}
    for turn in heard:
        ends[turn["agent"]] = max(ends[turn["agent"]], turn["round"] + 1)
    before, rounds = talk.source.get("before"), talk.source.get("rounds")
    if before is not None:
        behind = _behind(source.talk, before["agent"])
        ends = {name: min(end, before["round"] + (name not in behind)) for name, end in ends.items()}
    most = talk.rounds if rounds is None else min(rounds, talk.rounds)
    ends = {name: min(end, most) for name, end in ends.items()}
    taken = [turn for turn in heard if turn["round"] < ends[turn["agent"]]]
    left = {turn["agent"] for turn in taken if _leaves(source.talk, turn)}
    own = [name for name, each in source.talk.agents.items() if not each.is_former and name not in left]
    whole = min([*(ends[name] for name in own), *([before["round"]] if before else [])], default=0)
    joined = {} if talk.mode == "led" else {name: ends.get(name, whole) for name in talk.agents}
    spoke = {turn["agent"] for turn in taken}
    formers = [replace(each, is_former=True) for name, each in source.talk.agents.items() if name in spoke]
    formers = [each for each in formers if each.id not in talk.agents]
    agents = dict(talk.agents)
    for name, each in talk.agents.items():
        waited = source.talk.agents[name].after if name in source.talk.agents else ()
        agents[name] = replace(each, after=(*each.after, *(f.id for f in formers if f.id in waited)))
    agents |= {each.id: replace(each, after=()) for each in formers}
    lost = [turn for turn in taken if turn["agent"] not in talk.agents and turn["state"] == "completed"]
    tokens = sum(turn["usage"]["completion_tokens"] or 0 for turn in lost)
    return replace(talk, agents=agents), Inherited(taken, joined, tokens)


def origin_of(source: Known, turn: Document) -> Document:
    """Return where a source's turn was spoken."""
    return turn["inherited"] or {"job": source.job, "conversation": source.talk.id}


def _heard(source: Known) -> list[Document]:
    """Return the turns after which a conversation went on: the turn that ended it is asked again."""
    talk, state = source.talk, source.transcript["state"]
    leaving = [turn for turn in source.turns if _leaves(talk, turn)]
    everybody = {each.id for each in talk.agents.values() if not each.is_former}
    is_deserted = state == "failed" and everybody <= {turn["agent"] for turn in leaving}
    named: set[int] = {turn["round"] for turn in source.turns if turn["agent"] != talk.leader}
    found = []
    for turn in source.turns:
        is_end = talk.mode == "led" and turn["agent"] == talk.leader and turn["round"] not in named
        if (is_deserted and turn is leaving[-1]) or (is_end and state == "completed"):
            continue
        if turn["state"] == "completed" or _is_silent(talk, turn):
            found.append(turn)
    return found


def _is_silent(talk: Talk, turn: Document) -> bool:
    is_meant = talk.agents[turn["agent"]].on_failure != "end" and turn["reason"] not in ("cancelled", "internal")
    return turn["state"] == "failed" and (turn["inherited"] is not None or is_meant)


def _leaves(talk: Talk, turn: Document) -> bool:
    return talk.agents[turn["agent"]].on_failure == "leave" and _is_silent(talk, turn)


def _behind(talk: Talk, agent: str) -> set[str]:
    """Return an agent, and all that wait for its turn in a round."""
    if talk.mode == "led":
        return set(talk.agents) if agent == talk.leader else {agent}
    behind = {agent}
    while talk.mode == "rounds":
        more = behind | {each.id for each in talk.agents.values() if behind & set(each.after)}
        if more == behind:
            break
        behind = more
    return behind


def places(turns: Sequence[Document]) -> list[Place]:
    return [(turn["agent"], turn["round"]) for turn in turns]

"""A job as its document describes it: agents of each conversation, their texts filled in, and the defaults.

Source: specification, "Job documents", "Variables", "Casts".
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Document = Mapping[str, Any]
PLAIN_ROLE = "participant"
END = "end"
_NAME = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\})")


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent as it is in one conversation."""

    id: str
    role: str = PLAIN_ROLE
    by: str = "model"
    model: str = ""
    system: str = ""
    params: Document = field(default_factory=dict)
    visible_to: tuple[str, ...] | None = None
    after: tuple[str, ...] = ()
    validation: Document | None = None
    markup: bool = False
    tools: tuple[Document, ...] = ()
    exit_tools: tuple[Document, ...] = ()
    on_failure: str = "end"
    memory: Document | None = None
    otherwise: str | None = None
    is_recorded: bool = False
    is_former: bool = False  # an agent of an heir's source alone

    @property
    def who(self) -> str:
        return self.id if self.role == PLAIN_ROLE else f"{self.id} ({self.role})"

    def shows(self, reader: str) -> bool:
        """Return whether ``reader`` may read its words in later rounds."""
        return reader == self.id or self.visible_to is None or reader in self.visible_to


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation of a job."""

    id: str
    mode: str
    view: str
    leader: str | None
    prompt_at: str
    agents: Mapping[str, Agent]
    everybody: tuple[str, ...]  # the ids of the job's agents
    prompt: str
    system: str
    rounds: int
    until: tuple[Document, ...]
    prompts: Document
    source: Document | None
    variables: Document | None
    asked_prompt: str | None  # before anything is filled in
    continuation: Any  # None: the model decides

    def model_agents(self) -> list[Agent]:
        return [each for each in self.agents.values() if each.by == "model" and not each.is_former]


def fill(text: str, variables: Document | None) -> str:
    """Put values in place of names; without ``variables`` every dollar stays as it is."""
    if variables is None:
        return text

    def value(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        name = found["bare"] or found["braced"]
        if name not in variables:
            return found[0]
        given = variables[name]
        return given if isinstance(given, str) else json.dumps(given)

    return _NAME.sub(value, text)


def talks_of(document: Document, sources: Mapping[tuple[str, str], Talk]) -> dict[str, Talk]:
    """Return the conversations of a job by their ids; some of them begin from one of ``sources``."""
    talks = (_talk(document, place, sources) for place in range(len(document["conversations"])))
    return {talk.id: talk for talk in talks}


def _talk(document: Document, place: int, sources: Mapping[tuple[str, str], Talk]) -> Talk:
    given = document["conversations"][place]
    name = given.get("id") or f"c{place}"
    begun = given.get("from")
    source = None if begun is None else sources[begun["job"], begun["conversation"]]
    variables, prompt = given.get("variables"), given.get("prompt")
    if source is not None and prompt is None:
        prompt = source.asked_prompt
        if source.variables is not None or variables is not None:
            variables = {**(source.variables or {}), **(variables or {})}
    until = given["until"] if given.get("until") is not None else document.get("until") or ()
    casts = given.get("agents") or {}
    agents = (_agent(each, casts.get(each["id"]) or {}, document, variables) for each in document["agents"])
    return Talk(
        id=name,
        mode=document.get("mode", "rounds"),
        view=document.get("view", "own"),
        leader=document.get("leader"),
        prompt_at=document.get("prompt_at", "start"),
        agents={agent.id: agent for agent in agents},
        everybody=tuple(each["id"] for each in document["agents"]),
        prompt=fill(prompt or "", variables),
        system=fill(document.get("system", ""), variables),
        rounds=given.get("rounds") or document.get("rounds", 1),
        until=tuple(_filled(each, "says", variables) for each in until),
        prompts=document.get("prompts") or {},
        source=begun,
        variables=variables,
        asked_prompt=prompt,
        continuation=document.get("continuation"),
    )


def _agent(given: Document, cast: Document, document: Document, variables: Document | None) -> Agent:
    seen = given.get("visible_to")
    as_cast = {**given, **{name: cast[name] for name in ("system", "model", "tools", "validation") if name in cast}}
    return Agent(
        id=given["id"],
        role=fill(given.get("role", PLAIN_ROLE), variables),
        by=given.get("by", "model"),
        model=as_cast.get("model", ""),
        system=fill(as_cast.get("system", ""), variables),
        params={**given.get("params", {}), **cast.get("params", {})},
        visible_to=None if seen is None else tuple(seen),
        after=tuple(given.get("speak_after_within_round") or ()),
        validation=_filled(as_cast.get("validation"), "choices", variables),
        markup=given.get("markup", False),
        tools=tuple(as_cast.get("tools") or ()),
        exit_tools=tuple(given.get("exit_tools") or ()),
        on_failure=given.get("on_failure", "end"),
        memory=given.get("memory") or document.get("memory"),
        is_recorded=bool((given.get("record") or document.get("record") or {}).get("tokens")),
        otherwise=None if given.get("otherwise") is None else fill(given["otherwise"], variables),
    )


def _filled(given: Document | None, name: str, variables: Document | None) -> Any:  # noqa: ANN401 - None too
    """Return a part of a document, in which the texts of a list are filled in."""
    if given is None or given.get(name) is None:
        return given
    return {**given, name: [fill(text, variables) for text in given[name]]}

"""The faults of conditions that end a conversation: unknown names, and conditions that can never hold."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from service.conversations.document.spec import AgentSpec, ConditionSpec, JobSpec, cast_specs
from service.conversations.job.job import END, Conversation
from service.conversations.job.until import scalar_key
from service.conversations.job.validation import Validation
from service.errors import Fault
from service.formats.faults import Checks, broken, unknown
from workers.errors import InvalidTool
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import cut

# A schema with one of these keywords may allow more than its properties say.
OPEN_SCHEMAS: Final = frozenset(
    {"$dynamicRef", "$ref", "$schema", "allOf", "anyOf", "dependentSchemas", "if", "oneOf", "patternProperties"}
)
DIALECTS: Final = ("draft-06", "draft-07", "2019-09", "2020-12")  # those that are read here; a schema may name another
# Most comparisons for one job, in characters of choices times characters of words; they take some milliseconds.
MOST_COMPARED: Final = 1_000_000
LEADS: Final = "it: a leader's answer is the name of an agent, or end"


def condition_faults(spec: JobSpec, conversations: tuple[Conversation, ...]) -> Iterator[Fault]:
    """Yield the conditions that can never hold."""
    agents = {agent.id: agent for agent in spec.agents}
    for place, condition in enumerate(spec.until):
        yield from _name_faults(f"until[{place}]", condition, agents, spec.leader)
    said = _Said(agents, spec.leader)
    for index, given in enumerate(spec.conversations):
        for place, condition in enumerate(given.until or ()):
            yield from _name_faults(f"conversations[{index}].until[{place}]", condition, agents, spec.leader)
        rounds, until = conversations[index].rounds, spec.until if given.until is None else given.until
        cast = {agent.id: agent for agent in cast_specs(spec, given)} if given.agents and until else {}
        for place, condition in enumerate(until):
            path = f"until[{place}]" if given.until is None else f"conversations[{index}].until[{place}]"
            yield from said.faults(path, condition, cast)
            if condition.unchanged is not None and condition.unchanged >= rounds:
                message = f"{rounds} rounds of {conversations[index].id!r} are too few to compare so many with"
                yield Fault(path=f"{path}.unchanged", message=message)


@broken
def _name_faults(path: str, condition: ConditionSpec, agents: Mapping[str, AgentSpec], leader: str | None) -> Checks:
    named = agents if condition.agent is None else (condition.agent,)
    speakers = [agents[name] for name in named if name in agents]
    yield not speakers, f"{path}.agent", partial(unknown, "agent", str(condition.agent), agents)
    for position, other in enumerate(condition.agree or ()):
        place = f"{path}.agree[{position}]"
        yield other not in agents, place, partial(unknown, "agent", other, agents)
        yield other == leader and other in agents, place, "the leader names agents, and agrees with nobody"
    signals = {name for speaker in speakers for name in _names_of(speaker.exit_tools)}
    is_unknown = speakers and condition.signal is not None and condition.signal not in signals
    yield is_unknown, f"{path}.signal", partial(unknown, "exit tool", str(condition.signal), sorted(signals))


class _Said:
    """Finds conditions on words that no valid answer has, once for each validation of an agent."""

    def __init__(self, agents: Mapping[str, AgentSpec], leader: str | None) -> None:
        self._agents = agents
        self._leader = leader
        self._chosen = [*(name for name in agents if name != leader), END]  # the words of a leader
        self._checked: set[tuple[int, int]] = set()
        self._known: dict[int, frozenset[object]] = {}  # values of enumerations
        self._left = MOST_COMPARED

    def faults(self, path: str, condition: ConditionSpec, cast: Mapping[str, AgentSpec]) -> Iterator[Fault]:
        """Yield the faults of a condition in a conversation whose own agents are ``cast``."""
        agent = cast.get(condition.agent or "") or self._agents.get(condition.agent or "")
        if agent is None or not (condition.says or condition.field):
            return
        checked = id(condition), id(agent.validation)
        if checked in self._checked:
            return
        self._checked.add(checked)
        found = self._of_words(condition, agent) if condition.says else self._of_field(condition, agent)
        for place, fault in found:
            yield Fault(path=f"{path}.{place}", message=f"{condition.agent!r} can never say {fault}")

    def _of_words(self, condition: ConditionSpec, agent: AgentSpec) -> Iterator[tuple[str, str]]:
        choices = agent.validation.choices if agent.validation is not None else None
        if agent.id == self._leader:
            choices = self._chosen
        if choices is None or any("$" in choice for choice in choices):
            return  # judged at each answer, once filled in
        validation = Validation(retries=0, choices=tuple(choices))
        chars = sum(map(len, choices))
        for position, words in enumerate(condition.says or ()):
            if scalar_key(words) in self._keys_of(choices) or "$" in words or chars * len(words) > self._left:
                continue  # judged at each answer instead
            self._left -= chars * len(words)
            fault = validation.fault_of(words)
            if fault is not None:
                yield f"says[{position}]", f"{words!r}: {fault}"

    def _of_field(self, condition: ConditionSpec, agent: AgentSpec) -> Iterator[tuple[str, str]]:
        if agent.id == self._leader:
            yield "field", LEADS
        schema = agent.validation.json_schema if agent.validation is not None else None
        if schema is None or condition.field is None or not _is_read(schema):
            return
        at, fault = _schema_at(schema, condition.field.split("."))
        if fault is not None:
            yield "field", fault
        if at is None:
            return
        wanted = cut(json.dumps(condition.equals))
        values = at.get("enum", [at["const"]] if "const" in at else None)
        if isinstance(values, list) and scalar_key(condition.equals) not in self._keys_of(values):
            yield "equals", cut(f"{wanted}: it must be one of {cut(json.dumps(values))}")
        elif not _may_be(at, _types_of(condition.equals)):
            yield "equals", cut(f"{wanted}: its type is {json.dumps(at['type'])}")

    def _keys_of(self, values: Sequence[object]) -> frozenset[object]:
        """Return the values of an enumeration or the choices in their compared form; each is read once."""
        if id(values) not in self._known:
            self._known[id(values)] = frozenset(map(scalar_key, values))
        return self._known[id(values)]


def _is_read(schema: dict[str, object]) -> bool:
    dialect = schema.get("$schema")
    return dialect is None or (isinstance(dialect, str) and any(each in dialect for each in DIALECTS))


def _schema_at(schema: dict[str, object], names: Sequence[str]) -> tuple[dict[str, object] | None, str | None]:
    """Return the schema of a property, or the fault of its name; neither if the schema may allow more than it says."""
    at = {key: value for key, value in schema.items() if key != "$schema"}
    for place, name in enumerate(names):
        properties = at.get("properties", {})
        if not OPEN_SCHEMAS.isdisjoint(at) or not isinstance(properties, dict):
            return None, None
        nested = properties.get(name)
        is_closed = at.get("additionalProperties") is False or not _may_be(at, frozenset({"object"}))
        if name not in properties and is_closed:
            return None, f"{'.'.join(names[: place + 1])!r}: {unknown('property', name, properties)}"
        if not isinstance(nested, dict):
            return None, None
        at = nested
    return at, None


def _types_of(value: object) -> frozenset[str]:
    """Return the JSON Schema types of a value."""
    if isinstance(value, str | bool):
        return frozenset({"string" if isinstance(value, str) else "boolean"})
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return frozenset({"integer", "number"} if is_whole else {"number"})


def _may_be(schema: dict[str, object], types: frozenset[str]) -> bool:
    """Whether a schema allows one of these types."""
    named = schema.get("type", [])
    allowed = named if isinstance(named, list) else [named]
    return not allowed or any(not isinstance(each, str) or each in types for each in allowed)


def _names_of(tools: Sequence[object]) -> Iterator[str]:
    """Yield the names of well-formed tools; the faults of others are reported elsewhere."""
    for document in tools:
        with suppress(InvalidTool):
            yield ToolDefinition.parse(document).name

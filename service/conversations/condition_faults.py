"""The faults of what ends a conversation: conditions of names that there are not, and those that can never hold."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

from service.conversations.job import END, Conversation
from service.conversations.spec import AgentSpec, ConditionSpec, ConversationSpec, JobSpec, cast_specs
from service.conversations.until import is_alike
from service.conversations.validation import Validation
from service.errors import Fault
from service.formats.faults import unknown
from workers.errors import InvalidTool
from workers.tools.definition import ToolDefinition
from workers.tools.schemas import cut

# With these beside it, a schema may allow more than its properties tell.
OPEN_SCHEMAS: Final = frozenset({"$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf", "patternProperties"})
TYPES: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset({"string"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"integer", "number"}),
}


def condition_faults(spec: JobSpec, conversations: tuple[Conversation, ...]) -> Iterator[Fault]:
    """Yield which conditions can never hold."""
    agents = {agent.id: agent for agent in spec.agents}
    for place, condition in enumerate(spec.until):
        yield from _condition_faults(f"until[{place}]", condition, agents, spec.leader)
    for index, given in enumerate(spec.conversations):
        own = given.until
        cast = {**agents, **{agent.id: agent for agent in cast_specs(spec, given)}} if given.agents else agents
        for place, condition in enumerate(
            spec.until if own is None and given.agents and _validates_otherwise(given) else ()
        ):
            yield from _condition_faults(f"until[{place}]", condition, cast, spec.leader)
        for place, condition in enumerate(own or ()):
            yield from _condition_faults(f"conversations[{index}].until[{place}]", condition, cast, spec.leader)
        for place, condition in enumerate(spec.until if own is None else own):
            rounds = conversations[index].rounds
            if condition.unchanged is not None and condition.unchanged >= rounds:
                path = f"until[{place}]" if own is None else f"conversations[{index}].until[{place}]"
                message = f"{rounds} rounds of {conversations[index].id!r} are too few to compare so many with"
                yield Fault(path=f"{path}.unchanged", message=message)


def _validates_otherwise(conversation: ConversationSpec) -> bool:
    return any("validation" in each.model_fields_set for each in conversation.agents.values())


def _condition_faults(
    path: str, condition: ConditionSpec, agents: Mapping[str, AgentSpec], leader: str | None
) -> Iterator[Fault]:
    if condition.agent is not None and condition.agent not in agents:
        yield Fault(path=f"{path}.agent", message=unknown("agent", condition.agent, agents))
        return
    for position, other in enumerate(condition.agree or ()):
        if other not in agents:
            yield Fault(path=f"{path}.agree[{position}]", message=unknown("agent", other, agents))
        elif other == leader:
            yield Fault(path=f"{path}.agree[{position}]", message="the leader names agents, and agrees with nobody")
    speakers = list(agents.values()) if condition.agent is None else [agents[condition.agent]]
    signals = {name for speaker in speakers for name in _names_of(speaker.exit_tools)}
    if condition.signal is not None and condition.signal not in signals:
        yield Fault(path=f"{path}.signal", message=unknown("exit tool", condition.signal, sorted(signals)))
    validation = speakers[0].validation
    choices = validation.choices if validation is not None else None
    if condition.agent == leader:
        choices = [*(name for name in agents if name != leader), END]
    for place, fault in _never_said(condition, choices, validation.json_schema if validation is not None else None):
        message = f"{condition.agent!r} can never say {fault}"
        yield Fault(path=f"{path}.{place}", message=message)


def _never_said(
    condition: ConditionSpec, choices: Sequence[str] | None, schema: dict[str, object] | None
) -> Iterator[tuple[str, str]]:
    """Yield where a condition names what no valid answer says, and why."""
    for position, words in enumerate(condition.says or () if choices is not None else ()):
        fault = Validation(retries=0, choices=tuple(choices or ())).fault_of(words)
        if fault is not None:
            yield f"says[{position}]", f"{words!r}: {fault}"
    if condition.field is None or schema is None:
        return
    names, at = condition.field.split("."), schema
    for place, name in enumerate(names):
        if not OPEN_SCHEMAS.isdisjoint(at):
            return
        properties = at.get("properties", {})
        is_closed = at.get("additionalProperties") is False or not _may_be(at, frozenset({"object"}))
        if isinstance(properties, dict) and name not in properties and is_closed:
            yield "field", f"{'.'.join(names[: place + 1])!r}: {unknown('property', name, properties)}"
        nested = properties.get(name) if isinstance(properties, dict) else None
        if not isinstance(nested, dict):
            return
        at = nested
    enum = at.get("enum", [at["const"]] if "const" in at else None)
    values = enum if isinstance(enum, list) else None
    if values is not None and not any(is_alike(value, condition.equals) for value in values):
        yield "equals", cut(f"{json.dumps(condition.equals)}: it must be one of {json.dumps(values)}")
    elif not _may_be(at, TYPES[type(condition.equals)]):
        yield "equals", cut(f"{json.dumps(condition.equals)}: its type is {json.dumps(at['type'])}")


def _may_be(schema: dict[str, object], types: frozenset[str]) -> bool:
    """Whether a schema allows one of these types."""
    named = schema.get("type", [])
    return not named or not types.isdisjoint(named if isinstance(named, list) else [named])


def _names_of(tools: Sequence[object]) -> Iterator[str]:
    """Yield the names of tools that are spelt out well; what is wrong with others is told elsewhere."""
    for document in tools:
        with suppress(InvalidTool):
            yield ToolDefinition.parse(document).name

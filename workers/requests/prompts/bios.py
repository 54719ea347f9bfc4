"""The BIOS prompt: what every agent is told before anything else (specification, "BIOS prompt"). Pure."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from string import Template
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.tools.call_parser import Fallback
from workers.tools.definition import ToolDefinition

MAX_DEPTH: Final = 3  # of objects within objects; what lies deeper is an object
UNIONS: Final = ("anyOf", "oneOf")
CONTEXT: Final = "Several agents take part; others' words carry their names. Answer only as yourself."


def signature_of(tool: ToolDefinition) -> str:
    """Return a tool's name with its parameters; one that need not be given has a question mark."""
    return signature_text(tool.name, tool.parameters)


def signature_text(name: str, parameters: dict[str, object]) -> str:
    """Return the same of a name and a JSON schema."""
    return f"{name}({_fields(parameters, parameters, 0)})"


def _fields(schema: dict[str, object], root: dict[str, object], depth: int) -> str:
    properties = schema.get("properties")
    required = schema.get("required")
    wanted = required if isinstance(required, list) else []
    fields = properties.items() if isinstance(properties, dict) else ()
    return ", ".join(f"{name}{'' if name in wanted else '?'}: {_type(each, root, depth)}" for name, each in fields)


def _type(schema: object, root: dict[str, object], depth: int) -> str:
    if not isinstance(schema, dict):
        return "any"
    target = schema.get("$ref")
    if isinstance(target, str):
        return _type(_referred(target, root), root, depth + 1) if depth < MAX_DEPTH else "object"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    ways = next((schema[union] for union in UNIONS if isinstance(schema.get(union), list)), None)
    if isinstance(values, list):
        text = " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    elif ways is not None:
        text = " | ".join(dict.fromkeys(_type(way, root, depth) for way in ways))
    else:
        text = _plain_type(schema, root, depth)
    return text


def _plain_type(schema: dict[str, object], root: dict[str, object], depth: int) -> str:
    kind = schema.get("type")
    if kind == "array":
        inner = _type(schema.get("items"), root, depth)
        return f"({inner})[]" if " | " in inner else f"{inner}[]"
    if kind == "object" or "properties" in schema:
        fields = _fields(schema, root, depth + 1) if depth < MAX_DEPTH else ""
        return f"{{{fields}}}" if fields else "object"
    return " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")


def _referred(target: str, root: dict[str, object]) -> object:
    place: object = root
    for step in target.removeprefix("#").split("/")[1:]:
        place = place.get(step) if isinstance(place, dict) else None
    return place


class Clock(StrEnum):
    """Which time the BIOS tells."""

    START = "start"  # when the conversation began: it moves no prefix
    NOW = "now"  # when the request is made


class BiosPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's choice of the words around a job, for one model; None is Roundhouse's own.

    ``template`` stands in place of the whole BIOS: ``$context``, ``$tools``, ``$budget``, ``$now`` in it are filled in,
    ``$$`` is a dollar. ``clock_step_s`` is how far the clock is rounded down, in seconds: each new time is a new prompt
    to the engine's prefix cache, with all that follows it. The other pieces are those of a job's ``prompts``.
    """

    is_on: bool = True
    template: str | None = None
    clock: Clock = Clock.START
    clock_step_s: float = 600.0
    context: str | None = None
    cue: str | None = None
    quote: str | None = None
    invalid: str | None = None
    left: str | None = None


class BiosWords(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a BIOS; a conversation keeps those that it began with.

    ``budget`` tells the whole of tool iterations; how many are left is told by ``left`` and ``none_left`` after each
    observation. Without these the BIOS tells it, by ``bios_left`` and ``bios_none_left``, and changes with it.
    """

    is_on: bool = True
    template: str | None = None
    clock_step_s: float = 600.0
    tools: str = "You can call tools, and are given their results before you answer:"
    signals: str = "You can send signals, which are called like tools; nothing comes back. Send one near the end:"
    json_calls: str = (
        "To call one in words, let your whole answer be one JSON object:\n"
        '{"tool_calls": [{"name": "NAME", "arguments": {}}]}'
    )
    markup_calls: str = (
        "To call one, write its arguments as a JSON object:\n"
        '<tool_request name="NAME">{}</tool_request>\n'
        "Its result comes back as <observation>JSON</observation>."
    )
    markup: str = (
        "Write <think>...</think> around what others must not read, <answer>...</answer> around what you say, or "
        "<wait/> to say nothing."
    )
    tells_parameters: bool = True
    budget: str = "Tool iterations: $count"
    bios_left: str = "Tool iterations left: $count"
    bios_none_left: str = "Tool iterations left: 0. Answer now, without calling a tool."
    left: str = "($count tool iterations left)"
    none_left: str = "(no tool iterations left)"

    @property
    def tells_what_is_left(self) -> bool:
        """Whether the BIOS itself tells how many iterations are left, so that nothing else needs to."""
        is_asked = self.template is not None and "budget" in Template(self.template).get_identifiers()
        return is_asked or not self.left


SEED_WORDS: Final = BiosWords(left="", none_left="")  # of Worker.submit: what is left stands in the BIOS


class BiosFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The material of a conversation's BIOS: its words, its sentence on the agents, and the time of its clock."""

    words: BiosWords
    context: str
    now: datetime


class BiosFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one request for the BIOS; ``now`` carries its zone.

    ``iterations`` is the whole budget for tools that run, ``iterations_left`` what is left of it.
    """

    now: datetime
    context: str = CONTEXT
    tools: Sequence[ToolDefinition] = ()
    exit_tools: Sequence[ToolDefinition] = ()
    iterations: int = 0
    iterations_left: int = 0
    fallback: Fallback | None = None
    has_markup: bool = False


def seed_words(policy: BiosPolicy) -> BiosWords:
    """Return the words of ``Worker.submit``: what is left of the tool budget stands in the BIOS."""
    return replace(SEED_WORDS, is_on=policy.is_on, template=policy.template, clock_step_s=policy.clock_step_s)


def bios_prompt(facts: BiosFacts, words: BiosWords | None = None) -> str:
    """Return the BIOS; '' where it is off. What changes from request to request stands last."""
    words = words or SEED_WORDS
    if not words.is_on:
        return ""
    parts = {
        "context": facts.context,
        "tools": _tools(facts, words),
        "budget": _budget(facts, words),
        "now": _told(_rounded(facts.now, words.clock_step_s)),
    }
    if words.template is not None:
        return Template(words.template).safe_substitute(parts)
    last = "\n".join(line for line in (parts["budget"], f"Now: {parts['now']}") if line)
    return "\n\n".join(part for part in (parts["context"], parts["tools"], last) if part)


def tell_left(iterations_left: int, words: BiosWords) -> str:
    """Return the words after an observation on the iterations left; '' if the BIOS tells them."""
    if words.tells_what_is_left or not words.is_on:
        return ""
    return Template(words.left if iterations_left > 0 else words.none_left).safe_substitute(count=iterations_left)


def _tools(facts: BiosFacts, words: BiosWords) -> str:
    instructions: list[str] = []
    if facts.has_markup and words.markup:
        instructions.append(words.markup)
    for intro, tools in ((words.tools, facts.tools), (words.signals, facts.exit_tools)):
        if tools:
            instructions.append("\n".join((intro, *(_line(tool, words) for tool in tools))))
    if (facts.tools or facts.exit_tools) and facts.fallback is not None:
        instructions.append(words.markup_calls if facts.fallback is Fallback.MARKUP else words.json_calls)
    return "\n\n".join(instructions)


def _line(tool: ToolDefinition, words: BiosWords) -> str:
    name = signature_of(tool) if words.tells_parameters else tool.name
    return f"- {name}: {tool.description}" if tool.description else f"- {name}"


def _budget(facts: BiosFacts, words: BiosWords) -> str:
    if not facts.tools:
        return ""
    if not words.tells_what_is_left:
        return Template(words.budget).safe_substitute(count=facts.iterations)
    left = facts.iterations_left
    return Template(words.bios_left if left > 0 else words.bios_none_left).safe_substitute(count=left)


def _told(now: datetime) -> str:
    return _told_in_zone(now.replace(tzinfo=None), now.tzname() or "")


@lru_cache(maxsize=64)  # the turns of a minute share one; times of two zones may be equal, and read otherwise
def _told_in_zone(now: datetime, zone: str) -> str:
    return f"{now:%A, %Y-%m-%d %H:%M} {zone}"


def _rounded(now: datetime, step_s: float) -> datetime:
    if step_s <= 0:
        return now
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return now - timedelta(seconds=(now - midnight).total_seconds() % step_s)

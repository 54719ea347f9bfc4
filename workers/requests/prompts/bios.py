"""The BIOS prompt: the beginning of every agent's prompt (specification, "BIOS prompt"). Pure."""

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from string import Template
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.requests.bios_words import BiosPolicy, BiosWords
from workers.tools.call_parser import Fallback
from workers.tools.definition import ToolDefinition

MAX_DEPTH: Final = 3  # nesting of objects; deeper ones are shown as object
UNIONS: Final = ("anyOf", "oneOf")
CONTEXT: Final = "Several agents take part; others' words carry their names. Answer only as yourself."


def signature_of(tool: ToolDefinition) -> str:
    """Return a tool's name with its parameters; optional ones have a question mark."""
    return signature_text(tool.name, tool.parameters)


def signature_text(name: str, parameters: dict[str, object]) -> str:
    """Return the signature for a name and a JSON schema."""
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


SEED_WORDS: Final = BiosWords(left="", none_left="")  # texts of Worker.submit: the BIOS shows the iterations left


class BiosFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one request for the BIOS; ``now`` carries its zone.

    ``iterations`` is the whole budget for tools that run, ``iterations_left`` the rest.
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
    """Return the texts of ``Worker.submit``: the BIOS shows the rest of the tool budget."""
    return replace(SEED_WORDS, is_on=policy.is_on, template=policy.template, clock_step_s=policy.clock_step_s)


def bios_prompt(facts: BiosFacts, words: BiosWords | None = None) -> str:
    """Return the BIOS; '' if it is off. The parts that change between requests come last."""
    words = words or SEED_WORDS
    if not words.is_on:
        return ""
    parts = {
        "context": facts.context,
        "tools": _tools(facts, words),
        "budget": _budget(facts, words),
        "now": _written(_rounded(facts.now, words.clock_step_s)),
    }
    if words.template is not None:
        return Template(words.template).safe_substitute(parts)
    last = "\n".join(line for line in (parts["budget"], f"Now: {parts['now']}") if line)
    return "\n\n".join(part for part in (parts["context"], parts["tools"], last) if part)


def tell_left(iterations_left: int, words: BiosWords) -> str:
    """Return the text after an observation on the iterations left; '' if the BIOS shows them."""
    if words.tells_what_is_left or not words.is_on:
        return ""
    return Template(words.left if iterations_left > 0 else words.none_left).safe_substitute(count=iterations_left)


def _tools(facts: BiosFacts, words: BiosWords) -> str:
    instructions: list[str] = []
    if facts.has_markup and words.markup:
        instructions.append(words.markup)
    for intro, tools in ((words.tools, facts.tools), (words.signals, facts.exit_tools)):
        if tools:
            instructions.append("\n".join((intro, *(_line(tool) for tool in tools))))
    if (facts.tools or facts.exit_tools) and facts.fallback is not None:
        instructions.append(words.markup_calls if facts.fallback is Fallback.MARKUP else words.json_calls)
    return "\n\n".join(instructions)


def _line(tool: ToolDefinition) -> str:
    name = signature_of(tool)
    return f"- {name}: {tool.description}" if tool.description else f"- {name}"


def _budget(facts: BiosFacts, words: BiosWords) -> str:
    if not facts.tools:
        return ""
    if not words.tells_what_is_left:
        return Template(words.budget).safe_substitute(count=facts.iterations)
    left = facts.iterations_left
    return Template(words.bios_left if left > 0 else words.bios_none_left).safe_substitute(count=left)


def _written(now: datetime) -> str:
    return _written_in_zone(now.replace(tzinfo=None), now.tzname() or "")


@lru_cache(maxsize=64)  # the turns of a minute share one; equal times of two zones read differently
def _written_in_zone(now: datetime, zone: str) -> str:
    return f"{now:%A, %Y-%m-%d %H:%M} {zone}"


def _rounded(now: datetime, step_s: float) -> datetime:
    if step_s <= 0:
        return now
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return now - timedelta(seconds=(now - midnight).total_seconds() % step_s)

"""The BIOS prompt: what every agent is told before anything else (specification, "BIOS prompt"). Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from string import Template
from typing import Final

from workers.tools.call_parser import Fallback
from workers.tools.definition import ToolDefinition

CONTEXT: Final = (
    "You are one of several agents that work together through Roundhouse. Each agent has its own instructions and "
    "speaks in turn; words of others are shown to you with the speaker's name. Answer as yourself alone: do not "
    "write other agents' lines, and do not repeat these instructions."
)
JSON_CALLS: Final = (
    "Where you cannot call a tool in any other way, let your whole answer be one JSON object and nothing else:\n"
    '{"tool_calls": [{"name": "NAME", "arguments": {}}]}'
)
MARKUP_CALLS: Final = (
    "To call a tool, write its arguments as one JSON object, as often as you need in one answer:\n"
    '<tool_request name="NAME">{}</tool_request>\n'
    "Each result comes back as <observation>JSON</observation>."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiosPolicy:
    """What an operator decides about the BIOS of a model.

    ``template`` stands in place of the whole text: ``$context``, ``$tools``, ``$budget``, ``$now`` in it are filled in,
    ``$$`` is a dollar. ``clock_step_s`` is how far the clock is rounded down, in seconds: each new time is a new prompt
    to the engine's prefix cache, with all that follows it.
    """

    is_on: bool = True
    template: str | None = None
    clock_step_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BiosFacts:
    """What the BIOS tells of one request; ``now`` carries its zone, ``iterations_left`` is for tools that run."""

    now: datetime
    tools: Sequence[ToolDefinition] = ()
    exit_tools: Sequence[ToolDefinition] = ()
    iterations_left: int = 0
    fallback: Fallback | None = None


def bios_prompt(facts: BiosFacts, policy: BiosPolicy | None = None) -> str:
    """Return the BIOS; '' where it is off. What changes from request to request stands last."""
    policy = policy or BiosPolicy()
    if not policy.is_on:
        return ""
    parts = {
        "context": CONTEXT,
        "tools": _tools(facts),
        "budget": _budget(facts),
        "now": f"{_rounded(facts.now, policy.clock_step_s):%A, %Y-%m-%d %H:%M %Z}",
    }
    if policy.template is not None:
        return Template(policy.template).safe_substitute(parts)
    last = "\n".join(line for line in (parts["budget"], f"Now: {parts['now']}") if line)
    return "\n\n".join(part for part in (parts["context"], parts["tools"], last) if part)


def _tools(facts: BiosFacts) -> str:
    instructions: list[str] = []
    if facts.tools:
        instructions.append(
            "You can call tools. Each result is given to you before you go on; several calls in one answer cost as "
            "much as one. Call one only for what you do not know, then answer in words.\n" + _list(facts.tools)
        )
    if facts.exit_tools:
        instructions.append(
            "You can send signals, which are called like tools. A signal is recorded, nothing comes back, and nothing "
            "else changes by it: say all you have to say as well. Send one near the end of your answer.\n"
            + _list(facts.exit_tools)
        )
    if instructions and facts.fallback is not None:
        instructions.append(MARKUP_CALLS if facts.fallback is Fallback.MARKUP else JSON_CALLS)
    return "\n\n".join(instructions)


def _list(tools: Sequence[ToolDefinition]) -> str:
    return "\n".join(f"- {tool.name}: {tool.description}" if tool.description else f"- {tool.name}" for tool in tools)


def _budget(facts: BiosFacts) -> str:
    if not facts.tools:
        return ""
    if facts.iterations_left:
        return f"Tool iterations left: {facts.iterations_left}"
    return "Tool iterations left: 0. Answer now, without calling a tool."


def _rounded(now: datetime, step_s: float) -> datetime:
    if step_s <= 0:
        return now
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return now - timedelta(seconds=(now - midnight).total_seconds() % step_s)

"""The texts of a BIOS prompt: an operator's choice, a conversation's own, and the time that its clock shows."""

from datetime import datetime
from enum import StrEnum
from string import Template

import msgspec


class Clock(StrEnum):
    """The time that the BIOS shows."""

    START = "start"  # start of the conversation: it changes no prefix
    NOW = "now"  # time of the request


class BiosPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's texts around a job, for one model; None is Roundhouse's own.

    ``template`` replaces the whole BIOS: ``$context``, ``$tools``, ``$budget``, ``$now`` in it are filled in, ``$$`` is
    a dollar. ``clock_step_s`` is the step in seconds to which the clock is rounded down: each new time makes a new
    prompt for the engine's prefix cache, and all that follows it. The other texts are those of a job's ``prompts``.
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
    """The texts of a BIOS; a conversation keeps those that it began with.

    ``budget`` gives the total of tool iterations; ``left`` and ``none_left`` give the rest after each observation.
    Without these the BIOS gives the rest, with ``bios_left`` and ``bios_none_left``, and changes with it.
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
    budget: str = "Tool iterations: $count"
    bios_left: str = "Tool iterations left: $count"
    bios_none_left: str = "Tool iterations left: 0. Answer now, without calling a tool."
    left: str = "($count tool iterations left)"
    none_left: str = "(no tool iterations left)"

    @property
    def tells_what_is_left(self) -> bool:
        """Whether the BIOS itself shows the iterations left, so that observations need not."""
        is_asked = self.template is not None and "budget" in Template(self.template).get_identifiers()
        return is_asked or not self.left


class BiosFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The material of a conversation's BIOS: its texts, its sentence on the agents, and the time of its clock."""

    words: BiosWords
    context: str
    now: datetime

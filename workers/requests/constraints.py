"""Whether an engine obeys constraints and tools: its refusals, and the results of a trial."""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec

from transport.dialects.dialect import Dialect
from transport.request import Constraint
from workers.requests.generation import Generation
from workers.tools.call_parser import read_json
from workers.tools.definition import ToolDefinition

KNOWN: Final = 1000  # refused constraints that are remembered
TRIAL: Final = Constraint(choices=("zq-4417", "vk-9038"))  # made up: no model answers them unprompted
TRIAL_WORDS: Final = "Say hello."
TRIAL_TOKENS: Final = 512  # includes a possible thought before the answer
TRIAL_S: Final = 10.0
AGAIN_S: Final = 60.0  # after a trial without a result
FORMAT: Final = "response_format"
TOOLS: Final = "tools"
TRIAL_TOOL: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "zq_4417",
        "description": "Return the number of a made-up thing by its name, which is none that anybody has heard of.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}
# Asks the trial's question with parameters and tools; None without a whole answer.
Ask = Callable[[Mapping[str, object], tuple[Mapping[str, Any], ...]], Awaitable[Generation | None]]
logger = logging.getLogger(__name__)


class ConstraintPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for a constraint: sent to the engine, or described to the model."""

    is_sent: bool
    is_told: bool


def call_constraint(tools: Sequence[ToolDefinition]) -> Constraint:
    """Return the constraint of one call as text, to any of ``tools``: the form that ``Fallback.JSON`` reads."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return Constraint(json_schema=calls[0] if len(calls) == 1 else {"anyOf": calls})


class EngineConstraints:
    """The constraints that one engine is known to accept; written by the runner of its requests.

    An engine of ours enforces a constraint or refuses it. An attached server may silently ignore constraints and tools.
    So each of its incarnations is tried once, when the first of its turns needs to know. The choices are made up, so
    only a constraint can bring one about; tools that add no tokens to a prompt were ignored.
    """

    def __init__(self, dialect: Dialect, ask: Ask, now: Callable[[], float]) -> None:
        self._dialect = dialect
        self._ask = ask
        self._now = now
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._is_kept: bool | None = True if dialect.always_constrains else None
        self._takes_tools: bool | None = True if dialect.always_constrains else None
        self._incarnation: int | None = None
        self._again_at: dict[str, float] = {}
        self._locks = {name: anyio.Lock() for name in (FORMAT, TOOLS)}

    def __repr__(self) -> str:
        return f"<EngineConstraints kept={self._is_kept} tools={self._takes_tools} refused={len(self._refused)}>"

    @property
    def may_be_ignored(self) -> bool:
        """Whether this server may silently ignore constraints and tools."""
        return not self._dialect.always_constrains

    @property
    def ignored(self) -> tuple[str, ...]:
        """The parameters that the server was found to ignore."""
        known = ((FORMAT, self._is_kept), (TOOLS, self._takes_tools))
        return tuple(name for name, is_heeded in known if is_heeded is False)

    async def settle(self, incarnation: int, *, has_constraint: bool, has_tools: bool) -> None:
        """Find out whether a server obeys the features that a turn needs, unless that is known of its incarnation."""
        if self._dialect.always_constrains:
            return
        if incarnation != self._incarnation:
            self._incarnation, self._is_kept, self._takes_tools = incarnation, None, None
            self._again_at.clear()
        if has_constraint and self._is_kept is None:
            await self._try_once(FORMAT)
        if has_tools and self._takes_tools is None:
            await self._try_once(TOOLS)

    async def _try_once(self, name: str) -> None:
        """Try a server, or wait for the running trial; one without a result is repeated only after ``AGAIN_S``."""
        async with self._locks[name]:
            known = self._is_kept if name == FORMAT else self._takes_tools
            if known is not None or self._now() < self._again_at.get(name, 0.0):
                return
            incarnation = self._incarnation
            try:
                found = await (self._try_format() if name == FORMAT else self._try_tools())
            finally:
                self._again_at[name] = self._now() + AGAIN_S
            if incarnation != self._incarnation:
                return  # the trial was of an earlier server
            if name == FORMAT:
                self._is_kept = found
            else:
                self._takes_tools = found
            self._log(name, is_heeded=found)

    def plan(self, constraint: Constraint) -> ConstraintPlan:
        """Plan how to apply a constraint now."""
        if not self._is_kept or self._dialect.constrain(constraint) is None or _digest(constraint) in self._refused:
            return ConstraintPlan(is_sent=False, is_told=True)
        return ConstraintPlan(is_sent=True, is_told=False)

    def note_refused(self, constraint: Constraint) -> None:
        """Record a constraint that the engine refused: it accepted the same request without it."""
        self._refused[_digest(constraint)] = None
        while len(self._refused) > KNOWN:
            self._refused.popitem(last=False)

    def note_answer(self, constraint: Constraint, text: str) -> None:
        """Check a constrained answer: one without the form shows that the server ignores constraints."""
        if not self._dialect.always_constrains and not _has_form(constraint, text):
            self._is_kept = False

    async def _try_format(self) -> bool | None:
        answer = await self._ask({**(self._dialect.constrain(TRIAL) or {}), "max_tokens": TRIAL_TOKENS}, ())
        return None if answer is None or not answer.text.strip() else _has_form(TRIAL, answer.text)

    async def _try_tools(self) -> bool | None:
        """Return whether a tool adds tokens to a prompt; None if the server reports no tokens."""
        without = await self._ask({"max_tokens": 1}, ())
        if without is None or not without.usage:
            return None
        beside = await self._ask({"max_tokens": 1}, (TRIAL_TOOL,))
        if beside is None or not beside.usage:
            return None
        if not (without.usage.prompt_tokens and beside.usage.prompt_tokens):
            return None
        return beside.usage.prompt_tokens > without.usage.prompt_tokens or bool(beside.tool_call_fragments)

    def _log(self, name: str, *, is_heeded: bool | None) -> None:
        if is_heeded is False:
            logger.warning("the server ignores %s: models are asked for it in words only", name)


def _has_form(constraint: Constraint, text: str) -> bool:
    try:
        value = read_json(text)
    except ValueError:
        return False
    return value in constraint.choices if constraint.choices else True


def _digest(constraint: Constraint) -> bytes:
    return msgspec.json.encode(constraint)

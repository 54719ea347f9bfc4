"""A request's messages for an engine: the same, whether it is asked or only shown. Pure."""

from collections.abc import Sequence

import msgspec

from transport.request import Message
from workers.requests.bios_words import BiosFrame
from workers.requests.prompts.bios import BiosFacts, bios_prompt, tell_left
from workers.requests.prompts.stack import ToolExchange, stack_messages
from workers.requests.request import Request
from workers.tools.call_parser import Fallback
from workers.tools.calls import STUCK


class ToolBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The tool iterations of a request, and whether it may write calls as text (``has_fallback``).

    None are left after the same calls brought the same results in ``stuck`` iterations in a row; None is never.
    """

    iterations: int
    has_fallback: bool
    stuck: int | None = STUCK

    def left(self, exchanges: Sequence[ToolExchange]) -> int:
        """Return the number of iterations left."""
        return 0 if self.is_stuck(exchanges) else max(0, self.iterations - len(exchanges))

    def is_stuck(self, exchanges: Sequence[ToolExchange]) -> bool:
        """Whether the model repeats the same calls and gets the same results."""
        if self.stuck is None or len(exchanges) < self.stuck:
            return False
        last = [
            ([(call.name, call.arguments) for call in each.calls], each.results) for each in exchanges[-self.stuck :]
        ]
        return all(each == last[0] for each in last)


def render_messages(
    request: Request, frame: BiosFrame, budget: ToolBudget, exchanges: Sequence[ToolExchange] = ()
) -> tuple[Message, ...]:
    """Return all messages of a request after these exchanges with its tools."""
    facts = BiosFacts(
        now=frame.now,
        context=frame.context,
        tools=request.tools,
        exit_tools=request.exit_tools,
        iterations=budget.iterations,
        iterations_left=budget.left(exchanges),
        fallback=fallback_of(request, budget),
        has_markup=request.markup,
    )
    return stack_messages(bios_prompt(facts, frame.words), request.system, request.conversation, exchanges)


def note_after(exchanges: Sequence[ToolExchange], frame: BiosFrame, budget: ToolBudget) -> str:
    """Return the note after the newest observation."""
    return tell_left(budget.left(exchanges), frame.words)


def fallback_of(request: Request, budget: ToolBudget) -> Fallback | None:
    """Return the form in which a model may write calls as text, None if it may not."""
    if request.markup:
        return Fallback.MARKUP  # the agent's own protocol, whatever the operator's setting for calls as text
    return Fallback.JSON if budget.has_fallback else None

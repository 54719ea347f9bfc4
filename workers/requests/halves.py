"""Half an answer, written before its attempt broke off: what another attempt goes on with. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from transport.answer_bound import bounds_in
from transport.events import Usage
from transport.request import BegunAnswer, ChatRequest, Constraint, Thought
from workers.policy.continuation import Continuation
from workers.requests.generation import Generation
from workers.requests.prompts.stack import ToolExchange
from workers.requests.request import CONSTRAINTS, Demand
from workers.tools.calls import Signal, ToolRecord

# They depend on the words that the engine itself has generated, or on all of an answer; 0 or none turns them off.
INEXACT: Final = frozenset(
    {
        "best_of",
        "continue_final_message",  # a client's own
        "echo",
        "frequency_penalty",
        "logprobs",
        "mirostat",
        "presence_penalty",
        "prompt_logprobs",
        "reasoning_budget",
        "thinking_budget",
        "thinking_budget_tokens",
        "thinking_token_budget",
        "top_logprobs",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
MOST_FRUITLESS: Final = 3  # attempts: engines may die of other causes while they read a prompt
SEEDS: Final = 2**31  # engines take seeds below it


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was being written: its pieces of text and of reasoning, and the number of their tokens.

    ``first_version`` is that of the weights that wrote it, ``source`` names the model.
    """

    text: tuple[str, ...] = ()
    reasoning: tuple[str, ...] = ()
    tokens: int = 0
    first_version: int | None = None
    source: str = ""


class Written(Pieces, frozen=True, kw_only=True):
    """A message that was being written, after others whose calls have been answered (``exchanges``)."""

    exchanges: tuple[ToolExchange, ...] = ()
    tool_calls: tuple[ToolRecord, ...] = ()
    signals: tuple[Signal, ...] = ()
    iterations_used: int = 0
    words: str = ""


class HalfAnswer(Written, frozen=True, kw_only=True):
    """The part of an answer that was written before its attempt broke off.

    ``ended`` are the generations of the messages before the unfinished one. A half from a store has the ``digest`` of
    the request in place of ``asked``. ``counted`` is the part of its cost that some usage has, None for all of it.
    ``fruitless`` is the number of attempts in a row that went on with it and added nothing.
    """

    ended: tuple[Generation, ...] = ()
    asked: ChatRequest | None = None
    digest: str | None = None
    counted: Usage | None = None
    fruitless: int = 0

    def may_go_on(self, continuation: Continuation, version: int | None, source: str) -> bool:
        """Whether a worker may go on with it, whose weights have this version and whose model this source."""
        is_same = continuation is Continuation.OVER_WEIGHTS or self.first_version == version
        return continuation is not Continuation.OFF and is_same and self.source == source

    def __bool__(self) -> bool:
        """Whether there is anything to go on with."""
        return bool(self.text or self.reasoning or self.exchanges)

    @property
    def whole(self) -> BegunAnswer:
        """All words of the unfinished message."""
        return BegunAnswer(text="".join(self.text), reasoning="".join(self.reasoning))

    @property
    def kept(self) -> Usage:
        """The cost of all that is kept."""
        return sum((each.usage or each.seen for each in self.ended), Usage(0, self.tokens, 0))

    def shortened(self) -> "HalfAnswer":
        """Return it without its last piece."""
        if self.text:
            return structs.replace(self, text=self.text[:-1])
        return structs.replace(self, reasoning=self.reasoning[:-1])

    def begun(self, stops: Sequence[str]) -> BegunAnswer | None:
        """Return the beginning of the unfinished message, None without one.

        It ends where a token ends. Templates cut off blanks at the end, and a stop word may have begun there: the
        engine writes both again. It writes the last word of a thought again too: if the thought was whole, its answer
        would follow at once, as from an engine that takes thoughts for answers.
        """
        text = _cut_end(self.text, stops)
        if self.text:
            return BegunAnswer(text=text, reasoning="".join(self.reasoning)) if text else None
        last = next((place for place, piece in enumerate(reversed(self.reasoning), 1) if piece.strip()), 0)
        reasoning = _cut_end(self.reasoning[:-last] or self.reasoning, stops)
        return BegunAnswer(reasoning=reasoning) if reasoning else None


def fields_of(kind: type[Pieces], half: Pieces) -> dict[str, Any]:
    """Return the fields of ``kind``, a base of ``half``'s class, by name."""
    return {name: getattr(half, name) for name in kind.__struct_fields__}


class GoingOn(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which an engine is asked to go on: the beginning, its tokens, and whether the engine repeats it.

    ``surplus`` follows the beginning in what was passed on already; the engine writes it again. With ``is_again`` it
    writes the whole answer again, unseen, and goes on if the words are the same.
    """

    begun: BegunAnswer
    tokens: int
    echoes: bool
    surplus: str = ""
    is_again: bool = False

    @property
    def unheard(self) -> tuple[str, str]:
        """The text and the reasoning that the engine sends before anything new."""
        text, reasoning = (self.begun.text, self.begun.reasoning) if self.echoes else ("", "")
        return text + self.surplus, reasoning


def _cut_end(pieces: Sequence[str], stops: Sequence[str]) -> str:
    text = "".join(pieces)
    for piece in reversed(pieces):
        is_whole = text == text.rstrip() and not any(_ends_in_beginning(text, stop) for stop in stops)
        if is_whole:
            break
        text = text[: len(text) - len(piece)]
    return text


def _ends_in_beginning(text: str, stop: str) -> bool:
    return any(text.endswith(stop[:size]) for size in range(1, len(stop) + 1))


def stops_in(params: Mapping[str, object]) -> list[str]:
    """Return the stop words among generation parameters."""
    given = params.get("stop")
    words = given if isinstance(given, list | tuple) else [given]
    return [word for word in words if isinstance(word, str) and word]


def obstacle_in(params: Mapping[str, object]) -> str | None:
    """Return a parameter with which half an answer would not go on as if it had not broken off; None without one."""
    named = (name for name in sorted(INEXACT & params.keys()) if params[name])
    several = "n" if params.get("n") not in (None, 1) else None
    return next(named, several)


def constraint_in(fields: Mapping[str, object]) -> str | None:
    """Return the field of a client's body that constrains its answer from the first token on; None without one."""
    named = (name for name in sorted(CONSTRAINTS & fields.keys()) if fields[name] not in (None, "", {"type": "text"}))
    choice = fields.get("tool_choice")
    is_forced = (choice.get("type") if isinstance(choice, dict) else choice) not in (None, "auto", "none")
    text = fields.get("text")  # as Responses writes it
    is_shaped = isinstance(text, dict) and text.get("format") not in (None, {"type": "text"})
    return next(named, "tool_choice" if is_forced else "text.format" if is_shaped else None)


def may_begin_late(demand: Demand) -> bool:
    """Whether the constraint of an answer can begin in the middle of the thought before it."""
    return not demand.at_once and demand.constraint is not None and demand.constraint.json_schema is None


def request_for_rest(
    chat: ChatRequest,
    half: HalfAnswer,
    demand: Demand | None,
    constrain: Callable[[Constraint], Mapping[str, object] | None],
) -> ChatRequest | None:
    """Return the request to which half an answer may be added; None if it cannot go on.

    A ``demand`` whose constraint may begin late is given; the constraint then begins with the rest of a thought.
    """
    if constraint_in(chat.params) is None:
        return chat
    if half.text or demand is None or demand.constraint is None:
        return None
    rest = constrain(structs.replace(demand.constraint, thought=Thought.OPEN))
    return None if rest is None else structs.replace(chat, params={**chat.params, **rest})


def rest_of(params: Mapping[str, object], tokens: int) -> dict[str, object] | None:
    """Return the parameters for the rest of an answer with ``tokens`` so far; None if it has no tokens left.

    A seed gives another one, since the engine's generator of random numbers starts at its beginning.
    """
    rest = dict(params)
    responses = {name: params[name] for name in ("max_output_tokens",) if name in params}
    for name, bound in (*bounds_in(params).items(), *responses.items()):
        if isinstance(bound, int | float) and bound >= 1:
            if bound <= tokens:
                return None
            rest[name] = int(bound) - tokens
    least = params.get("min_tokens")
    if isinstance(least, int):
        rest["min_tokens"] = max(0, least - tokens)
    seed = params.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0:
        rest["seed"] = (seed + tokens) % SEEDS
    return rest

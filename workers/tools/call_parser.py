"""The calls in a model's message, from streamed fragments or from its text. Pure.

The text is read only if the engine has given no structured call: many chat templates know no tools, and many parsers of
engines miss a call now and then.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from transport.events import ToolCallDelta
from transport.request import ToolCall
from workers.tools.text_calls import MOST_CHARS, Written, looks_like_call, marked_calls_in, requests_in, whole_calls_in
from workers.tools.thoughts import thought_spans, without_thoughts


class Fallback(StrEnum):
    """The form of a call from a model that cannot give a structured one."""

    JSON = "json"  # the whole answer is one JSON object
    MARKUP = "markup"  # <tool_request name="T">ARGS</tool_request> anywhere in it


class ParsedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A model's message: its text, and the calls in it; ``fallback`` says how they were read from the text.

    ``has_unread_call``: the text looks like a call, and none was read. ``is_open``: the last call has no end.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    fallback: Fallback | None = None
    has_unread_call: bool = False
    is_open: bool = False


def read_message(
    text: str, fragments: Sequence[ToolCallDelta], fallback: Fallback | None, names: Collection[str]
) -> ParsedMessage:
    """Parse a message into its text and calls; ``names`` are the tools that the model was shown.

    A call within a thought does not count.
    """
    calls = join_fragments(fragments)
    if calls or not names:
        return ParsedMessage(text=text, calls=calls)
    if fallback is not None and len(text) <= MOST_CHARS:
        thoughts = thought_spans(text)
        is_markup = fallback is Fallback.MARKUP
        read = requests_in(text, thoughts) if is_markup else whole_calls_in(text, thoughts, names)
        if not read.calls:
            read = marked_calls_in(text, thoughts)
        if read.calls:
            # An agent with markup keeps its thoughts in its text.
            beside = read.beside if is_markup else without_thoughts(read.beside)
            return ParsedMessage(text=beside, calls=_called(read.calls), fallback=fallback, is_open=read.is_open)
    return ParsedMessage(text=text, has_unread_call=looks_like_call(without_thoughts(text), names))


def _called(written: Sequence[Written]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=arguments)
        for number, (name, arguments) in enumerate(written)
    )


def read_json(text: str) -> Any:  # noqa: ANN401 - whatever a model wrote
    """Return a JSON value.

    Strict: values that only Python accepts (NaN, half a surrogate pair) would be refused wherever they go next.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def join_fragments(fragments: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls whose pieces were streamed, in the order in which they began.

    The index says which call a piece belongs to. Some servers send index 0 for all: there a name after complete
    arguments begins a new call, and so does a new id, but not an id that changes midway. Others send one call at
    several indexes with one id: it is one call.
    """
    calls: list[_Partial] = []
    current: dict[int, _Partial] = {}
    by_id: dict[str, _Partial] = {}
    for piece in fragments:
        partial = current.get(piece.index)
        known = by_id.get(piece.call_id or "")
        if partial is None and known is not None and known.goes_on_with(piece):
            partial = current[piece.index] = known
        elif partial is None or partial.is_followed_by(piece):
            partial = current[piece.index] = _Partial()
            calls.append(partial)
        if partial is known and partial.holds(piece):
            continue  # the same piece again, at another index
        partial.add(piece)
        if piece.call_id:
            by_id.setdefault(piece.call_id, partial)
    distinct = [partial for number, partial in enumerate(calls) if not (number and partial.repeats(calls[number - 1]))]
    return tuple(partial.call(number) for number, partial in enumerate(distinct))


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True


class _Partial:
    def __init__(self) -> None:
        self.call_id: str | None = None
        self._name: str | None = None
        self._arguments: list[str] = []
        self._chars = 0
        self._last = ""  # last letter that is no blank
        self._judged = (0, False)

    def is_followed_by(self, piece: ToolCallDelta) -> bool:
        if piece.call_id and piece.call_id == self.call_id:
            return False
        if piece.call_id and self.call_id and not self._chars:
            return bool(piece.name) and (piece.name != self._name or not piece.arguments)
        return bool(piece.name and self._name) and self._is_complete

    def goes_on_with(self, piece: ToolCallDelta) -> bool:
        """Whether a piece of another index with its id continues this call, and no other that repeats the id."""
        if piece.name and piece.name != self._name:
            return False
        return not self._is_complete or not piece.arguments or self.holds(piece)

    def holds(self, piece: ToolCallDelta) -> bool:
        """Whether a piece only repeats the arguments of a complete call."""
        return len(piece.arguments) == self._chars and self._is_complete and piece.arguments == self._text

    @property
    def _text(self) -> str:
        return "".join(self._arguments)

    @property
    def _is_complete(self) -> bool:
        if self._last != "}":  # most pieces end midway, and each check reads all of it again
            return False
        if self._judged[0] != self._chars:
            self._judged = self._chars, _is_json(self._text)
        return self._judged[1]

    def repeats(self, before: "_Partial") -> bool:
        """Whether this is only the name of the call before, sent once more."""
        is_bare = not self.call_id and not self._chars
        return is_bare and self._name == before._name and before._is_complete  # noqa: SLF001 - another of its own

    def add(self, piece: ToolCallDelta) -> None:
        self.call_id = self.call_id or piece.call_id
        if piece.name and piece.name != self._name and not self._chars:
            self._name = (self._name or "") + piece.name  # some servers cut names as well
        self._arguments.append(piece.arguments)
        self._chars += len(piece.arguments)
        self._last = piece.arguments.rstrip()[-1:] or self._last

    def call(self, number: int) -> ToolCall:
        return ToolCall(id=self.call_id or f"call_{number}", name=self._name or "", arguments=self._text)

"""The calls in a model's message, from streamed fragments or from its text. Pure.

The fallback is read only where the engine has given no structured call: many chat templates know no tools, and many
parsers of engines miss a call now and then.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from transport.events import ToolCallDelta
from transport.request import ToolCall

_FENCE: Final = re.compile(r"^```(?:json)?\s*\n(?P<body>.*)\n```$", re.DOTALL)
_THINKING: Final = re.compile(r"<(thinking|think)>.*?</\1>", re.DOTALL)
_REQUEST: Final = re.compile(
    r"<tool_request\b(?P<attributes>[^>]*)>(?P<arguments>.*?)(?:</tool_request>|\Z)", re.DOTALL
)
_NAME: Final = re.compile(r"""\bname\s*=\s*(?:"([^"]*)"|'([^']*)')""")


class Fallback(StrEnum):
    """The form of a call where a model cannot give a structured one."""

    JSON = "json"  # the whole answer is one JSON object
    MARKUP = "markup"  # <tool_request name="T">ARGS</tool_request> anywhere in it


class ParsedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A model's message: its words, and the calls in it; ``fallback`` says how those were read from the words."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    fallback: Fallback | None = None


def read_message(
    text: str, fragments: Sequence[ToolCallDelta], fallback: Fallback | None, names: Collection[str]
) -> ParsedMessage:
    """Parse a message into its words and calls; ``names`` are the tools that the model was shown."""
    calls = join_fragments(fragments)
    if calls:
        return ParsedMessage(text=text, calls=calls)
    if fallback is Fallback.MARKUP:
        return _read_markup(text)
    if fallback is Fallback.JSON:
        return _read_json(text, names)
    return ParsedMessage(text=text)


def read_json(text: str) -> Any:  # noqa: ANN401 - whatever a model wrote
    """Return a JSON value.

    Strict: what Python alone takes for JSON (NaN, half a surrogate pair) would be refused wherever it goes next.

    Raises:
        ValueError: it is none.
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

    The index says which call a piece belongs to; some servers send index 0 for all, and then a new id begins a new
    call, or without ids a name after arguments that are complete.
    """
    calls: list[_Partial] = []
    current: dict[int, _Partial] = {}
    for piece in fragments:
        partial = current.get(piece.index)
        if partial is None or partial.is_followed_by(piece):
            partial = current[piece.index] = _Partial()
            calls.append(partial)
        partial.add(piece)
    distinct = [partial for number, partial in enumerate(calls) if not (number and partial.repeats(calls[number - 1]))]
    return tuple(partial.call(number) for number, partial in enumerate(distinct))


class _Partial:
    def __init__(self) -> None:
        self.call_id: str | None = None
        self._name: str | None = None
        self._arguments: list[str] = []

    def is_followed_by(self, piece: ToolCallDelta) -> bool:
        if piece.call_id and self.call_id:
            return piece.call_id != self.call_id
        return bool(piece.name and self._name) and self._is_complete

    @property
    def _is_complete(self) -> bool:
        try:
            read_json("".join(self._arguments))
        except ValueError:
            return False
        return True

    def repeats(self, before: "_Partial") -> bool:
        """Whether this is but the name of the call before, sent once more."""
        is_bare = not self.call_id and not "".join(self._arguments)
        return is_bare and self._name == before._name and before._is_complete  # noqa: SLF001 - another of its own

    def add(self, piece: ToolCallDelta) -> None:
        self.call_id = self.call_id or piece.call_id
        if piece.name and piece.name != self._name and not "".join(self._arguments):
            self._name = (self._name or "") + piece.name  # some servers cut names as well
        self._arguments.append(piece.arguments)

    def call(self, number: int) -> ToolCall:
        return ToolCall(id=self.call_id or f"call_{number}", name=self._name or "", arguments="".join(self._arguments))


def _read_json(text: str, names: Collection[str]) -> ParsedMessage:
    body = _THINKING.sub("", text).strip()
    fenced = _FENCE.match(body)
    try:
        document = read_json(fenced["body"] if fenced else body)
    except ValueError:
        return ParsedMessage(text=text)
    entries = list(_entries(document, names))
    if not entries:
        return ParsedMessage(text=text)
    calls = tuple(
        ToolCall(id=f"call_{number}", name=name, arguments=_arguments_text(arguments))
        for number, (name, arguments) in enumerate(entries)
    )
    return ParsedMessage(text="", calls=calls, fallback=Fallback.JSON)


def _entries(document: object, names: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield name and arguments of each call; an answer that only looks like one names no tool that there is."""
    listed = document.get("tool_calls") if isinstance(document, Mapping) else document
    is_announced = isinstance(document, Mapping) and isinstance(listed, list)
    if isinstance(document, Mapping) and not is_announced:
        listed = [document]
    for entry in listed if isinstance(listed, list) else ():
        call = entry.get("function", entry) if isinstance(entry, Mapping) else None
        name = call.get("name") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(name, str):
            continue
        if is_announced or (name in names and "arguments" in call):
            yield name, call.get("arguments", {})


def _arguments_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _read_markup(text: str) -> ParsedMessage:
    spoken = _THINKING.sub("", text)
    calls = tuple(
        ToolCall(id=f"call_{number}", name=_name_of(found["attributes"]), arguments=found["arguments"].strip())
        for number, found in enumerate(_REQUEST.finditer(spoken))
    )
    if not calls:
        return ParsedMessage(text=text)
    return ParsedMessage(text=_REQUEST.sub("", text).strip(), calls=calls, fallback=Fallback.MARKUP)


def _name_of(attributes: str) -> str:
    found = _NAME.search(attributes)
    return (found[1] or found[2] or "") if found else ""

"""The parts of a streamed answer as its client reads them: openings, words and ends of blocks.

Two answers to one request can be compared and joined by them, in each form: chat and text completions, Responses, and
Messages. A part that this reader does not know makes the whole stream unreadable; nothing is guessed.

Sources: OpenAI's and Anthropic's API references; llama.cpp, ``tools/server``; vLLM, ``entrypoints``, of 2026.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, Final

from msgspec import Struct

from transport.dialects.openai import CHAT_PATH

COMPLETIONS_PATH: Final = "/v1/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
FORMS: Final = frozenset({CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH})
Block = tuple[str | int, ...]
Document = dict[str, Any]
TEXTS: Final = frozenset({"content", "text", "response.output_text"})
THOUGHTS: Final = frozenset(
    {"reasoning", "reasoning_content", "thinking", "response.reasoning_text", "response.reasoning_summary_text"}
)
_IDLE: Final[tuple[object, ...]] = (None, "", [], {})
_CHAT_WORDS: Final = frozenset({"content", "reasoning", "reasoning_content", "refusal"})
_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
_NOISE: Final = frozenset({"ping", "response.queued"})


class UnknownPart(ValueError):
    """A frame has a part that this reader does not know."""


class Sign(Enum):
    """The meaning of a part."""

    OPENS = auto()
    SAYS = auto()
    CLOSES = auto()
    ENDS = auto()  # the last words were said


class Part(Struct, frozen=True):
    """A part of a frame: ``holder[field]`` are its words, ``label`` is the kind or the name of what it opens.

    Words that are ``is_whole`` cannot be cut: the frame says more of them, such as their probabilities.
    """

    sign: Sign
    block: Block = ()
    holder: Document = {}
    field: str = ""
    label: str = ""
    is_whole: bool = False


class FrameParts:
    """Reads the frames of one stream in their order; ``path`` is one of ``FORMS``.

    ``ids`` are the names that the server made up for its blocks, in the order in which it used them.
    """

    def __init__(self, path: str) -> None:
        by_path = {MESSAGES_PATH: self._read_message, RESPONSES_PATH: self._read_response}
        self._read: Callable[[Document], Iterator[Part]] = by_path.get(path, self._read_choices)
        self.items: dict[str, int] = {}  # numbers of the items of Responses, by their names
        self.ids: list[str] = []

    def __repr__(self) -> str:
        return f"<FrameParts {self._read.__name__} ids={len(self.ids)}>"

    def split(self, document: Document) -> list[Part]:
        """Return the parts of a frame.

        Raises:
            UnknownPart: it has others.
        """
        try:
            return list(self._read(document))
        except (AttributeError, KeyError, TypeError) as error:
            raise UnknownPart(f"{type(error).__name__}: {error}") from error

    def _read_choices(self, document: Document) -> Iterator[Part]:
        for choice in document.get("choices") or ():
            if choice.get("index"):
                raise UnknownPart("several answers")
            has_each = bool(choice.get("logprobs"))  # one entry a token
            if isinstance(choice.get("text"), str):
                yield Part(Sign.SAYS, ("text",), choice, "text", is_whole=has_each)
            yield from self._read_delta(choice.get("delta") or {}, is_whole=has_each)
            if choice.get("finish_reason"):
                yield Part(Sign.ENDS, label="finish_reason")

    def _read_delta(self, delta: Document, *, is_whole: bool) -> Iterator[Part]:
        for name, value in list(delta.items()):
            if name in _CHAT_WORDS and isinstance(value, str):
                yield Part(Sign.SAYS, (name,), delta, name, is_whole=is_whole)
            elif name == "tool_calls" and value:
                for call in value:
                    yield from self._read_call(call)
            elif name == "role" and value:
                yield Part(Sign.OPENS, (name,), delta, label=value)
            elif value not in _IDLE:
                raise UnknownPart(name)

    def _read_call(self, call: Document) -> Iterator[Part]:
        block, function = ("call", call.get("index") or 0), call.get("function") or {}
        if call.get("id") or function.get("name"):
            yield Part(Sign.OPENS, block, call, label=function.get("name") or "")
        if isinstance(function.get("arguments"), str):
            yield Part(Sign.SAYS, block, function, "arguments")

    def _read_message(self, document: Document) -> Iterator[Part]:
        kind, index = document["type"], document.get("index", 0)
        if kind == "message_start":
            yield Part(Sign.OPENS, (kind,))
        elif kind == "content_block_start":
            block = document["content_block"]
            if any(block.get(name) for name in ("text", "thinking", "input")):
                raise UnknownPart("a block that begins with words")
            yield Part(Sign.OPENS, ("block", index), label=f"{block['type']} {block.get('name', '')}")
        elif kind == "content_block_delta":
            delta = document["delta"]
            if delta["type"] == "signature_delta":
                yield Part(Sign.OPENS, ("block", index, "signature"))
            elif delta["type"] in _DELTAS:
                field = _DELTAS[delta["type"]]
                yield Part(Sign.SAYS, ("block", index, field), delta, field)
            else:
                raise UnknownPart(delta["type"])
        elif kind == "content_block_stop":
            yield Part(Sign.CLOSES, ("block", index))
        elif kind in ("message_delta", "message_stop"):
            yield Part(Sign.ENDS, label=kind)
        elif kind not in _NOISE:
            raise UnknownPart(kind)

    def _read_response(self, document: Document) -> Iterator[Part]:
        base, _, last = str(document["type"]).rpartition(".")
        if base == "response":
            if last in ("created", "in_progress"):
                self._note_id(document["response"]["id"])
                yield Part(Sign.OPENS, (base, last))
            elif last in ("completed", "incomplete"):
                yield Part(Sign.ENDS, label=last)
            elif document["type"] not in _NOISE:
                raise UnknownPart(document["type"])
            return
        item = document.get("item") or {}
        at = self.items.setdefault(item.get("id") or document["item_id"], len(self.items))
        block = (base, at, document.get("content_index") or document.get("summary_index") or 0)
        if last == "added":
            for name in ("id", "call_id"):
                if isinstance(item.get(name), str):
                    self._note_id(item[name])
            what = item or document.get("part") or {}
            yield Part(Sign.OPENS, block, label=f"{what.get('type')} {what.get('name', '')}")
        elif last == "delta" and isinstance(document["delta"], str):
            yield Part(Sign.SAYS, block, document, "delta")
        elif last == "done":
            yield Part(Sign.CLOSES, block)
        else:
            raise UnknownPart(document["type"])

    def _note_id(self, name: str) -> None:
        if name not in self.ids:
            self.ids.append(name)


def is_text(block: Block) -> bool:
    """Whether a block's words are the answer itself."""
    return not TEXTS.isdisjoint(block)


def is_thought(block: Block) -> bool:
    """Whether a block's words are a thought before the answer."""
    return not THOUGHTS.isdisjoint(block)

"""Frames of another answer to the same request, as part of the stream that broke off.

Source: the API references that ``transport/dialects/frame_parts.py`` names.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from transport.dialects.frame_parts import FrameParts, Part, Sign, UnknownPart, is_text, is_thought
from transport.errors import UNDECODABLE
from transport.relay import Passage
from workers.requests.halves import GoingOn
from workers.requests.sent import SentStream

DATA: Final = b"data: "
ACCOUNTS: Final = ("usage", "response", "message")
PROMPT: Final = ("prompt_tokens", "input_tokens")
APART: Final = "cache_read_input_tokens"
ROLES: Final = frozenset({("role",)})  # not every server repeats it
ANSWER: Final = ("completion_tokens", "output_tokens")


class Splice:
    """A passage that joins a second answer to a stream: one opening, no word twice, one account of tokens.

    Nothing more is passed once it ``has_strayed``: the answer has other words than its client has.
    """

    def __init__(self, passage: Passage, sent: SentStream, going_on: GoingOn) -> None:
        self._passage = passage
        self._sent = sent
        self.going_on = going_on
        self.stop: Callable[[], None] = lambda: None  # called once nothing more is passed
        self._parts = FrameParts(sent.path)
        self._tokens = 0 if going_on.is_again else going_on.tokens
        self._unheard = sent.words
        self._unopened = set(sent.opened) - ROLES
        self._number = sent.last_number
        self._is_again = going_on.is_again
        self._is_in_words = bool(going_on.begun.text)
        self._has_words = False  # new ones
        self.has_strayed = False
        if not going_on.is_again:
            text, reasoning = going_on.unheard
            for block in self._unheard:
                if is_text(block) or is_thought(block):
                    self._unheard[block] = text if is_text(block) else reasoning

    def __repr__(self) -> str:
        return f"<Splice after {self._tokens} tokens strayed={self.has_strayed}>"

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Pass on the frames that hold anything new."""
        kept = [self._joined(frame) for frame in frames.replace(b"\r\n", b"\n").split(b"\n\n")]
        joined = b"".join(frame + b"\n\n" for frame in kept if frame)
        if self.has_strayed:
            self.stop()
        elif joined:
            self._passage.pass_frames(content_type, joined)

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Pass on a refusal, unless it may be one of the way that was asked."""
        if self._is_again:
            self._passage.pass_whole(status, content_type, body)

    def _joined(self, frame: bytes) -> bytes:
        """Return the new part of a frame, empty without any."""
        lines = frame.strip(b"\n").split(b"\n")
        data = [line.removeprefix(b"data:").removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        if not data:
            return frame.strip(b"\n")  # a comment
        if data == [b"[DONE]"]:
            self.has_strayed |= self._owes
            return DATA + data[0]
        try:
            (whole,) = data
            document = msgspec.json.decode(whole)
            parts = self._parts.split(document)
        except (UnknownPart, ValueError, *UNDECODABLE):
            self.has_strayed = True
            return b""
        news = [part for part in parts if self._is_new(part)]
        if news or any(part.sign is Sign.ENDS for part in parts):  # first comes all that the client has
            self.has_strayed |= self._owes
        if parts and not news:
            return b""
        for name in ACCOUNTS:
            self._correct(document.get(name))
        if "choices" in document:
            document |= self._sent.head
        if self._number is not None and "sequence_number" in document:
            self._number += 1
            document["sequence_number"] = self._number
        names = dict(zip(self._parts.ids, self._sent.ids, strict=False))
        others = b"".join(line + b"\n" for line in lines if not line.startswith(b"data:"))
        return others + DATA + msgspec.json.encode(_renamed(document, names) if names else document)

    @property
    def _owes(self) -> bool:
        """Whether the client has words or blocks that this answer has not had so far."""
        return bool(self._unopened) or any(self._unheard.values())

    def _is_new(self, part: Part) -> bool:
        """Take what the client has out of a part; return whether anything is left."""
        if part.sign is Sign.SAYS:
            return self._says_more(part)
        if part.sign is Sign.OPENS:
            known = self._sent.opened.get(part.block)
            self._unopened.discard(part.block)
            if known is None:
                return True
            self.has_strayed |= known != part.label
            for name in ("id", "type", "role"):
                part.holder.pop(name, None)
            part.holder.get("function", {}).pop("name", None)
            return False
        if part.sign is Sign.ENDS:
            return part.label not in self._sent.ended
        size = len(part.block)
        self.has_strayed |= any(words and block[:size] == part.block for block, words in self._unheard.items())
        return part.block not in self._sent.closed

    def _says_more(self, part: Part) -> bool:
        words, said = part.holder[part.field], self._unheard.get(part.block, "")
        if said.startswith(words):
            self._unheard[part.block] = said[len(words) :]
            part.holder[part.field] = ""
            return False
        rest = words.removeprefix(said)
        self._unheard[part.block] = ""
        self.has_strayed |= not words.startswith(said) or (part.is_whole and bool(said))
        self.has_strayed |= not self._sent.closed.isdisjoint((part.block, part.block[:-1]))
        if not self._has_words and not self._is_again:  # a thought after words, or the reverse: they are read wrongly
            self._has_words = True
            self.has_strayed |= self._is_in_words and is_thought(part.block)
            self.has_strayed |= not self._is_in_words and is_text(part.block)
        part.holder[part.field] = rest
        return True

    def _correct(self, account: Any) -> None:  # noqa: ANN401 - JSON of an engine
        """Count the beginning as part of the answer, and not of the prompt."""
        usage = account.get("usage", account) if isinstance(account, dict) else {}
        if not isinstance(usage, dict):
            return
        left = self._tokens
        for name in PROMPT:
            if isinstance(usage.get(name), int):
                left = max(0, self._tokens - usage[name])
                usage[name] = max(0, usage[name] - self._tokens)
                _limit_cached(usage, usage[name])
        if isinstance(usage.get(APART), int):  # the cached part of a prompt, which Messages counts beside the rest
            usage[APART] = max(0, usage[APART] - left)
        for name in ANSWER:
            if isinstance(usage.get(name), int):
                usage[name] += self._tokens


def _limit_cached(usage: dict[str, Any], prompt: int) -> None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            details["cached_tokens"] = min(details["cached_tokens"], prompt)


def _renamed(value: Any, names: dict[str, str]) -> Any:  # noqa: ANN401 - JSON of an engine
    """Return a document in which the names that the second server made up are those that the client has."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {name: _renamed(each, names) for name, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, names) for each in value]
    return value

"""Frames of an answer that goes on, as part of the stream that broke off.

Source: OpenAI's API reference, streamed chat completions.
"""

from collections.abc import MutableMapping
from typing import Any, Final

import msgspec

from transport.errors import UNDECODABLE
from transport.relay import Passage
from workers.requests.halves import GoingOn

SAME: Final = ("id", "created", "model", "system_fingerprint")  # in every frame of one stream
DATA: Final = b"data: "


def head_of(frames: bytes) -> dict[str, object]:
    """Return the fields that every frame of a stream repeats, from its first ones."""
    for line in frames.splitlines():
        if line.startswith(DATA + b"{"):
            try:
                document = msgspec.json.decode(line.removeprefix(DATA))
            except UNDECODABLE:
                break
            return {name: document[name] for name in SAME if name in document}
    return {}


class Splice:
    """A passage that joins a second answer to a stream: one opening, no word twice, one account of tokens."""

    def __init__(self, passage: Passage, head: MutableMapping[str, object], going_on: GoingOn) -> None:
        self._passage = passage
        self._head = head
        self._tokens = going_on.tokens
        text, reasoning = going_on.unheard
        self._unheard = {"content": text, "reasoning_content": reasoning, "reasoning": reasoning}
        self._is_in_words = bool(going_on.begun.text)
        self._has_words = False  # new ones
        self._has_strayed = False

    def __repr__(self) -> str:
        return f"<Splice after {self._tokens} tokens>"

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Pass on the frames that hold anything new."""
        kept = [self._joined(frame) for frame in frames.split(b"\n\n")]
        joined = b"".join(frame + b"\n\n" for frame in kept if frame)
        if joined and not self._has_strayed:
            self._passage.pass_frames(content_type, joined)

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Pass on a refusal."""
        self._passage.pass_whole(status, content_type, body)

    def _joined(self, frame: bytes) -> bytes:
        if not frame.startswith(DATA + b"{"):
            return frame.strip(b"\r\n")
        try:
            document = msgspec.json.decode(frame.removeprefix(DATA))
        except UNDECODABLE:
            return frame
        has_usage = isinstance(document.get("usage"), dict)
        if has_usage:
            self._correct(document["usage"])
        choices = document.get("choices")
        new = [choice for choice in choices or () if self._is_new(choice)]
        is_new = has_usage or not choices or bool(new)
        return DATA + msgspec.json.encode({**document, **self._head}) if is_new else b""

    def _is_new(self, choice: Any) -> bool:  # noqa: ANN401 - JSON of an engine
        """Take what the client has out of a choice; return whether anything is left."""
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return True
        delta.pop("role", None)
        for name in [name for name in self._unheard if isinstance(delta.get(name), str)]:
            delta[name] = self._rest(name, delta[name])
            if delta[name] and not self._has_words:
                self._has_words = True
                self._has_strayed |= (name == "content") is not self._is_in_words
        return bool(choice.get("finish_reason")) or any(value not in (None, "", []) for value in delta.values())

    def _rest(self, name: str, text: str) -> str:
        unheard = self._unheard[name]
        if unheard.startswith(text):
            self._unheard[name] = unheard.removeprefix(text)
            return ""
        self._has_strayed |= not text.startswith(unheard)
        self._unheard[name] = ""
        return text.removeprefix(unheard)

    def _correct(self, usage: dict[str, Any]) -> None:
        """Count the beginning as part of the answer, and not of the prompt."""
        prompt, answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(prompt, int) and isinstance(answer, int):
            usage["prompt_tokens"] = max(0, prompt - self._tokens)
            usage["completion_tokens"] = answer + self._tokens

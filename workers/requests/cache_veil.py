"""The prompt-cache counts in a relayed answer, limited to tokens that its own key sent before.

The cached part of a prompt would show what others have asked: a guess at another's prompt is confirmed token by token.
So the counts cover only what the client's own program had sent, and no more. Other cached tokens are counted as read
now, so that the sums stay the same.

Sources: OpenAI's and Anthropic's API references for ``usage``; llama.cpp, ``tools/server``, for ``timings``.
"""

from collections.abc import MutableMapping
from typing import Final, cast

import msgspec

from transport.errors import UNDECODABLE
from transport.relay import Passage

SIGN: Final = b"cache"  # part of the name of each count
HIDDEN: Final = ("prompt_progress", "__verbose")  # fields that show the same counts in more places
Document = MutableMapping[str, object]


class WholeLines:
    """Passes on whole lines, and keeps the beginning of the next."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def __repr__(self) -> str:
        return f"<WholeLines rest={len(self._rest)}>"

    @property
    def is_between(self) -> bool:
        """Whether no part of a line is kept."""
        return not self._rest

    def cut(self, piece: bytes) -> bytes:
        """Return the lines that a piece completes."""
        end = piece.rfind(b"\n") + 1  # the kept part holds none: a long line is not searched again with each piece
        if not end:
            self._rest += piece
            return b""
        whole = bytes(self._rest) + piece[:end]
        self._rest = bytearray(piece[end:])
        return whole

    def take_rest(self) -> bytes:
        """Take the unfinished line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


class CacheVeil:
    """A passage that shows no more than ``own_tokens`` of a prompt as cached."""

    def __init__(self, passage: Passage, own_tokens: int) -> None:
        self._passage = passage
        self._own_tokens = own_tokens
        self._lines = WholeLines()
        self._content_type = ""

    def __repr__(self) -> str:
        return f"<CacheVeil {self._own_tokens}>"

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Pass on the whole lines; most are tokens, without cache counts."""
        self._content_type = content_type
        if self._lines.is_between and SIGN not in frames and frames.endswith(b"\n"):
            self._passage.pass_frames(content_type, frames)
            return
        whole = self._lines.cut(frames)
        if whole:
            self._passage.pass_frames(content_type, self._veiled_lines(whole))

    def flush(self) -> None:
        """Pass on the unfinished line."""
        rest = self._lines.take_rest()
        if rest:
            self._passage.pass_frames(self._content_type, self._veiled_lines(rest))

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        """Pass on a whole answer."""
        self._passage.pass_whole(status, content_type, self._veiled(body) if SIGN in body else body)

    def _veiled_lines(self, lines: bytes) -> bytes:
        if SIGN not in lines:
            return lines
        return b"".join(self._veiled_line(line) for line in lines.splitlines(keepends=True))

    def _veiled_line(self, line: bytes) -> bytes:
        if SIGN not in line or not line.startswith(b"data:"):
            return line
        head, text = (line[:6], line[6:]) if line[5:6] == b" " else (line[:5], line[5:])
        bare = text.rstrip(b"\r\n")
        return head + self._veiled(bare) + text[len(bare) :]

    def _veiled(self, text: bytes) -> bytes:
        """Return the document of an answer or a frame, unchanged if it shows no cache counts."""
        try:
            document = msgspec.json.decode(text)
        except UNDECODABLE:  # no client can read it either
            return text
        if not isinstance(document, dict):
            return text
        inner = (document, document.get("response"), document.get("message"))
        changes = [self._veil(each) for each in inner if isinstance(each, dict)]
        return msgspec.json.encode(document) if any(changes) else text

    def _veil(self, document: Document) -> bool:
        """Limit the counts of a document; return whether that changes it."""
        is_changed = False
        for name in HIDDEN:
            is_changed |= document.pop(name, None) is not None
        usage, timings = document.get("usage"), document.get("timings")
        if isinstance(usage, dict):
            for name in ("prompt_tokens_details", "input_tokens_details"):
                is_changed |= self._lower(usage.get(name), "cached_tokens") > 0
            less = self._lower(usage, "cache_read_input_tokens")
            is_changed |= less > 0
            _raise(usage, "input_tokens", less)
        if isinstance(timings, dict):
            is_changed |= self._veil_timings(timings)
        return is_changed | (self._lower(document, "tokens_cached") > 0)

    def _veil_timings(self, timings: Document) -> bool:
        less = self._lower(timings, "cache_n")
        _raise(timings, "prompt_n", less)
        read, took_ms = timings.get("prompt_n"), timings.get("prompt_ms")
        if less and isinstance(read, int | float) and isinstance(took_ms, int | float) and read > 0 < took_ms:
            rates = {"prompt_per_token_ms": took_ms / read, "prompt_per_second": 1000 * read / took_ms}
            timings.update({name: rate for name, rate in rates.items() if name in timings})
        return less > 0

    def _lower(self, holder: object, name: str) -> int:
        """Limit a number of cached tokens; return the reduction."""
        count = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(count, int) or count <= self._own_tokens:
            return 0
        cast("Document", holder)[name] = self._own_tokens
        return count - self._own_tokens


def _raise(holder: Document, name: str, by: int) -> None:
    count = holder.get(name)
    if by and isinstance(count, int):
        holder[name] = count + by

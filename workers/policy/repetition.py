"""Whether a model repeats itself without end. Pure.

It runs beside the token path: new text is scanned a few times a second, so that a token pays nothing for it
(``bench/token_path.py``). It knows two patterns: a repeated line (specification, "Repetition"), and a repeated phrase
without regard to lines.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import Ge

from workers.policy.limits import Configured

FENCE_FACTOR: Final = 8  # in a code block equal lines are ordinary: data, assembler, closing braces
TAIL_CHARS: Final = 8192  # how far back a phrase is searched: eight times a paragraph of a thousand characters
NEEDLE_CHARS: Final = 48  # the end of the text, searched for in the text before it
PHRASE_REPEATS: Final = 8
PHRASE_CHARS: Final = 512  # all repeats together; shorter ones are laughter, emphasis, a song
NEAR_CHARS: Final = TAIL_CHARS // PHRASE_REPEATS + NEEDLE_CHARS  # a looping phrase occurred at most this far back
RULE_CHARS: Final = 4096  # the same for phrases without letters and digits: rules, blanks, indentation
_FENCE: Final = re.compile(r"\s{0,3}(```|~~~)")
_WORDS: Final = re.compile(r"\w")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionLimits(Configured):
    """A line that is repeated ``lines`` times in a row is a loop; None switches both detectors off."""

    lines: Annotated[int, Ge(2)] | None = 8

    @property
    def least_chars(self) -> int:
        """The least length of a text with a loop: lines of one letter, and the breaks between them."""
        return PHRASE_CHARS if self.lines is None else min(PHRASE_CHARS, 2 * self.lines - 1)


class Repetition:
    """Reads one stream of text as it grows and reports when it has turned into a loop."""

    def __init__(self, limits: RepetitionLimits) -> None:
        self._limits = limits
        self._partial: list[str] = []  # an unfinished line: it may grow long, and is joined once
        self._line = ""
        self._count = 0
        self._is_in_fence = False
        self._near = ""
        self._pieces: list[str] = []
        self._held_chars = 0  # in the pieces
        self._unread = 0

    def __repr__(self) -> str:
        return f"<Repetition {self._count} x {self._line[:40]!r}>"

    def feed(self, text: str) -> str | None:
        """Take more text; return the repeated part once it is a loop."""
        if self._limits.lines is None or not text:
            return None
        *lines, rest = text.split("\n")
        if lines:
            lines[0] = "".join([*self._partial, lines[0]])
            self._partial.clear()
        if rest:
            self._partial.append(rest)
        for line in lines:
            if self._counts_as_loop(line.strip(), self._limits.lines):
                return f"the same line {self._count} times in a row: {self._line[:100]!r}"
        return self._phrase(text)

    def end_text(self) -> str | None:
        """Handle the end of the text: its last line needs no line break."""
        rest = "".join(self._partial).strip()
        if self._limits.lines is None or not self._counts_as_loop(rest, self._limits.lines):
            return None
        return f"the same line {self._count} times in a row: {self._line[:100]!r}"

    def _counts_as_loop(self, line: str, limit: int) -> bool:
        if not line:
            return False  # blank lines neither repeat nor interrupt
        if _FENCE.match(line):
            self._is_in_fence = not self._is_in_fence
        if not _WORDS.search(line):  # table rules, braces, fences
            self._line, self._count = "", 0
            return False
        self._count = self._count + 1 if line == self._line else 1
        self._line = line
        return self._count >= limit * (FENCE_FACTOR if self._is_in_fence else 1)

    def _phrase(self, text: str) -> str | None:
        """Search the end of the text once enough of it is new: one search in C, whatever the phrase's length.

        The tail is joined only if its end was found again: copying 8 KiB for each request at each look would drive all
        else out of the processor's cache.
        """
        self._hold(text)
        self._unread += len(text)
        if self._unread < NEEDLE_CHARS or self._held_chars < PHRASE_CHARS:
            return None
        self._unread = 0
        near = self._near
        before = near.rfind(near[-NEEDLE_CHARS:], 0, -1)
        if before < 0:
            return None
        period = len(near) - NEEDLE_CHARS - before
        tail = "".join(self._pieces)[-TAIL_CHARS:]
        if period * PHRASE_REPEATS > len(tail):
            return None
        phrase = tail[-period:]
        needed = max(PHRASE_REPEATS, -(-self._needed_chars(phrase) // period))
        if needed * period > len(tail) or tail[-period * needed :] != phrase * needed:
            return None
        return f"the same {period} characters {needed} times in a row: {phrase[:100]!r}"

    def _hold(self, text: str) -> None:
        self._near = (self._near + text)[-NEAR_CHARS:]
        self._pieces.append(text)
        self._held_chars += len(text)
        if self._held_chars > 2 * TAIL_CHARS:
            self._pieces = ["".join(self._pieces)[-TAIL_CHARS:]]
            self._held_chars = TAIL_CHARS

    def _needed_chars(self, phrase: str) -> int:
        if self._is_in_fence or not _WORDS.search(phrase):
            return RULE_CHARS
        return PHRASE_CHARS

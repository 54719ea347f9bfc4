"""The memory window: the part of a discussion that an agent is shown (specification, "Memory"). Pure.

A cut drops whole rounds, down to a third of the bound. A window that moved with every turn would change the beginning
of the prompt each time, and the engine would have to read all of it again.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

SELF: Final = "self"  # the reader itself sums up
SHARE: Final = 3  # a cut keeps one part in this many
MARGIN: Final = 64  # prompt tokens that are not counted: roles, names, the round
CHARS_A_TOKEN: Final = 3  # for words that no engine has counted, as a caller's


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which hidden rounds are summed up: ``by`` an agent, None for the reader itself.

    ``prompt`` replaces Roundhouse's own request.
    """

    by: str | None = None
    max_tokens: int = 200
    prompt: str | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The bound of the memory window: ``rounds``, ``tokens``, or what fits beside the longest answer."""

    rounds: int | None = None
    tokens: int | None = None
    summary: Summary | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the window is what fits the context."""
        return self.rounds is None and self.tokens is None


def first_shown(memory: Memory, sizes: Mapping[int, int], first: int, number: int, room: int | None) -> int:
    """Return the first round that an agent is shown in its turn of round ``number``; before that it is ``first``.

    ``sizes`` holds the tokens that it would be shown of each round. ``room`` is the tokens that fit beside the rest of
    its prompt and its longest answer, None if unknown.
    """
    past = range(first, number)
    if memory.rounds is not None:
        return first if len(past) <= memory.rounds else number - math.ceil(memory.rounds / SHARE)
    keep = memory.tokens if memory.tokens is not None else room
    if keep is None or sum(sizes.get(each, 0) for each in past) <= keep:
        return first
    left = keep // SHARE
    for each in reversed(past):
        left -= sizes.get(each, 0)
        if left < 0:
            # The last round stays if it fits at all: without it the agent has nothing to answer.
            is_last = each == number - 1 and sizes.get(each, 0) <= keep
            return each if is_last else each + 1
    return first


class Cuts:
    """The memory cuts of one reader, or of all in a shared view, by the rounds of their decisions."""

    def __init__(self) -> None:
        self._from: list[tuple[int, int]] = []  # the round of a decision, and the first round shown since
        self._decided: dict[str, int] = {}  # by agent: the last round with a decision, for a cut or against one

    def __repr__(self) -> str:
        return f"<Cuts {self._from}>"

    def shown_in(self, number: int) -> int:
        """Return the first round that is shown in a turn of round ``number``."""
        return max((first for at, first in self._from if at <= number), default=0)

    def decided_for(self, first: int) -> range | None:
        """Return the rounds in which the cut to ``first`` may have been decided.

        That is the round in which it took effect, or an earlier one whose turn came to nothing.
        """
        before = 0
        for at, shown in sorted(self._from):
            if shown == first:
                return range(before, at + 1)
            before = at + 1
        return None

    def is_decided(self, number: int, agent: str) -> bool:
        """Whether an agent's window in a round is decided, by the agent itself or by a cut of that round."""
        return number <= self._decided.get(agent, -1) or any(at == number for at, _ in self._from)

    def is_any_decided(self, number: int) -> bool:
        """Whether any agent has decided on a round."""
        return number <= max(self._decided.values(), default=-1)

    def decide(self, number: int, first: int, agent: str = "") -> bool:
        """Record an agent's decision on a round's window; return whether the window is shorter now."""
        self._decided[agent] = max(self._decided.get(agent, -1), number)
        if first <= self.shown_in(number):
            return False
        self._from.append((number, first))
        return True

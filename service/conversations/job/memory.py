"""The part of a discussion that an agent is shown, and where it is cut (specification, "Memory"). Pure.

A cut drops whole rounds, down to a third of what is kept: a window that slid with every turn would change the prompt
behind its beginning each time, and the engine would read all of it again.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

SELF: Final = "self"  # who sums up
SHARE: Final = 3  # a cut leaves one in so many
MARGIN: Final = 64  # tokens of a prompt that no count of ours knows: roles, names, the round
CHARS_A_TOKEN: Final = 3  # of words that no engine has counted: a caller's


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which rounds are summed up that are left out: ``by`` an agent, or by the reader itself where None.

    ``prompt`` stands in place of Roundhouse's own words.
    """

    by: str | None = None
    max_tokens: int = 200
    prompt: str | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The bound of what is shown of the past: ``rounds``, ``tokens``, or what fits beside the longest answer."""

    rounds: int | None = None
    tokens: int | None = None
    summary: Summary | None = None

    @property
    def is_auto(self) -> bool:
        """Whether what fits the context is kept."""
        return self.rounds is None and self.tokens is None


def first_shown(memory: Memory, sizes: Mapping[int, int], first: int, number: int, room: int | None) -> int:
    """Return the first round that an agent is shown in its turn of round ``number``; by now that is ``first``.

    ``sizes`` are the tokens that it would be shown of each round, ``room`` those that fit beside all else of its prompt
    and its longest answer, None where that is not known.
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
            # The last round stays, where it fits at all: without it nobody knows what is talked about.
            is_last = each == number - 1 and sizes.get(each, 0) <= keep
            return each if is_last else each + 1
    return first


class Cuts:
    """The cuts of one reader's discussion, or of everybody's in a shared view, by the rounds of their decisions."""

    def __init__(self) -> None:
        self._from: list[tuple[int, int]] = []  # the round of a decision, and the first round that is shown since
        self._decided: dict[str, int] = {}  # the last round of each agent in which anything was, or nothing

    def __repr__(self) -> str:
        return f"<Cuts {self._from}>"

    def shown_in(self, number: int) -> int:
        """Return the first round that is shown in a turn of round ``number``."""
        return max((first for at, first in self._from if at <= number), default=0)

    def decided_for(self, first: int) -> range | None:
        """Return the rounds in one of which it was decided that ``first`` is the first one shown.

        That is the one in which it is known to be, or one before, in which its turn came to nothing.
        """
        before = 0
        for at, shown in sorted(self._from):
            if shown == first:
                return range(before, at + 1)
            before = at + 1
        return None

    def is_decided(self, number: int, agent: str) -> bool:
        """Whether it is decided what an agent is shown in a round: by itself, or by a cut for all, of which one is."""
        return number <= self._decided.get(agent, -1) or any(at == number for at, _ in self._from)

    def is_any_decided(self, number: int) -> bool:
        """Whether any agent has decided on a round."""
        return number <= max(self._decided.values(), default=-1)

    def decide(self, number: int, first: int, agent: str = "") -> bool:
        """Take what is shown from a round on, as an agent has decided; return whether it was more before."""
        self._decided[agent] = max(self._decided.get(agent, -1), number)
        if first <= self.shown_in(number):
            return False
        self._from.append((number, first))
        return True

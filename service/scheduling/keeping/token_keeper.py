"""Keeps the recorded tokens of completed turns, as long as the store has room for them."""

from collections import Counter
from typing import Final

from service.conversations.record.token_arrays import ChainEnd, TurnTokens, add_to_chain, pack
from workers.requests.answer import Answer
from workers.requests.tokens import Lacking

MIB: Final = 1024 * 1024


class TokenKeeper:
    """Packs tokens and counts their bytes; ``most_mib`` bounds the bytes of all jobs, None does not.

    ``used`` is what the store has, as it was last read, with what this node has added since. ``rows`` counts rows for
    readers, by what became of them.
    """

    def __init__(self, most_mib: int | None = None) -> None:
        self.most_mib = most_mib
        self.used = 0
        self.rows: Counter[str] = Counter()
        self.turns = self.partial = self.dropped = 0  # recorded turns, those that are not whole, those without room

    def __repr__(self) -> str:
        return f"<TokenKeeper used={self.used} dropped={self.dropped}>"

    def pack_turn(self, end: ChainEnd | None, answer: Answer, mode: str) -> tuple[TurnTokens, bytes | None]:
        """Return the record of a completed answer's tokens, and the packed tokens, None where they are not kept.

        ``end`` is that of the agent's chain before. ``mode`` says what the engine's logprobs are.
        """
        messages, end = add_to_chain(end, answer.recorded, mode)
        lacking = {part for each in messages for part in each.partial} if messages else {Lacking.IDS}
        packed = pack(messages) if messages else None
        if packed is not None and not self.has_room(len(packed)):
            packed = end = None
            self.dropped += 1
            lacking.add(Lacking.STORE)
        self.used += len(packed or b"")
        self.turns += 1
        self.partial += bool(lacking)
        count = sum(len(each.ids) for each in messages)
        return TurnTokens(tokens=count, partial=tuple(sorted(lacking)), chain=end), packed

    def has_room(self, size: int) -> bool:
        """Whether the store has room for so many bytes more."""
        return self.most_mib is None or self.used + size <= self.most_mib * MIB

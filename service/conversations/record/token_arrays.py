"""The tokens of a turn as a store keeps them: arrays packed apart from the transcript, and only the ids it adds. Pure.

An agent's next prompt mostly continues the tokens of its last one: those are stored once. A chain is a run of messages
in which each prompt begins with all tokens before it. A digest says whether a prompt does, so no ids are held for that.
"""

import hashlib
import json
import math
import zlib
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from workers.requests.tokens import Lacking, RecordedTokens

LEVEL: Final = 6  # zlib's: 9 saves 1 % and takes three times as long
IDS: Final = "I"
VALUES: Final = "f"
WIDTH: Final = 4  # bytes of either
MASKED: Final = "constrained"  # mode of logprobs after a constraint
DIGEST_BYTES: Final = 12


class ChainEnd(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The end of an agent's chain: how many tokens it has, and a digest of them."""

    length: int
    digest: str

    def is_continued_by(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt begins with all tokens of the chain."""
        return len(prompt) >= self.length and _digest_of(prompt[: self.length]) == self.digest


class RecordedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a turn; its ``prompt`` lacks the first ``begins_at`` ids, which the chain before it has.

    Without a chain before it ``begins_at`` is 0. ``logprobs`` are None if none were wanted, and None at a token without
    one. ``mode`` says what they are: ``raw``, or another word of the engine's.
    """

    begins_at: int
    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float | None] | None
    versions: Sequence[tuple[int, int, int]]
    stop_reason: str | None
    params: dict[str, object]
    mode: str
    partial: tuple[Lacking, ...] = ()


class TurnTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a turn's tokens: their number, what is not whole, and where its agent's chain ends, if it does."""

    tokens: int
    partial: tuple[str, ...] = ()
    chain: ChainEnd | None = None


class _Head(msgspec.Struct, frozen=True, array_like=True):
    begins_at: int
    versions: Sequence[tuple[int, int, int]]
    stop_reason: str | None
    params: str
    mode: str
    partial: tuple[Lacking, ...]
    prompt: bytes
    ids: bytes
    logprobs: bytes | None


_decode_heads = msgspec.msgpack.Decoder(list[_Head]).decode


def add_to_chain(
    end: ChainEnd | None, recorded: Sequence[RecordedTokens], mode: str
) -> tuple[list[RecordedMessage], ChainEnd | None]:
    """Return the messages of a turn as parts of its agent's chain, and its end; None if ids are not whole."""
    messages = []
    for each in recorded:
        prompt, is_continued = each.prompt, end is not None and end.is_continued_by(each.prompt)
        begins_at = end.length if end is not None and is_continued else 0
        messages.append(
            RecordedMessage(
                begins_at=begins_at,
                prompt=prompt[begins_at:],
                ids=each.ids,
                logprobs=each.logprobs,
                versions=each.versions,
                stop_reason=each.stop_reason,
                params=each.params,
                mode=MASKED if each.is_masked else mode,
                partial=each.partial,
            )
        )
        is_whole = not {Lacking.PROMPT, Lacking.IDS} & {*each.partial}
        whole = [*prompt, *each.ids]
        end = ChainEnd(length=len(whole), digest=_digest_of(whole)) if is_whole else None
    return messages, end


def longest_continued(ends: Sequence[ChainEnd], prompt: Sequence[int]) -> int | None:
    """Return the place of the longest chain that a prompt begins with, None without one; the prompt is read once."""
    digest, read, found = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, None
    for place, end in sorted(enumerate(ends), key=lambda each: each[1].length):
        if end.length > len(prompt):
            break
        digest.update(array(IDS, prompt[read : end.length]).tobytes())
        read = end.length
        if digest.hexdigest() == end.digest:
            found = place
    return found


def pack(messages: Sequence[RecordedMessage]) -> bytes:
    """Return the stored form of a turn's messages."""
    heads = [
        _Head(
            each.begins_at,
            each.versions,
            each.stop_reason,
            json.dumps(each.params),  # the numbers of MessagePack end at 64 bits
            each.mode,
            each.partial,
            _planes(IDS, each.prompt),
            _planes(IDS, each.ids),
            None
            if each.logprobs is None
            else _planes(VALUES, [math.nan if value is None else value for value in each.logprobs]),
        )
        for each in messages
    ]
    return zlib.compress(msgspec.msgpack.encode(heads), LEVEL)


def unpack(packed: bytes) -> list[RecordedMessage]:
    """Return the messages of a turn from their stored form."""
    return [
        RecordedMessage(
            begins_at=head.begins_at,
            prompt=[int(each) for each in _values(IDS, head.prompt)],
            ids=[int(each) for each in _values(IDS, head.ids)],
            logprobs=None
            if head.logprobs is None
            else [None if math.isnan(value) else value for value in _values(VALUES, head.logprobs)],
            versions=head.versions,
            stop_reason=head.stop_reason,
            params=json.loads(head.params),
            mode=head.mode,
            partial=head.partial,
        )
        for head in _decode_heads(zlib.decompress(packed))
    ]


def _planes(kind: str, values: Sequence[float]) -> bytes:
    """Return the bytes of numbers by their place in each: high bytes are alike, and pack well together."""
    raw = array(kind, values).tobytes()
    return b"".join(raw[place::WIDTH] for place in range(WIDTH))


def _values(kind: str, planes: bytes) -> "array[float]":
    size = len(planes) // WIDTH
    raw = bytearray(len(planes))
    for place in range(WIDTH):
        raw[place::WIDTH] = planes[place * size : (place + 1) * size]
    values: array[float] = array(kind)
    values.frombytes(bytes(raw))
    return values


def _digest_of(ids: Sequence[int]) -> str:
    return hashlib.blake2b(array(IDS, ids).tobytes(), digest_size=DIGEST_BYTES).hexdigest()

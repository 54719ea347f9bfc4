"""Half an answer in the form in which a store keeps it, for the next life of the service. Pure."""

import hashlib
import time
from datetime import datetime

import msgspec

from transport.events import Usage
from transport.request import ChatRequest
from workers.requests.generation import EndedGeneration
from workers.requests.halves import HalfAnswer, Written, fields_of


class EndedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message with calls that have been answered, and its cost in tokens."""

    text: str
    reasoning: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class StoredHalf(Written, frozen=True, kw_only=True):
    """A ``HalfAnswer`` with a digest in place of the request that it answers.

    ``made_at`` is the time in that request's prompt. ``counted`` are the prompt's, the answer's and the cached tokens
    that some usage has, None for all: the attempt that wrote the rest has left no other record.
    """

    ended: tuple[EndedMessage, ...] = ()
    asked: str
    made_at: datetime
    counted: tuple[int, int, int] | None


def digest_of(chat: ChatRequest) -> str:
    """Return a digest of what a request asks: model, messages and tools."""
    asked = msgspec.json.encode([chat.model, chat.messages, chat.tools], order="sorted")
    return hashlib.sha256(asked).hexdigest()


def to_store(half: HalfAnswer, made_at: datetime, counted: Usage | None) -> StoredHalf | None:
    """Return the form of a half for a store; None if nothing was asked yet."""
    digest = half.digest if half.asked is None else digest_of(half.asked)
    if digest is None:
        return None
    ended = []
    for each in half.ended:
        cost = each.usage or each.seen
        ended.append(
            EndedMessage(
                text=each.text,
                reasoning=each.reasoning,
                prompt_tokens=cost.prompt_tokens,
                completion_tokens=cost.completion_tokens,
                cached_tokens=cost.cached_tokens,
            )
        )
    return StoredHalf(
        **fields_of(Written, half),
        ended=tuple(ended),
        asked=digest,
        made_at=made_at,
        counted=None if counted is None else (counted.prompt_tokens, counted.completion_tokens, counted.cached_tokens),
    )


def from_store(kept: StoredHalf) -> HalfAnswer:
    """Return a stored half as the next attempt goes on from it."""
    ended = []
    for each in kept.ended:
        usage = Usage(each.prompt_tokens, each.completion_tokens, each.cached_tokens)
        ended.append(EndedGeneration(time.monotonic, each.text, each.reasoning, usage))
    return HalfAnswer(
        **fields_of(Written, kept),
        ended=tuple(ended),
        digest=kept.asked,
        counted=None if kept.counted is None else Usage(*kept.counted),
    )


def is_answer_to(half: HalfAnswer, chat: ChatRequest) -> bool:
    """Whether the same words were asked of the same model; only then may its answer go on."""
    asked = half.asked
    if asked is None:
        return half.digest == digest_of(chat)
    return (asked.model, asked.messages, asked.tools) == (chat.model, chat.messages, chat.tools)

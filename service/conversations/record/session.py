"""A session: requests of one agent at the front door, whose tokens are recorded as those of a job are. Pure.

Its exchanges form a tree: the prompt of one begins with all tokens of an earlier one, or with none of their tokens. A
chain is a path in it. A written token is in one chain only: where several exchanges go on from one, its chain goes on
with the longest line of them, and the others begin chains.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from service.conversations.record.rollout import Chain
from service.conversations.record.token_arrays import (
    ChainEnd,
    RecordedMessage,
    add_to_chain,
    longest_continued,
)
from transport.request import Message, TokenDetail, ToolCall
from workers.requests.tokens import Lacking, RecordedTokens

AGENT: Final = "request"  # in rows of sessions, which have one agent,
CONVERSATION: Final = "0"  # and one conversation
MARK_BYTES: Final = 12
Posted = Mapping[str, Any]  # a message of a chat as its client has sent it


class SessionWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is to be opened; ``model`` answers all of its requests, None the one that each names.

    It is deleted ``ttl_s`` seconds after its last use.
    """

    model: str | None
    records: TokenDetail
    max_staleness: int | None
    ttl_s: float


class Session(SessionWanted, frozen=True, kw_only=True):
    """An open session; ``owner`` is the name of its key."""

    id: str
    owner: str | None
    created_at: datetime
    expires_at: datetime


class KnownEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an exchange's tokens, for prompts that go on from there."""

    number: int
    messages: int  # in its chat, the answer included
    end: ChainEnd


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a session and its answer, as messages of a chat; ``mode`` is that of its logprobs."""

    model: str
    prompt: Sequence[Posted]
    answer: Posted
    mode: str


class ExchangeHead(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange without its tokens and messages; its prompt goes on from exchange ``follows``, None from none.

    ``message_count`` counts all messages of its chat, the answer included. ``end`` is None where no prompt can go on
    from it.
    """

    follows: int | None
    partial: tuple[str, ...]
    message_count: int
    end: ChainEnd | None
    model: str


class SessionExchange(ExchangeHead, frozen=True, kw_only=True):
    """One request and its answer, which ``mark`` names.

    ``tokens`` lacks the ids that the exchange before has, ``messages`` its messages; the answer is the last of them.
    Without ``is_certain`` its client may not have the answer.
    """

    number: int = 0
    tokens: RecordedMessage | None
    messages: Sequence[Posted]
    mark: str
    is_certain: bool = False


def exchange_of(
    known: Sequence[KnownEnd],
    recorded: RecordedTokens | None,
    asked: Asked,
) -> SessionExchange:
    """Return the exchange of a request, after those that are known."""
    before = None if recorded is None else longest_continued([each.end for each in known], recorded.prompt)
    follows = None if before is None else known[before]
    tokens, end = None, None
    partial: tuple[str, ...] = (Lacking.IDS,)
    if recorded is not None:
        (tokens,), end = add_to_chain(None if follows is None else follows.end, [recorded], asked.mode)
        partial = tuple(sorted(tokens.partial))
    shown = 0 if follows is None else min(follows.messages, len(asked.prompt))
    return SessionExchange(
        follows=None if follows is None else follows.number,
        tokens=tokens,
        partial=partial,
        messages=[*asked.prompt[shown:], asked.answer],
        message_count=len(asked.prompt) + 1,
        end=end,
        mark=mark_of(asked.answer),
        model=asked.model,
    )


def mark_of(answer: Posted) -> str:
    """Return a name for an answer, the same for what its client sends back of it.

    Calls have ids that no other answer has. Blanks around a text may be lost.
    """
    calls = [str(call.get("id")) for call in answer.get("tool_calls") or ()]
    said = repr(calls) if calls else text_of(answer).strip()
    return hashlib.blake2b(said.encode("utf-8", "replace"), digest_size=MARK_BYTES).hexdigest()


def marks_in(messages: Iterable[Posted]) -> set[str]:
    """Return the marks of all answers that a request repeats."""
    return {mark_of(each) for each in messages if each.get("role") == "assistant"}


def text_of(message: Posted) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def chains_of_session(exchanges: Sequence[SessionExchange]) -> list[Chain]:
    """Return the chains of a session's exchanges.

    An exchange whose delivery is uncertain is left out: a later one that goes on from it would have made it certain.
    """
    by_number = {each.number: each for each in exchanges}
    certain = [each for each in exchanges if each.is_certain]
    chosen = _successors(certain)
    chains: list[Chain] = []
    ends: dict[int, Chain] = {}  # the chain that an exchange is the last of
    for each in certain:
        is_next = each.follows is not None and chosen[each.follows] == each.number
        chain = ends.get(each.follows) if each.follows is not None and is_next else None
        tokens = each.tokens
        if chain is None:
            chain = Chain(AGENT, len(chains), each.number)
            chains.append(chain)
            if tokens is not None:
                tokens = replace(tokens, begins_at=0, prompt=_whole_prompt(by_number, each))
        if tokens is None:
            chain.partial |= {*each.partial}
            continue
        chain.add(tokens, each.number)
        if chain.is_open:
            ends[each.number] = chain
    return chains


def texts_of_session(exchanges: Sequence[SessionExchange]) -> dict[tuple[str, int], str]:
    """Return the texts of answers, by agent and number of the exchange."""
    return {(AGENT, each.number): text_of(each.messages[-1]) for each in exchanges}


def _successors(exchanges: Sequence[SessionExchange]) -> dict[int, int]:
    """Return the exchange that a chain goes on with after each: the one with the longest line, the newest of equals.

    An answer that its client has asked for once more is older than the one that it goes on from.
    """
    lengths: dict[int, int] = {}  # by exchange: the longest line from it
    found: dict[int, int] = {}
    for each in reversed(exchanges):
        length = lengths.setdefault(each.number, 1)
        if each.follows is not None and length + 1 > lengths.get(each.follows, 0):
            lengths[each.follows], found[each.follows] = length + 1, each.number
    return found


def prompts_of_session(exchanges: Sequence[SessionExchange]) -> dict[tuple[str, int], list[list[Message]]]:
    """Return the messages of each exchange's prompt, by agent and number."""
    by_number = {each.number: each for each in exchanges}
    found: dict[tuple[str, int], list[list[Message]]] = {}
    for each in exchanges:
        path: list[Posted] = [*each.messages[:-1]]
        for before in _before(by_number, each):
            path = [*before.messages, *path]
        found[AGENT, each.number] = [[_read_message(message) for message in path]]
    return found


def _whole_prompt(by_number: Mapping[int, SessionExchange], exchange: SessionExchange) -> list[int]:
    """Return all ids of a prompt, those of the exchanges before it first."""
    assert exchange.tokens is not None  # noqa: S101 - the caller has checked
    ids = [*exchange.tokens.prompt]
    for before in _before(by_number, exchange):
        if before.tokens is not None:
            ids = [*before.tokens.prompt, *before.tokens.ids, *ids]
    return ids


def _before(by_number: Mapping[int, SessionExchange], exchange: SessionExchange) -> Iterable[SessionExchange]:
    """Yield the exchanges that one goes on from, the newest first."""
    at = exchange.follows
    while at is not None:
        before = by_number[at]
        yield before
        at = before.follows


def _read_message(message: Posted) -> Message:
    calls = tuple(
        ToolCall(id=str(call.get("id")), name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Message(
        role=message.get("role", "user"), content=text_of(message), calls=calls, call_id=message.get("tool_call_id")
    )

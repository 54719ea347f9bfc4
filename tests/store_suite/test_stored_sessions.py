"""Sessions and their exchanges, as every store keeps them (specification, "Sessions")."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from service.conversations.record.rollout import Reward
from service.conversations.record.session import (
    Asked,
    Posted,
    Session,
    SessionExchange,
    chains_of_session,
    exchange_of,
    marks_in,
    prompts_of_session,
)
from service.errors import RewardConflict, SessionNotFound, SessionsFull
from service.store import session_rows
from service.store.session_rows import pack_exchange
from service.store.store import Store
from transport.request import TokenDetail
from workers.requests.tokens import RecordedTokens

S = "s-1"


def session(name: str = S, ttl_s: float = 60.0) -> Session:
    now = datetime.now(UTC)
    return Session(
        id=name,
        owner="ann",
        model=None,
        records=TokenDetail.LOGPROBS,
        max_staleness=2,
        ttl_s=ttl_s,
        created_at=now,
        expires_at=now + timedelta(seconds=ttl_s),
    )


def said(role: str, text: str) -> Posted:
    return {"role": role, "content": text}


async def add(store: Store, prompt: Sequence[int], ids: Sequence[int], texts: Sequence[str]) -> int:
    """Store an exchange with these ids; ``texts`` are its messages in turn, the answer last."""
    messages = [said("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
    asked = Asked(model="m", prompt=messages[:-1], answer=messages[-1], mode="raw")
    recorded = RecordedTokens(prompt=prompt, ids=ids, logprobs=[-0.5] * len(ids), params={"seed": 1})
    known = await store.read(session_rows.known_ends, S)
    packed = pack_exchange(exchange_of(known, recorded, asked))
    return await store.write(session_rows.add_exchange, session(), packed, marks_in(messages[:-1]))


async def exchanges(store: Store) -> list[SessionExchange]:
    return await store.read(session_rows.exchanges, S)


async def chains(store: Store) -> list[tuple[list[int], list[int], list[int]]]:
    found = chains_of_session(await store.read(session_rows.exchanges, S, has_messages=False))
    return [(chain.prompt, chain.completion, chain.mask) for chain in found]


async def test_a_session_is_found_until_it_expires_or_is_deleted(store: Store) -> None:
    """A use lets it live on; the release deletes what has expired, with its exchanges."""
    await store.write(session_rows.add, session())
    found = await store.read(session_rows.find_live, S)
    assert (found.owner, found.records, found.max_staleness) == ("ann", TokenDetail.LOGPROBS, 2)
    await store.write(session_rows.add, session("s-2", ttl_s=-1.0))
    with pytest.raises(SessionNotFound):
        await store.read(session_rows.find_live, "s-2")
    await store.write(session_rows.touch, session("s-2", ttl_s=60.0))
    assert (await store.read(session_rows.find_live, "s-2")).owner == "ann"
    await store.write(session_rows.touch, session("s-2", ttl_s=-1.0))
    assert await store.read(session_rows.has_expired)
    assert await store.write(session_rows.delete_expired) == 1
    assert not await store.read(session_rows.has_expired)
    await add(store, [1], [2], ["a", "b"])
    assert await store.read(session_rows.size) > 0
    await store.write(session_rows.delete, S)
    assert await store.read(session_rows.size) == 0
    with pytest.raises(SessionNotFound):
        await add(store, [1], [2], ["a", "b"])


async def test_an_exchange_stores_only_what_it_adds(store: Store) -> None:
    """Ids and messages of the exchange before are not stored again."""
    await store.write(session_rows.add, session())
    await add(store, [1, 2], [3], ["a", "b"])
    await add(store, [1, 2, 3, 4], [5, 6], ["a", "b", "c", "d"])
    await store.write(session_rows.make_certain, S, 2)
    one, two = await exchanges(store)
    assert one.tokens is not None
    assert two.tokens is not None
    assert (two.follows, two.tokens.prompt, [each["content"] for each in two.messages]) == (1, [4], ["c", "d"])
    assert await chains(store) == [([1, 2], [3, 4, 5, 6], [1, 0, 1, 1])]
    prompts = prompts_of_session([one, two])
    assert [each.content for each in prompts["request", 2][0]] == ["a", "b", "c"]


async def test_an_uncertain_exchange_is_left_out_until_it_is_repeated(store: Store) -> None:
    """By a prompt that goes on from its tokens, or by one that has its answer in other tokens."""
    await store.write(session_rows.add, session())
    await add(store, [1], [2], ["a", "b"])
    assert await chains(store) == []
    assert await store.read(session_rows.is_settling, S, 60.0)
    assert (await store.read(session_rows.counts, S)).uncertain == 1
    await add(store, [1, 2, 3], [4], ["a", "b", "c", "d"])
    assert await chains(store) == [([1], [2], [1])]
    await add(store, [9, 9], [5], ["a", "b", "c", " d ", "e", "f"])  # its template rewrites the past
    assert await chains(store) == [([1], [2, 3, 4], [1, 0, 1])]
    await store.write(session_rows.make_certain, S, 3)
    assert await chains(store) == [([1], [2, 3, 4], [1, 0, 1]), ([9, 9], [5], [1])]
    assert not await store.read(session_rows.is_settling, S, 60.0)


async def test_a_repeated_request_is_one_exchange(store: Store) -> None:
    """Its client heard nothing of the first answer: only the one that it goes on from becomes a row."""
    await store.write(session_rows.add, session())
    await add(store, [1], [2], ["a", "b"])
    second = await add(store, [1], [2], ["a", "b"])
    await store.write(session_rows.make_certain, S, second)
    await add(store, [1, 2, 3], [4], ["a", "b", "c", "d"])
    await store.write(session_rows.make_certain, S, 3)
    assert await chains(store) == [([1], [2, 3, 4], [1, 0, 1])]
    assert (await store.read(session_rows.counts, S)).uncertain == 1


async def test_what_was_written_is_in_one_chain(store: Store) -> None:
    """It goes on with the longest line; the other has what was before in its prompt."""
    await store.write(session_rows.add, session())
    for prompt, texts in (
        ([1], ["a", "b"]),
        ([1, 2, 3], ["a", "b", "c", "b"]),
        ([1, 2, 4], ["a", "b", "d", "b"]),
        ([1, 2, 4, 2, 5], ["a", "b", "d", "b", "e", "b"]),
    ):
        await store.write(session_rows.make_certain, S, await add(store, prompt, [2], texts))
    assert await chains(store) == [([1], [2, 4, 2, 5, 2], [1, 0, 1, 0, 1]), ([1, 2, 3], [2], [1])]
    await store.write(
        session_rows.make_certain, S, await add(store, [1, 2, 3, 2, 6], [2], ["a", "b", "c", "b", "f", "b"])
    )
    assert await chains(store) == [([1], [2, 4, 2, 5, 2], [1, 0, 1, 0, 1]), ([1, 2, 3], [2, 6, 2], [1, 0, 1])]


async def test_a_session_has_one_reward(store: Store) -> None:
    """The same again changes nothing."""
    await store.write(session_rows.add, session())
    reward = Reward(reward=0.0, metrics={"a": 1.0})
    assert await store.write(session_rows.put_reward, session(), reward)
    assert not await store.write(session_rows.put_reward, session(), reward)
    with pytest.raises(RewardConflict):
        await store.write(session_rows.put_reward, session(), Reward(reward=1.0))
    assert (await store.read(session_rows.counts, S)).reward == reward


async def test_sessions_and_exchanges_are_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has to be looked at."""
    monkeypatch.setattr(session_rows, "MOST_SESSIONS", 1)
    monkeypatch.setattr(session_rows, "MOST_EXCHANGES", 1)
    await store.write(session_rows.add, session())
    with pytest.raises(SessionsFull):
        await store.write(session_rows.add, session("s-2"))
    await store.read(session_rows.find_with_room, S)
    await add(store, [1], [2], ["a", "b"])
    with pytest.raises(SessionsFull):
        await store.read(session_rows.find_with_room, S)

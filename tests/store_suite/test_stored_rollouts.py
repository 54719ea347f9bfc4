"""Recorded tokens and rewards, as every store keeps them (specification, "Rows" and "Rewards")."""

import anyio
import pytest
from msgspec.structs import replace

from service.conversations.job.states import ConversationState
from service.conversations.record.rollout import Reward
from service.conversations.record.token_arrays import RecordedMessage, TurnTokens, pack
from service.errors import RewardConflict
from service.store import rollout_rows
from service.store.databases.database import Connection, value_of
from service.store.records import TurnEnded
from service.store.store import Store
from tests.harness.jobs import DEBATE, job
from tests.harness.stored import J, append, ended, moved, post

MESSAGE = RecordedMessage(
    begins_at=0,
    prompt=[1, 2],
    ids=[3],
    logprobs=[-0.5],
    versions=[],
    stop_reason="stop",
    params={"seed": 2**70},
    mode="raw",
)


def recorded(name: str) -> TurnEnded:
    fact = ended(name)
    return replace(fact, turn=replace(fact.turn, recorded=TurnTokens(tokens=1)), tokens=pack([MESSAGE]))


def count(connection: Connection) -> int:
    return sum(
        value_of(connection, f"SELECT count(*) FROM {table}")  # noqa: S608 - names of ours
        for table in ("turn_tokens", "rollouts", "rewards")
    )


async def test_tokens_are_stored_with_their_turn(store: Store) -> None:
    """A turn that was not recorded has none; the bytes of all are counted."""
    await post(store, job(*DEBATE))
    await append(store, recorded("a"), ended("b"))
    found = await store.read(rollout_rows.spoken, J, "c0")
    assert [turn.key.agent_id for turn, _ in found] == ["a", "b"]
    (tokens, none) = (each for _, each in found)
    assert tokens is not None
    assert (tokens.messages, none) == ([MESSAGE], None)
    assert await store.read(rollout_rows.size) == len(pack([MESSAGE]))


async def test_conversations_are_read_in_the_order_in_which_they_became_ready(store: Store) -> None:
    """Each has one number, however many readers let it be read at once."""
    await post(store, job(*DEBATE, conversations=3))
    assert await store.read(rollout_rows.unready, J) == []
    await append(store, moved(ConversationState.COMPLETED, "c1"), moved(ConversationState.FAILED, "c0"))
    assert await store.read(rollout_rows.unready, J) == ["c0", "c1"]
    async with anyio.create_task_group() as tasks:
        for names in (["c1"], ["c1", "c0"], ["c0"]):
            tasks.start_soon(store.write, rollout_rows.make_ready, J, names, {})
    assert await store.read(rollout_rows.unready, J) == []
    assert await store.read(rollout_rows.ready, J, 0, 10) == [(1, "c1"), (2, "c0")]
    assert await store.read(rollout_rows.ready, J, 1, 10) == [(2, "c0")]


async def test_a_reward_is_stored_once(store: Store) -> None:
    """Another one is refused; only one whose source has failed gives way."""
    await post(store, job(*DEBATE))
    given = Reward(reward=0.1, metrics={"m": 2.0})
    assert await store.write(rollout_rows.put_reward, (J, "c0", "a"), given)
    assert not await store.write(rollout_rows.put_reward, (J, "c0", "a"), given)
    with pytest.raises(RewardConflict):
        await store.write(rollout_rows.put_reward, (J, "c0", "a"), replace(given, reward=0.2))
    failed = {"c0": {"": Reward(error="broken"), "a": Reward(reward=9.0)}}
    await store.write(rollout_rows.make_ready, J, ["c0"], failed)
    assert await store.read(rollout_rows.rewards, J, "c0") == {"a": given, "": Reward(error="broken")}
    assert await store.write(rollout_rows.put_reward, (J, "c0", ""), Reward(reward=1.0))
    assert (await store.read(rollout_rows.rewards, J, "c0"))[""] == Reward(reward=1.0)


async def test_a_deleted_job_takes_tokens_and_rewards_along(store: Store) -> None:
    """Nothing of them is left."""
    await post(store, job(*DEBATE))
    await append(store, recorded("a"), moved(ConversationState.COMPLETED))
    await store.write(rollout_rows.make_ready, J, ["c0"], {"c0": {"": Reward(reward=1.0)}})
    assert await store.read(count) == 3
    await store.delete(J)
    assert await store.read(count) == 0

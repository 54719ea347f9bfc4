"""A clock that steps back: waits for callers last as long as configured (specification, "Turns of callers")."""

import pytest

from service.conversations.job.states import TurnState
from service.conversations.record.awaited_turn import AwaitedTurn
from service.store import awaited_turns
from service.store.awaited_turns import OpenTurn, Which
from service.store.records import TurnMoved
from service.store.store import Store
from tests.harness.jobs import DEBATE, job, key
from tests.harness.stored import NOW, J, append, post

DAYS = 24 * 3600.0
STEP = 30 * DAYS


async def awaited(store: Store) -> dict[str, OpenTurn]:
    return {each.key.agent_id: each for each in await store.read(awaited_turns.listed, Which(job_id=J), 0, 10)}


async def begin(store: Store, waits: dict[str, float | None]) -> dict[str, OpenTurn]:
    await post(store, job(*DEBATE))
    for name, wait_s in waits.items():
        demand = AwaitedTurn(role="guest", wait_s=wait_s)
        await append(store, TurnMoved(key=key(name), state=TurnState.AWAITED, worker=None, at=NOW, demand=demand))
    assert (await store.take_due()).turns == []
    return await awaited(store)


async def step_back(store: Store) -> None:
    """Make all stored times those of a clock that was set back by 30 days afterwards."""
    await store.write(lambda connection: connection.execute(f"UPDATE waits SET seen = seen + {STEP}"))  # noqa: S608
    await store.write(
        lambda connection: connection.execute(
            f"UPDATE awaited_turns SET since = since + {STEP}, until = until + {STEP}"  # noqa: S608
        )
    )


async def test_a_wait_keeps_its_length_after_a_clock_has_stepped_back(store: Store) -> None:
    """A machine without a clock battery learns the time late; a wait of 4 s must not last 30 days."""
    before = await begin(store, {"a": 600.0, "b": None})
    await step_back(store)
    assert (await store.take_due()).turns == []
    after = await awaited(store)
    for name in ("a", "b"):
        assert after[name].since == pytest.approx(before[name].since, abs=20)
    assert after["b"].until is None
    wait = after["a"]
    assert wait.until is not None
    assert wait.until - wait.since == pytest.approx(600.0, abs=20)


async def test_turns_awaited_after_the_step_are_not_moved_by_it(store: Store) -> None:
    """Their times are those of the present clock."""
    await begin(store, {"a": 600.0})
    await step_back(store)
    demand = AwaitedTurn(role="guest", wait_s=600.0)
    await append(store, TurnMoved(key=key("b"), state=TurnState.AWAITED, worker=None, at=NOW, demand=demand))
    begun = (await awaited(store))["b"]
    assert (await store.take_due()).turns == []
    assert (await awaited(store))["b"] == begun


async def test_a_clock_that_is_set_back_a_little_moves_waits_by_as_much(store: Store) -> None:
    """Steps of seconds are common, and would add up if they were ignored."""
    before = await begin(store, {"a": 600.0})
    for _ in range(3):
        await store.write(lambda connection: connection.execute("UPDATE waits SET seen = seen + 60"))
        await store.write(
            lambda connection: connection.execute("UPDATE awaited_turns SET since = since + 60, until = until + 60")
        )
        await store.take_due()
    assert (await awaited(store))["a"].until == pytest.approx(before["a"].until, abs=20)


async def test_a_turn_awaited_for_longer_than_the_step_is_moved_too(store: Store) -> None:
    """Its start is still in the past, but its wait would be longer by the step."""
    before = (await begin(store, {"a": 60 * DAYS}))["a"]
    ago = 40 * DAYS
    await store.write(lambda connection: connection.execute(f"UPDATE awaited_turns SET since = since - {ago}"))  # noqa: S608
    await step_back(store)
    await store.take_due()
    after = (await awaited(store))["a"]
    assert after.until == pytest.approx(before.until, abs=20)
    assert after.since == pytest.approx(before.since - ago, abs=20)

"""Usage as every store adds it up."""

from datetime import timedelta

from service.config.schema import StoreConfig
from service.conversations.job.states import ConversationState
from service.conversations.record.measures import UsageCounts
from service.conversations.record.transcript import Charges, UnfinishedTurn
from service.node.retention import release
from service.store import conversation_rows, usage
from service.store.news import FactsLost
from service.store.records import (
    RequestUsed,
    TurnRequeued,
)
from service.store.store import Store
from service.store.usage import UsageBy
from tests.harness.jobs import DEBATE, job, key
from tests.harness.stored import NOW, J, all_usage, append, ended, moved, new, post, used
from tests.harness.waiting import wait_until


async def test_usage_that_no_column_can_store_is_dropped_alone(store: Store) -> None:
    """An engine's report must not end a service: such a number is lost, and nothing beside it."""
    told: list[FactsLost] = []
    store.subscribe(lambda event: told.append(event) if isinstance(event, FactsLost) else None)
    await post(store, job(*DEBATE))
    await append(store, RequestUsed(used=used("a", 2**62)))
    await append(store, RequestUsed(used=used("b", 2**64)), ended("a", used=used("a", 2**62)), ended("b"))
    await append(store, RequestUsed(used=used("a", 7, day="2026-11-22")))
    await wait_until(lambda: told, "it is told")
    conversation = await store.read(conversation_rows.record, J, "c0", 0)
    assert [turn.key.agent_id for turn in conversation.turns] == ["a", "b"]
    assert sum(event.count for event in told) == 2
    assert not any(event.conversations for event in told)
    rows = await store.read(usage.report, [UsageBy.DAY], None, None, None, 10)
    assert [counts.prompt_tokens for _, counts in rows] == [2**62, 7]


async def test_usage_is_summed_by_the_requested_groups(store: Store) -> None:
    """By any of key, job, agent, model and day, between two days, for one key; it outlives the job."""
    await post(store, job(*DEBATE))
    so_far = UnfinishedTurn(key=key("a"), attempts=(), rejected=(), charges=Charges(), queued_at=NOW, started_at=NOW)
    wasted = (used()[0], UsageCounts(attempts=1, wasted_tokens=7, slot_s=1.5))
    await append(
        store,
        TurnRequeued(key=key("a"), so_far=so_far, worker="w", reason="r", detail="d", at=NOW, used=wasted),
        ended("a", used=used("a", 10)),
        ended("b", used=used("b", 20, day="2026-11-22", model="n")),
    )
    await append(store, ended("m", used=used("m", 40, by="")), moved(ConversationState.COMPLETED))
    await store.delete(J)
    ((_, total),) = await store.read(all_usage)
    assert total == UsageCounts(turns=3, attempts=4, prompt_tokens=70, answer_tokens=3, wasted_tokens=7, slot_s=3.0)

    async def prompts(
        *by: UsageBy, since: str | None = None, until: str | None = None, owner: str | None = None
    ) -> list[tuple[str | int, ...]]:
        rows = await store.read(usage.report, by, since, until, owner, 10)
        return [(*place.values(), counts.prompt_tokens) for place, counts in rows]

    assert await prompts(UsageBy.KEY) == [("", 40), ("alice", 30)]
    assert await prompts(UsageBy.MODEL, UsageBy.KEY) == [("m", "", 40), ("m", "alice", 10), ("n", "alice", 20)]
    assert await prompts(UsageBy.DAY, UsageBy.JOB) == [("2026-11-21", J, 50), ("2026-11-22", J, 20)]
    assert await prompts(UsageBy.AGENT, owner="alice") == [("a", 10), ("b", 20)]
    assert await prompts(UsageBy.AGENT, since="2026-11-22") == [("b", 20)]
    assert await prompts(UsageBy.AGENT, until="2026-11-21") == [("a", 10), ("m", 40)]
    assert await prompts(owner="bob") == [(0,)]
    assert len(await store.read(usage.report, [UsageBy.AGENT], None, None, None, 2)) == 2


async def test_a_refused_record_adds_no_usage(store: Store) -> None:
    """Another node runs the conversation by now, and counts its own ends."""
    await store.post(new(job(*DEBATE)), claims=False)
    await append(store, ended("a", used=used()))
    assert [counts.attempts for _, counts in await store.read(all_usage)] == [0]
    assert await store.claim(["m"], 10)
    await append(store, ended("a", used=used()))
    assert [counts.attempts for _, counts in await store.read(all_usage)] == [1]


async def test_usage_is_kept_for_the_configured_days(store: Store) -> None:
    """After one more day it is gone; null keeps it."""
    await post(store, job(*DEBATE))
    await append(store, *(ended(name, used=used(name, day=f"2026-11-2{day}")) for day, name in enumerate("abm", 1)))
    await release(store, StoreConfig(keep_usage_days=None), NOW + timedelta(days=9999))
    await release(store, StoreConfig(keep_usage_days=30), NOW + timedelta(days=31))
    kept = await store.read(usage.report, [UsageBy.DAY], None, None, None, 10)
    assert [place[UsageBy.DAY] for place, _ in kept] == ["2026-11-22", "2026-11-23"]

"""Promises of every store: in memory, in SQLite's file, in a real PostgreSQL."""

import anyio
import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId
from service.conversations.job.states import ConversationState, JobState, TurnState
from service.errors import IdempotencyConflict, JobNotFound, NotEnded, StoreError
from service.node import tallies as kept
from service.store import conversation_rows, event_rows, job_rows, turn_rows
from service.store.databases.database import Claim, Connection
from service.store.databases.postgres import PostgresDatabase
from service.store.records import (
    Tally,
)
from service.store.store import Store, open_store
from tests.harness.jobs import DEBATE, job
from tests.harness.stored import NOW, J, Maker, append, ended, moved, new, post, turn


async def test_a_posted_job_is_read_back(store: Store, committed: list[frozenset[JobId]]) -> None:
    """A job is durable when post returns, and its followers are notified."""
    stored, claims, is_new = await store.post(new(job(*DEBATE, rounds=2, conversations=3)), claims=True)
    assert is_new
    assert claims == [Claim(job_id=J, conversation_id=f"c{number}", fence=1) for number in range(3)]
    assert await store.read(job_rows.job, J) == stored
    assert (stored.state, stored.total_conversations, stored.total_turns) == (JobState.QUEUED, 3, 18)
    assert (stored.created_at, stored.started_at) == (NOW, None)
    assert await store.read(conversation_rows.states, J) == dict.fromkeys(("c0", "c1", "c2"), ConversationState.QUEUED)
    events, is_over = await store.read(event_rows.listed, J, 0, 9)
    assert ([(event.number, event.kind) for event in events], is_over) == ([(1, "job")], False)
    assert committed == [frozenset({J})]


async def test_conversations_and_heads_of_turns_are_listed(store: Store) -> None:
    """In the order of their job; for turns those that have ended since the last look, with the total."""
    await post(store, job(*DEBATE, rounds=2, conversations=4))
    await append(store, ended("a"), ended("b"), moved(ConversationState.RUNNING), moved(ConversationState.FAILED, "c3"))
    rows = await store.read(conversation_rows.listed, J)
    assert [(row.id, row.position, row.state) for row in rows] == [
        ("c0", 0, ConversationState.RUNNING),
        ("c1", 1, ConversationState.QUEUED),
        ("c2", 2, ConversationState.QUEUED),
        ("c3", 3, ConversationState.FAILED),
    ]
    heads, total = await store.read(turn_rows.heads, J, -1)
    assert ([turn.key.agent_id for _, turn in heads], total) == (["a", "b"], 2)
    later, total = await store.read(turn_rows.heads, J, heads[0][0])
    assert ([turn.key.agent_id for _, turn in later], total) == (["b"], 2)


async def test_a_conversation_is_read_from_a_turn_on(store: Store) -> None:
    """Ended turns keep their places, so a client that has some asks for the rest."""
    await post(store, job(*DEBATE))
    await append(store, ended("a"), ended("b"))
    for after, names in ((0, ["a", "b"]), (1, ["b"]), (2, []), (9, [])):
        conversation = await store.read(conversation_rows.record, J, "c0", after)
        assert [turn.key.agent_id for turn in conversation.turns] == names


async def test_jobs_are_counted_only_when_needed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended job is counted once. A running one is counted for each request, and rarely for a list."""
    counted: list[JobId] = []
    count = job_rows.tally

    def counting(connection: Connection, job_id: JobId) -> Tally:
        counted.append(job_id)
        return count(connection, job_id)

    monkeypatch.setattr(job_rows, "tally", counting)
    monkeypatch.setattr(kept, "REST", 1e6)
    stored, tallies = await post(store, job(*DEBATE)), kept.Tallies(store)
    for _ in range(3):
        assert (await tallies.recent(stored)).turns == {}
    assert len(counted) == 1
    for times in (2, 3):
        assert (await tallies.now(stored)).turns == {}
        assert len(counted) == times
    await append(store, ended("a"))
    over = replace(stored, state=JobState.COMPLETED)
    for _ in range(3):
        assert (await tallies.recent(over)).turns == {TurnState.COMPLETED: 1}
        assert (await tallies.now(over)).turns == {TurnState.COMPLETED: 1}
    assert len(counted) == 4
    monkeypatch.setattr(kept, "REST", 0.0)
    fresh = kept.Tallies(store)
    for _ in range(3):
        await fresh.recent(stored)
    assert len(counted) == 7


async def test_an_idempotency_key_names_one_job(store: Store) -> None:
    """Idempotency is decided by the writer, so two posts at once cannot both win."""
    first = await post(store, job(*DEBATE, name="one"), "k")
    assert await store.post(new(job(*DEBATE, name="two"), "k"), claims=True) == (first, [], False)
    with pytest.raises(IdempotencyConflict):
        await post(store, job(*DEBATE, name="three"), "k", body_hash="other")
    assert len(await store.read(job_rows.listed, None, 10, None)) == 1


async def test_an_idempotency_key_is_free_again_after_its_retention(store: Store) -> None:
    """It is kept for a configured time; the job that used it stays."""
    await store.post(new(job(*DEBATE, name="one"), "k", kept_s=-1), claims=True)
    assert await store.read(job_rows.by_key, "k", "h", NOW) is None
    assert (await store.post(new(job(*DEBATE, name="two"), "k", body_hash="other"), claims=True))[2]
    assert len(await store.read(job_rows.listed, None, 10, None)) == 2


@pytest.mark.parametrize(
    ("ends", "is_cancelled", "state"),
    [
        (["completed", "completed"], False, JobState.COMPLETED),
        (["completed", "failed"], False, JobState.COMPLETED_WITH_FAILURES),
        (["failed", "failed"], False, JobState.FAILED),
        (["completed", "cancelled"], True, JobState.CANCELLED),
    ],
)
async def test_a_job_ends_with_its_last_conversation(
    store: Store, ends: list[str], is_cancelled: bool, state: JobState
) -> None:
    """Whichever node runs that one: the store counts."""
    await post(store, job(*DEBATE, conversations=2))
    await append(store, moved(ConversationState.RUNNING))
    if is_cancelled:
        await store.request_cancel(J)
        assert await store.read(job_rows.to_cancel) == [J]
    await append(store, moved(ConversationState(ends[0])))
    assert (await store.read(job_rows.job, J)).state is JobState.RUNNING
    await append(store, moved(ConversationState(ends[1]), "c1"))
    assert (await store.read(job_rows.job, J)).state is state
    assert await store.read(job_rows.to_cancel) == []


async def test_only_an_ended_job_is_deleted_and_whole(store: Store) -> None:
    """DELETE removes everything of a job, and of no other."""
    for name in ("j", "k"):
        await post(store, job(*DEBATE, name=name), name)
    await append(store, ended("a"))
    with pytest.raises(NotEnded):
        await store.delete(J)
    await append(store, moved(ConversationState.FAILED))
    await store.delete(J)
    for query, place in ((job_rows.job, ()), (event_rows.listed, (0, 9)), (conversation_rows.record, ("c0",))):
        with pytest.raises(JobNotFound):
            await store.read(query, J, *place)
    assert await store.read(turn_rows.ended, J, ["c0"]) == []
    assert len(await store.read(job_rows.listed, None, 10, None)) == 1
    assert (await store.post(new(job(*DEBATE), "j"), claims=True))[2]


async def test_a_cancel_is_durable_and_changes_no_ended_job(store: Store) -> None:
    """It must survive a restart."""
    await post(store, job(*DEBATE))
    await store.request_cancel(J)
    assert (await store.read(job_rows.job, J)).is_cancel_requested
    with pytest.raises(JobNotFound):
        await store.request_cancel(JobId("none"))


async def test_many_writers_at_once_are_all_written(store: Store) -> None:
    """Groups commit together, and each writer gets its own answer."""
    results: list[tuple[str, bool]] = []

    async def post_one(number: int) -> None:
        stored, _, is_new = await store.post(new(job(*DEBATE, name=f"j{number}"), f"k{number % 50}"), claims=True)
        results.append((stored.id, is_new))

    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(post_one, number)
    assert sum(is_new for _, is_new in results) == 50
    assert len(await store.read(job_rows.listed, None, 1000, None)) == 50
    numbers = [stored.number for stored in await store.read(job_rows.listed, JobState.QUEUED, 1000, None)]
    assert numbers == sorted(set(numbers), reverse=True)
    assert len(await store.read(job_rows.listed, None, 1000, numbers[20])) == 29


async def test_the_next_start_claims_unfinished_work(make_database: Maker) -> None:
    """Nothing is lost, the fence has grown, and late writes of the earlier process are refused."""
    database = make_database()
    with open_store(database) as store:
        await post(store, job(*DEBATE, conversations=2))
        store.append_nowait([ended("a"), moved(ConversationState.COMPLETED, "c1")], lambda: None)
        await store.flush()
        if isinstance(database, PostgresDatabase):
            await store.write(lambda connection: connection.execute("UPDATE conversations SET owner = NULL"))
        else:
            await store.write(lambda connection: connection.execute("UPDATE conversations SET owner = 'dead'"))
    with open_store(make_database()) as store:
        (claim,) = await store.claim(["m"], 10)
        assert (claim.conversation_id, claim.fence) == ("c0", 2)
        assert await store.claim(["m"], 10) == []
        assert await store.read(turn_rows.ended, J, ["c0"]) == [turn("a")]
        await append(store, ended("b"))


async def test_records_of_conversations_without_a_claim_are_refused(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """For a conversation that was released or never claimed nothing is written, and the log says so."""
    await store.post(new(job(*DEBATE, conversations=2)), claims=False)
    await append(store, ended("a"))
    assert await store.read(turn_rows.ended, J, ["c0"]) == []
    assert "a late result of a in round 0, completed" in caplog.text
    assert len(await store.claim(["m"], 10)) == 2
    store.release_nowait({(J, "c0"): ["m"]})
    await append(store, ended("a"))
    assert await store.read(turn_rows.ended, J, ["c0"]) == []
    (again,) = await store.claim(["m"], 10)
    assert (again.conversation_id, again.fence) == ("c0", 2)
    await append(store, ended("a"))
    assert len(await store.read(turn_rows.ended, J, ["c0"])) == 1


async def test_a_job_claimed_as_it_is_posted_is_claimed_once(store: Store) -> None:
    """A post that claims and a claim of everything may be written together. No conversation is admitted twice."""
    claims: list[Claim] = []

    async def post_one(number: int) -> None:
        claims.extend((await store.post(new(job(*DEBATE, name=f"j{number}")), claims=True))[1])

    async def take() -> None:
        claims.extend(await store.claim(["m"], 1000))

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(post_one, number)
            tasks.start_soon(take)
    assert len(claims) == 50
    assert len(set(claims)) == 50


async def test_a_write_that_fails_leaves_the_rest_of_its_group_written(store: Store) -> None:
    """One caller's operation fails; the others of the group are written, and the store goes on."""

    def spoil(connection: Connection) -> None:
        connection.execute("INSERT INTO jobs (id) VALUES ('without anything else')")

    failed: list[str] = []

    async def ask() -> None:
        try:
            await store.write(spoil)
        except StoreError as error:
            failed.append(str(error))

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(ask)
            tasks.start_soon(post, store, job(*DEBATE, name=f"j{number}"))
    assert len(failed) == 20
    assert len(await store.read(job_rows.listed, None, 100, None)) == 20

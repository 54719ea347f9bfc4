"""What every store promises; today there is one."""

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from service.conversations.job import Job, JobId
from service.conversations.states import ConversationState, JobState, TurnState
from service.conversations.transcript import Attempt, TokenUsage, Turn, UnfinishedTurn
from service.errors import IdempotencyConflict, JobNotFound, NotEnded, StoreError
from service.store import reading
from service.store.records import ConversationMoved, JobMoved, NewJob, TurnEnded, TurnMoved, TurnRequeued
from service.store.sqlite import FILE_NAME, SqliteStore, open_store
from tests.unit.service.jobs import DEBATE, job, key
from tests.waiting import LIMIT_S

NOW = datetime(2026, 11, 21, 9, 30, 0, 123456, tzinfo=UTC)


@pytest.fixture
async def committed() -> list[frozenset[JobId]]:
    return []


@pytest.fixture
async def store(tmp_path: Path, committed: list[frozenset[JobId]]) -> Iterator[SqliteStore]:  # type: ignore[misc]
    with open_store(tmp_path, committed.append) as opened:
        yield opened


def new(made: Job, idempotency_key: str | None = None, body_hash: str = "h") -> NewJob:
    return NewJob(job=made, document="{}", body_hash=body_hash, idempotency_key=idempotency_key, created_at=NOW)


def turn(name: str, state: TurnState = TurnState.COMPLETED, text: str = "é\u2028") -> Turn:
    attempt = Attempt(
        outcome=state, reason=None, detail=None, text=text, worker="w", incarnation=2, started_at=NOW, finished_at=NOW
    )
    return Turn(
        key=key(name),
        state=state,
        text=text,
        attempts=(attempt,),
        usage=TokenUsage(prompt_tokens=1, completion_tokens=2, cached_tokens=0),
        worker="w",
        incarnation=2,
        queued_at=NOW,
        started_at=NOW,
        first_token_at=None,
        finished_at=NOW,
    )


async def append(store: SqliteStore, *records: object) -> None:
    done = anyio.Event()
    store.append_nowait(records, done.set)  # type: ignore[arg-type]
    with anyio.fail_after(LIMIT_S):
        await done.wait()


async def test_what_is_posted_is_read(store: SqliteStore, committed: list[frozenset[JobId]]) -> None:
    """A job is durable when post returns, and whoever follows it is woken."""
    stored, is_new = await store.post(new(job(*DEBATE, rounds=2, conversations=3)))
    assert is_new
    assert await store.read(reading.job(JobId("j"))) == stored
    assert (stored.state, stored.total_conversations, stored.total_turns) == (JobState.QUEUED, 3, 18)
    assert (stored.created_at, stored.started_at) == (NOW, None)
    assert await store.read(reading.conversation_states(JobId("j"))) == dict.fromkeys(
        ("c0", "c1", "c2"), ConversationState.QUEUED
    )
    events, is_over = await store.read(reading.events(JobId("j"), 0, 9))
    assert ([(event.number, event.kind) for event in events], is_over) == ([(1, "job")], False)
    assert committed == [frozenset({JobId("j")})]


async def test_a_key_is_one_job(store: SqliteStore) -> None:
    """Idempotency is decided by the writer, so two posts at once cannot both win."""
    first, _ = await store.post(new(job(*DEBATE, name="one"), "k"))
    assert await store.post(new(job(*DEBATE, name="two"), "k")) == (first, False)
    with pytest.raises(IdempotencyConflict):
        await store.post(new(job(*DEBATE, name="three"), "k", body_hash="other"))
    assert len(await store.read(reading.jobs(None, 10, None))) == 1


async def test_a_turn_comes_back_as_it_was_and_only_once(store: SqliteStore) -> None:
    """A result is recorded exactly once: the second is refused with all that came with it, and the store fails."""
    await store.post(new(job(*DEBATE)))
    await append(store, TurnEnded(turn=turn("a"), at=NOW), TurnEnded(turn=turn("m", TurnState.FAILED), at=NOW))
    assert await store.read(reading.turns(JobId("j"))) == [turn("a"), turn("m", TurnState.FAILED)]
    talk = await store.read(reading.conversation(JobId("j"), "c0"))
    assert talk.turns == (turn("a"), turn("m", TurnState.FAILED))
    tally = await store.read(reading.tally(JobId("j")))
    assert tally.turns == {TurnState.COMPLETED: 1, TurnState.FAILED: 1}
    moved = JobMoved(job_id=JobId("j"), state=JobState.COMPLETED, at=NOW)
    durable: list[bool] = []
    store.append_nowait([moved, TurnEnded(turn=turn("a", text="another"), at=NOW)], lambda: durable.append(True))
    with pytest.raises(StoreError, match="UNIQUE"), anyio.fail_after(LIMIT_S):
        await store.wait_failed()
    assert (await store.read(reading.job(JobId("j")))).state is JobState.QUEUED
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.flush()
    assert durable == []


async def test_facts_are_applied_in_order_and_told_once(store: SqliteStore) -> None:
    """Events are numbered without a gap, and a state that is there already is no event."""
    await store.post(new(job(*DEBATE)))
    at = {"job_id": JobId("j"), "at": NOW}
    running = JobMoved(state=JobState.RUNNING, **at)  # type: ignore[arg-type]
    ended = ConversationMoved(conversation_id="c0", state=ConversationState.COMPLETED, reason=None, **at)  # type: ignore[arg-type]
    moved = TurnMoved(key=key("a"), state=TurnState.IN_FLIGHT, worker="w", at=NOW)
    await append(store, running, running, moved, ended, ended)
    await append(store, JobMoved(state=JobState.COMPLETED, **at))  # type: ignore[arg-type]
    events, is_over = await store.read(reading.events(JobId("j"), 0, 99))
    assert is_over
    assert [(event.number, event.kind) for event in events] == [
        (1, "job"),
        (2, "job"),
        (3, "turn"),
        (4, "conversation"),
        (5, "end"),
    ]
    assert await store.read(reading.events(JobId("j"), 3, 1)) == (events[3:4], False)
    assert await store.read(reading.events(JobId("j"), 5, 1)) == ([], True)
    stored = await store.read(reading.job(JobId("j")))
    assert (stored.state, stored.started_at, stored.finished_at) == (JobState.COMPLETED, NOW, NOW)
    assert await store.read(reading.unfinished_jobs()) == []


async def test_only_an_ended_job_is_deleted_and_whole(store: SqliteStore) -> None:
    """DELETE releases everything of a job, and of no other."""
    for name in ("j", "k"):
        await store.post(new(job(*DEBATE, name=name), name))
    await append(store, TurnEnded(turn=turn("a"), at=NOW))
    with pytest.raises(NotEnded):
        await store.delete(JobId("j"))
    await append(store, JobMoved(job_id=JobId("j"), state=JobState.FAILED, at=NOW))
    await store.delete(JobId("j"))
    for query in (reading.job(JobId("j")), reading.events(JobId("j"), 0, 9), reading.conversation(JobId("j"), "c0")):
        with pytest.raises(JobNotFound):
            await store.read(query)
    assert await store.read(reading.turns(JobId("j"))) == []
    assert len(await store.read(reading.jobs(None, 10, None))) == 1
    assert (await store.post(new(job(*DEBATE), "j")))[1]


async def test_a_cancel_is_durable_and_changes_no_ended_job(store: SqliteStore) -> None:
    """The next life must know of it."""
    await store.post(new(job(*DEBATE)))
    await store.request_cancel(JobId("j"))
    assert (await store.read(reading.job(JobId("j")))).is_cancel_requested
    with pytest.raises(JobNotFound):
        await store.request_cancel(JobId("none"))


async def test_many_writers_at_once_are_all_written(store: SqliteStore) -> None:
    """Groups commit together, and each gets its own answer."""
    results: list[tuple[str, bool]] = []

    async def post(number: int) -> None:
        stored, is_new = await store.post(new(job(*DEBATE, name=f"j{number}"), f"k{number % 50}"))
        results.append((stored.id, is_new))

    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(post, number)
    assert sum(is_new for _, is_new in results) == 50
    assert len(await store.read(reading.jobs(None, 1000, None))) == 50


async def test_what_was_written_is_there_in_the_next_life(tmp_path: Path) -> None:
    """A clean close and a new open lose nothing."""
    with open_store(tmp_path, lambda _jobs: None) as store:
        await store.post(new(job(*DEBATE)))
        store.append_nowait([TurnEnded(turn=turn("a"), at=NOW)], lambda: None)
    with open_store(tmp_path, lambda _jobs: None) as store:
        assert [stored.id for stored in await store.read(reading.unfinished_jobs())] == ["j"]
        assert await store.read(reading.turns(JobId("j"))) == [turn("a")]


async def test_a_store_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    """Another owner, a newer version, a file that is no database, a folder that cannot be made."""
    first, second = open_store(tmp_path, lambda _jobs: None), open_store(tmp_path, lambda _jobs: None)
    with first, pytest.raises(StoreError, match="another Roundhouse"), second:
        pass
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="of version 99"), open_store(tmp_path, lambda _jobs: None):
        pass
    (tmp_path / FILE_NAME).write_bytes(b"this is no database at all, whatever its name says" * 100)
    with pytest.raises(StoreError, match="not a database"), open_store(tmp_path, lambda _jobs: None):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"), open_store(tmp_path / "file" / "state", lambda _jobs: None):
        pass


async def test_what_a_turn_has_behind_it_outlives_us(store: SqliteStore) -> None:
    """The newest stands, and goes with the turn's end."""
    await store.post(new(job(*DEBATE)))
    attempt = turn("a", TurnState.FAILED).attempts[0]

    def requeued(*attempts: Attempt) -> TurnRequeued:
        so_far = UnfinishedTurn(
            key=key("a"), attempts=attempts, rejected=(("maybe", "why"),), deaths=1, failures=0,
            queued_at=NOW, started_at=NOW,
        )  # fmt: skip
        return TurnRequeued(key=key("a"), so_far=so_far, worker="w", reason="engine_died", detail="d", at=NOW)

    first, second = requeued(attempt), requeued(attempt, attempt)
    await append(store, first, second)
    assert await store.read(reading.unfinished_turns(JobId("j"))) == [second.so_far]
    await append(store, TurnEnded(turn=turn("a", TurnState.FAILED), at=NOW))
    assert await store.read(reading.unfinished_turns(JobId("j"))) == []

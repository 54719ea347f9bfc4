"""What every store promises: in memory, in SQLite's file, in a real PostgreSQL."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import anyio
import pytest

from service.config.schema import StoreConfig
from service.conversations.charges import Charges
from service.conversations.job import Job, JobId
from service.conversations.measures import UsageCounts
from service.conversations.states import ConversationState, JobState, TurnState
from service.conversations.transcript import Attempt, TokenUsage, Turn, UnfinishedTurn
from service.errors import IdempotencyConflict, JobNotFound, NotEnded, StoreError
from service.node import tallies as kept
from service.node.retention import release
from service.store import queries, usage
from service.store.databases.database import Claim, Connection, Database
from service.store.databases.memory import MemoryDatabase
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.news import FactsLost, JobsCommitted
from service.store.records import (
    ConversationMoved,
    NewJob,
    Record,
    RequestUsed,
    StoredJob,
    StoredToolCall,
    Tally,
    ToolCallEnded,
    ToolCallStarted,
    TurnEnded,
    TurnMoved,
    TurnRequeued,
    UsageKey,
    Used,
)
from service.store.store import Store, open_store
from service.store.turn_times import TURNS_A_PAGE, After, ended_turns, unfinished_turns_of_job
from service.store.usage import UsageBy
from service.timeline.spans import TurnTimes, times_of
from tests.harness.jobs import DEBATE, job, key
from tests.harness.waiting import LIMIT_S, wait_until

NOW = datetime(2026, 11, 21, 9, 30, 0, 123456, tzinfo=UTC)
J = JobId("j")
Maker = Callable[[], Database]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Maker]:
    """Return what opens the same database each time, as each life of the service does."""
    if request.param == "postgres":
        url = request.getfixturevalue("postgres").new_database()

    def make() -> Database:
        database: SqliteDatabase | PostgresDatabase = (
            SqliteDatabase(tmp_path / FILE_NAME) if request.param == "sqlite" else PostgresDatabase(url, 5.0, ["m"])
        )
        database.prepare()
        return database

    if request.param != "memory":
        yield make
        return
    with closing(MemoryDatabase()) as only:
        only.prepare()
        yield lambda: only


@pytest.fixture
async def committed() -> list[frozenset[JobId]]:
    return []


@pytest.fixture
async def store(make_database: Maker, committed: list[frozenset[JobId]]) -> Iterator[Store]:  # type: ignore[misc]
    with open_store(make_database()) as opened:
        opened.subscribe(lambda event: committed.append(event.job_ids) if isinstance(event, JobsCommitted) else None)
        yield opened


def new(made: Job, idempotency_key: str | None = None, body_hash: str = "h", kept_s: float = 1e6) -> NewJob:
    return NewJob(
        job=made,
        document="{}",
        body_hash=body_hash,
        idempotency_key=idempotency_key,
        created_at=NOW,
        key_until=NOW + timedelta(seconds=kept_s),
    )


async def post(store: Store, made: Job, idempotency_key: str | None = None, body_hash: str = "h") -> StoredJob:
    stored, _, _ = await store.post(new(made, idempotency_key, body_hash), claims=True)
    return stored


def turn(name: str, state: TurnState = TurnState.COMPLETED, text: str = "é\u2028\0", number: int = 0) -> Turn:
    attempt = Attempt(
        outcome=state, reason=None, detail=None, text=text, worker="w", incarnation=2, started_at=NOW, finished_at=NOW
    )
    return Turn(
        key=key(name, 0, number),
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


def ended(
    name: str, state: TurnState = TurnState.COMPLETED, text: str = "é\u2028\0", used: Used | None = None
) -> TurnEnded:
    return TurnEnded(turn=turn(name, state, text), at=NOW, used=used)


def used(agent: str = "a", tokens: int = 10, *, by: str = "alice", day: str = "2026-11-21", model: str = "m") -> Used:
    place = UsageKey(day=day, key_name=by, job_id=J, agent=agent, model=model)
    return place, UsageCounts(turns=1, attempts=1, prompt_tokens=tokens, answer_tokens=1, slot_s=0.5)


def moved(state: ConversationState, conversation: str = "c0", name: str = "j") -> ConversationMoved:
    return ConversationMoved(job_id=JobId(name), conversation_id=conversation, state=state, reason=None, at=NOW)


def requeued(name: str, number: int) -> TurnRequeued:
    attempt = Attempt(
        outcome=TurnState.FAILED, reason="engine_died", detail=None, text="half", worker="w", incarnation=1,
        started_at=NOW, finished_at=NOW,
    )  # fmt: skip
    so_far = UnfinishedTurn(
        key=key(name, 0, number), attempts=(attempt,), rejected=(), charges=Charges(), queued_at=NOW, started_at=NOW
    )
    return TurnRequeued(key=so_far.key, so_far=so_far, worker="w", reason="engine_died", detail="", at=NOW)


async def append(store: Store, *records: Record) -> None:
    done = anyio.Event()
    store.append_nowait(records, done.set)
    with anyio.fail_after(LIMIT_S):
        await done.wait()


async def test_what_is_posted_is_read(store: Store, committed: list[frozenset[JobId]]) -> None:
    """A job is durable when post returns, and whoever follows it is woken."""
    stored, claims, is_new = await store.post(new(job(*DEBATE, rounds=2, conversations=3)), claims=True)
    assert is_new
    assert claims == [Claim(job_id=J, conversation_id=f"c{number}", fence=1) for number in range(3)]
    assert await store.read(queries.job(J)) == stored
    assert (stored.state, stored.total_conversations, stored.total_turns) == (JobState.QUEUED, 3, 18)
    assert (stored.created_at, stored.started_at) == (NOW, None)
    assert await store.read(queries.conversation_states(J)) == dict.fromkeys(
        ("c0", "c1", "c2"), ConversationState.QUEUED
    )
    events, is_over = await store.read(queries.events(J, 0, 9))
    assert ([(event.number, event.kind) for event in events], is_over) == ([(1, "job")], False)
    assert committed == [frozenset({J})]


async def test_an_account_that_cannot_be_costs_itself(store: Store) -> None:
    """What an engine tells must not end a service: a number that no column holds is lost, and nothing beside it."""
    told: list[FactsLost] = []
    store.subscribe(lambda event: told.append(event) if isinstance(event, FactsLost) else None)
    await post(store, job(*DEBATE))
    await append(store, RequestUsed(used=used("a", 2**62)))
    await append(store, RequestUsed(used=used("b", 2**64)), ended("a", used=used("a", 2**62)), ended("b"))
    await append(store, RequestUsed(used=used("a", 7, day="2026-11-22")))
    await wait_until(lambda: told, "it is told")
    conversation = await store.read(queries.conversation(J, "c0", 0))
    assert [turn.key.agent_id for turn in conversation.turns] == ["a", "b"]
    assert sum(event.count for event in told) == 2
    assert not any(event.conversations for event in told)
    rows = await store.read(usage.report([UsageBy.DAY], None, None, None, 10))
    assert [counts.prompt_tokens for _, counts in rows] == [2**62, 7]


async def test_a_turn_that_cannot_be_written_ends_its_conversation(store: Store) -> None:
    """Nothing is stored after a fact that is missing; other conversations go on, and so does the store."""
    told: list[FactsLost] = []
    store.subscribe(lambda event: told.append(event) if isinstance(event, FactsLost) else None)
    await post(store, job(*DEBATE, conversations=2))
    await append(store, ended("a"))
    broken = replace(ended("b"), turn=replace(turn("b"), reason=cast("str", object())))
    await append(store, broken, ended("m"), TurnEnded(turn=turn("a", number=1), at=NOW))
    await wait_until(lambda: told, "it is told")
    assert [event.conversations for event in told] == [((J, "c0"),)]
    spoiled, other = [await store.read(queries.conversation(J, name, 0)) for name in ("c0", "c1")]
    assert [(each.key.agent_id, each.state, each.reason) for each in spoiled.turns] == [
        ("a", TurnState.COMPLETED, None),
        ("b", TurnState.FAILED, "internal"),
    ]
    assert (spoiled.state, spoiled.reason) == (ConversationState.FAILED, "internal")
    assert [each.key.agent_id for each in other.turns] == ["a"]
    assert not await store.append([ended("m")])
    await append(store, moved(ConversationState.COMPLETED, "c1"))
    assert (await store.read(queries.job(J))).state is JobState.COMPLETED_WITH_FAILURES


async def test_conversations_are_listed_in_pages(store: Store) -> None:
    """In the order of their job, from a place on, all or those in one state, with how many of their turns ended."""
    await post(store, job(*DEBATE, rounds=2, conversations=5))
    await append(store, ended("a"), ended("b"), moved(ConversationState.RUNNING), moved(ConversationState.FAILED, "c3"))
    rows = await store.read(queries.conversation_rows(J, None, -1, 3))
    assert [(row.id, row.position, row.state, row.ended_turns) for row in rows] == [
        ("c0", 0, ConversationState.RUNNING, 2),
        ("c1", 1, ConversationState.QUEUED, 0),
        ("c2", 2, ConversationState.QUEUED, 0),
    ]
    rows = await store.read(queries.conversation_rows(J, None, rows[-1].position, 3))
    assert [row.id for row in rows] == ["c3", "c4"]
    rows = await store.read(queries.conversation_rows(J, ConversationState.FAILED, -1, 3))
    assert [(row.id, row.position) for row in rows] == [("c3", 3)]


async def test_a_conversation_is_read_from_a_turn_on(store: Store) -> None:
    """Ended turns keep their places, so who has read some asks for the rest."""
    await post(store, job(*DEBATE))
    await append(store, ended("a"), ended("b"))
    for after, names in ((0, ["a", "b"]), (1, ["b"]), (2, []), (9, [])):
        conversation = await store.read(queries.conversation(J, "c0", after))
        assert [turn.key.agent_id for turn in conversation.turns] == names


async def test_a_job_is_counted_no_more_often_than_that_is_worth(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is counted once. What goes on is counted anew for who asks for it, and rarely for a list."""
    counted: list[JobId] = []
    count = queries.tally

    def counting(job_id: JobId) -> queries.Query[Tally]:
        counted.append(job_id)
        return count(job_id)

    monkeypatch.setattr(queries, "tally", counting)
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


async def test_a_key_is_one_job(store: Store) -> None:
    """Idempotency is decided by the writer, so two posts at once cannot both win."""
    first = await post(store, job(*DEBATE, name="one"), "k")
    assert await store.post(new(job(*DEBATE, name="two"), "k"), claims=True) == (first, [], False)
    with pytest.raises(IdempotencyConflict):
        await post(store, job(*DEBATE, name="three"), "k", body_hash="other")
    assert len(await store.read(queries.jobs(None, 10, None))) == 1


async def test_a_key_is_free_again_after_its_time(store: Store) -> None:
    """It is kept for a configured time; the job that had it stays."""
    await store.post(new(job(*DEBATE, name="one"), "k", kept_s=-1), claims=True)
    assert await store.read(queries.job_by_key("k", "h", NOW)) is None
    assert (await store.post(new(job(*DEBATE, name="two"), "k", body_hash="other"), claims=True))[2]
    assert len(await store.read(queries.jobs(None, 10, None))) == 2


async def test_a_turn_comes_back_as_it_was_and_only_once(store: Store) -> None:
    """A result is recorded exactly once: the second is refused, and its conversation ends where it is."""
    await post(store, job(*DEBATE))
    await append(store, ended("a"), ended("m", TurnState.FAILED))
    assert await store.read(queries.turns(J, ["c0"])) == [turn("a"), turn("m", TurnState.FAILED)]
    talk = await store.read(queries.conversation(J, "c0"))
    assert talk.turns == (turn("a"), turn("m", TurnState.FAILED))
    tally = await store.read(queries.tally(J))
    assert tally.turns == {TurnState.COMPLETED: 1, TurnState.FAILED: 1}
    assert not await store.append([moved(ConversationState.RUNNING), ended("a", text="another")])
    talk = await store.read(queries.conversation(J, "c0"))
    assert (talk.state, talk.reason) == (ConversationState.FAILED, "internal")
    assert talk.turns == (turn("a"), turn("m", TurnState.FAILED))


async def test_facts_are_applied_in_order_and_told_once(store: Store) -> None:
    """Events are numbered without a gap, and a state that is there already is no event."""
    await post(store, job(*DEBATE))
    in_flight = TurnMoved(key=key("a"), state=TurnState.IN_FLIGHT, worker="w", at=NOW)
    running, completed = moved(ConversationState.RUNNING), moved(ConversationState.COMPLETED)
    await append(store, running, running, in_flight, completed)
    events, is_over = await store.read(queries.events(J, 0, 99))
    assert is_over
    assert [(event.number, event.kind) for event in events] == [
        (1, "job"),
        (2, "job"),
        (3, "conversation"),
        (4, "turn"),
        (5, "conversation"),
        (6, "end"),
    ]
    assert await store.read(queries.events(J, 3, 1)) == (events[3:4], False)
    assert await store.read(queries.events(J, 6, 1)) == ([], True)
    stored = await store.read(queries.job(J))
    assert (stored.state, stored.started_at, stored.finished_at) == (JobState.COMPLETED, NOW, NOW)


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
    """Whichever node that runs on: the store counts."""
    await post(store, job(*DEBATE, conversations=2))
    await append(store, moved(ConversationState.RUNNING))
    if is_cancelled:
        await store.request_cancel(J)
        assert await store.read(queries.to_cancel()) == [J]
    await append(store, moved(ConversationState(ends[0])))
    assert (await store.read(queries.job(J))).state is JobState.RUNNING
    await append(store, moved(ConversationState(ends[1]), "c1"))
    assert (await store.read(queries.job(J))).state is state
    assert await store.read(queries.to_cancel()) == []


async def test_only_an_ended_job_is_deleted_and_whole(store: Store) -> None:
    """DELETE releases everything of a job, and of no other."""
    for name in ("j", "k"):
        await post(store, job(*DEBATE, name=name), name)
    await append(store, ended("a"))
    with pytest.raises(NotEnded):
        await store.delete(J)
    await append(store, moved(ConversationState.FAILED))
    await store.delete(J)
    for query in (queries.job(J), queries.events(J, 0, 9), queries.conversation(J, "c0")):
        with pytest.raises(JobNotFound):
            await store.read(query)
    assert await store.read(queries.turns(J, ["c0"])) == []
    assert len(await store.read(queries.jobs(None, 10, None))) == 1
    assert (await store.post(new(job(*DEBATE), "j"), claims=True))[2]


async def test_a_cancel_is_durable_and_changes_no_ended_job(store: Store) -> None:
    """The next life must know of it."""
    await post(store, job(*DEBATE))
    await store.request_cancel(J)
    assert (await store.read(queries.job(J))).is_cancel_requested
    with pytest.raises(JobNotFound):
        await store.request_cancel(JobId("none"))


async def test_many_writers_at_once_are_all_written(store: Store) -> None:
    """Groups commit together, and each gets its own answer."""
    results: list[tuple[str, bool]] = []

    async def post_one(number: int) -> None:
        stored, _, is_new = await store.post(new(job(*DEBATE, name=f"j{number}"), f"k{number % 50}"), claims=True)
        results.append((stored.id, is_new))

    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(post_one, number)
    assert sum(is_new for _, is_new in results) == 50
    assert len(await store.read(queries.jobs(None, 1000, None))) == 50
    numbers = [stored.number for stored in await store.read(queries.jobs(JobState.QUEUED, 1000, None))]
    assert numbers == sorted(set(numbers), reverse=True)
    assert len(await store.read(queries.jobs(None, 1000, numbers[20]))) == 29


async def test_the_next_life_claims_what_is_unfinished(make_database: Maker) -> None:
    """Nothing is lost, the fence has grown, and whatever the life before still says is refused."""
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
        assert await store.read(queries.turns(J, ["c0"])) == [turn("a")]
        await append(store, ended("b"))


async def test_what_nobody_here_runs_is_refused(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Of a conversation that was released, or never claimed, nothing is written, and the log says so."""
    await store.post(new(job(*DEBATE, conversations=2)), claims=False)
    await append(store, ended("a"))
    assert await store.read(queries.turns(J, ["c0"])) == []
    assert "a late result of a in round 0, completed" in caplog.text
    assert len(await store.claim(["m"], 10)) == 2
    store.release_nowait({(J, "c0"): ["m"]})
    await append(store, ended("a"))
    assert await store.read(queries.turns(J, ["c0"])) == []
    (again,) = await store.claim(["m"], 10)
    assert (again.conversation_id, again.fence) == ("c0", 2)
    await append(store, ended("a"))
    assert len(await store.read(queries.turns(J, ["c0"]))) == 1


async def test_what_a_turn_has_behind_it_outlives_us(store: Store) -> None:
    """The newest stands, and goes with the turn's end."""
    await post(store, job(*DEBATE))
    attempt = turn("a", TurnState.FAILED).attempts[0]

    def requeued(*attempts: Attempt) -> TurnRequeued:
        so_far = UnfinishedTurn(
            key=key("a"), attempts=attempts, rejected=(("maybe", "why"),),
            charges=Charges(is_suspect=True, deaths=1, refused_at=1.5),
            queued_at=NOW, started_at=NOW,
        )  # fmt: skip
        return TurnRequeued(key=key("a"), so_far=so_far, worker="w", reason="engine_died", detail="d", at=NOW)

    first, second = requeued(attempt), requeued(attempt, attempt)
    await append(store, first, second)
    assert await store.read(queries.unfinished_turns(J, ["c0"])) == [second.so_far]
    await append(store, ended("a", TurnState.FAILED))
    assert await store.read(queries.unfinished_turns(J, ["c0"])) == []


@pytest.mark.parametrize("count", [0, 1, TURNS_A_PAGE, TURNS_A_PAGE + 1])
async def test_the_times_of_turns_are_read_page_by_page(store: Store, count: int) -> None:
    """Each turn of the job once, without its words; those of other jobs are not among them."""
    await store.post(new(job(*DEBATE, conversations=count + 1)), claims=True)
    await store.post(new(job(*DEBATE, name="other", conversations=1)), claims=True)
    turns = [turn("a", number=number) for number in range(count)]
    other = replace(turn("a"), key=key("a", name="other"))
    await append(store, *(TurnEnded(turn=each, at=NOW) for each in (*turns, other)))
    await append(store, requeued("m", count))
    read: list[TurnTimes] = []
    after: After | None = After()
    while after is not None:
        page, after = await store.read(ended_turns(J, after))
        assert len(page) <= TURNS_A_PAGE
        read += page
    assert sorted(read, key=lambda each: each.key) == sorted(map(times_of, turns), key=lambda each: each.key)
    ((unfinished,), none) = await store.read(unfinished_turns_of_job(J, After()))
    assert (unfinished.key, [each.reason for each in unfinished.attempts], none) == (
        key("m", 0, count), ["engine_died"], None,
    )  # fmt: skip


async def test_the_ledger_keeps_every_call_and_its_outcome(store: Store) -> None:
    """Without an outcome a call is of unknown effect; the same call in another attempt is the same row."""
    await post(store, job(*DEBATE))

    def started(call: str, number: int) -> ToolCallStarted:
        return ToolCallStarted(
            key=key("a"), call=call, number=number, name="pay", arguments="{}", policy="ask_model", at=NOW
        )

    await append(store, started("x", 1), started("y", 2), started("x", 1))
    await append(store, ToolCallEnded(key=key("a"), call="y", outcome='{"result": 1}', at=NOW))
    assert await store.read(queries.tool_calls(key("a"))) == [
        StoredToolCall(call="x", number=1, name="pay", arguments="{}", policy="ask_model", outcome=None),
        StoredToolCall(call="y", number=2, name="pay", arguments="{}", policy="ask_model", outcome='{"result": 1}'),
    ]
    assert await store.read(queries.tool_calls(key("b"))) == []
    await append(store, started("y", 2))  # again, since it had failed: what came of it is not known any more
    assert [call.outcome for call in await store.read(queries.tool_calls(key("a")))] == [None, None]


async def test_what_is_posted_and_claimed_at_once_comes_once(store: Store) -> None:
    """A post that claims and a claim of everything may be written together; whoever admits must not do so twice."""
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


async def test_what_cannot_be_written_harms_nobody_else(store: Store) -> None:
    """One caller's operation fails; what stands in the same group is written, and the store goes on."""

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
    assert len(await store.read(queries.jobs(None, 100, None))) == 20


ALL_USAGE = usage.report([], None, None, None, 10)


async def test_what_was_used_is_summed_by_whatever_is_asked_for(store: Store) -> None:
    """By any of key, job, agent, model and day, between two days, of one key; it outlives the job."""
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
    ((_, total),) = await store.read(ALL_USAGE)
    assert total == UsageCounts(turns=3, attempts=4, prompt_tokens=70, answer_tokens=3, wasted_tokens=7, slot_s=3.0)

    async def prompts(
        *by: UsageBy, since: str | None = None, until: str | None = None, owner: str | None = None
    ) -> list[tuple[str | int, ...]]:
        rows = await store.read(usage.report(by, since, until, owner, 10))
        return [(*place.values(), counts.prompt_tokens) for place, counts in rows]

    assert await prompts(UsageBy.KEY) == [("", 40), ("alice", 30)]
    assert await prompts(UsageBy.MODEL, UsageBy.KEY) == [("m", "", 40), ("m", "alice", 10), ("n", "alice", 20)]
    assert await prompts(UsageBy.DAY, UsageBy.JOB) == [("2026-11-21", J, 50), ("2026-11-22", J, 20)]
    assert await prompts(UsageBy.AGENT, owner="alice") == [("a", 10), ("b", 20)]
    assert await prompts(UsageBy.AGENT, since="2026-11-22") == [("b", 20)]
    assert await prompts(UsageBy.AGENT, until="2026-11-21") == [("a", 10), ("m", 40)]
    assert await prompts(owner="bob") == [(0,)]
    assert len(await store.read(usage.report([UsageBy.AGENT], None, None, None, 2))) == 2


async def test_what_is_refused_has_used_nothing(store: Store) -> None:
    """Of what another node runs by now its own ends count."""
    await store.post(new(job(*DEBATE)), claims=False)
    await append(store, ended("a", used=used()))
    assert [counts.attempts for _, counts in await store.read(ALL_USAGE)] == [0]
    assert await store.claim(["m"], 10)
    await append(store, ended("a", used=used()))
    assert [counts.attempts for _, counts in await store.read(ALL_USAGE)] == [1]


async def test_usage_is_kept_for_so_many_days(store: Store) -> None:
    """A day more and it is gone; null keeps it."""
    await post(store, job(*DEBATE))
    await append(store, *(ended(name, used=used(name, day=f"2026-11-2{day}")) for day, name in enumerate("abm", 1)))
    await release(store, StoreConfig(keep_usage_days=None), NOW + timedelta(days=9999))
    await release(store, StoreConfig(keep_usage_days=30), NOW + timedelta(days=31))
    kept = await store.read(usage.report([UsageBy.DAY], None, None, None, 10))
    assert [place[UsageBy.DAY] for place, _ in kept] == ["2026-11-22", "2026-11-23"]

"""Jobs, turns and usage in their stored form, in short calls."""

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta

import anyio

from service.conversations.job.job import Job, JobId
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.measures import UsageCounts
from service.conversations.record.transcript import Attempt, Charges, TokenUsage, Turn, UnfinishedTurn
from service.store import usage
from service.store.databases.database import Connection, Database
from service.store.databases.sqlite import SqliteConnection
from service.store.records import (
    ConversationMoved,
    NewJob,
    Record,
    StoredJob,
    TurnEnded,
    TurnRequeued,
    UsageKey,
    Used,
)
from service.store.store import Store
from service.store.usage import UsageBy
from tests.harness.jobs import key
from tests.harness.waiting import LIMIT_S

NOW = datetime(2026, 11, 21, 9, 30, 0, 123456, tzinfo=UTC)


J = JobId("j")


Maker = Callable[[], Database]


def all_usage(connection: Connection) -> list[tuple[dict[UsageBy, str], UsageCounts]]:
    return usage.report(connection, [], None, None, None, 10)


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


def write_before_release(connection: Connection) -> None:
    """Write the marks of a store from before 1.0.0, and close the connection."""
    with closing(connection):
        connection.begin()
        connection.execute(
            "CREATE TABLE migrations"
            " (number INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL, applied_at TEXT NOT NULL)"
        )
        for number, name in ((1, "0001_initial"), (2, "0002_more")):
            connection.execute("INSERT INTO migrations VALUES (?, ?, 'c', '2026-11-20')", (number, name))
        connection.execute("CREATE TABLE jobs (id TEXT PRIMARY KEY, document TEXT NOT NULL)")
        connection.execute("INSERT INTO jobs VALUES ('old', '{}')")
        connection.commit()
        if isinstance(connection, SqliteConnection):
            connection.execute("PRAGMA user_version = 2")


async def append(store: Store, *records: Record) -> None:
    done = anyio.Event()
    store.append_nowait(records, done.set)
    with anyio.fail_after(LIMIT_S):
        await done.wait()

"""A fact, a request and a read cost a fixed number of statements, in either database."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from service.conversations.job.job import JobId, SpokenBy, TurnKind
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.job.wording import ConversationWords, Wording
from service.conversations.record.awaited_turn import AwaitedTurn
from service.store import awaited_turns, conversation_rows, event_rows, job_rows, tool_rows, turn_rows
from service.store.databases import membership_shared
from service.store.databases.postgres import PostgresDatabase
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.records import (
    ConversationWorded,
    GivenUp,
    MemoryCut,
    Record,
    RequestUsed,
    ToolCallEnded,
    ToolCallStarted,
    TurnEnded,
    TurnMoved,
)
from service.store.store import Store, open_store
from tests.harness.jobs import DEBATE, job, key
from tests.harness.statements import ReportedDatabase
from tests.harness.stored import NOW, J, append, ended, moved, new, requeued, turn, used

DEMAND = AwaitedTurn(role="guest", wait_s=60.0)
SPOKEN = replace(turn("b", TurnState.CANCELLED), by=SpokenBy.CALLER)
SUMMARY = replace(turn("m"), kind=TurnKind.SUMMARY)
WORDS = ConversationWords(began_at=NOW, models={"m": Wording()})
ENDED = JobId("ended")


def of(*records: Record) -> Callable[[Store], Awaitable[object]]:
    return lambda store: append(store, *records)


async def release(store: Store) -> None:
    store.release_nowait({(J, "c1"): ("m",)})
    await store.flush()


async def hear(store: Store) -> None:
    store.forget_said_nowait([key("a")])
    await store.flush()


# In this order, each in a write of its own: the statements on SQLite, and on PostgreSQL.
WRITES: dict[str, tuple[Callable[[Store], Awaitable[Any]], int, int]] = {
    "a job of three conversations": (lambda store: store.post(new(job(*DEBATE, conversations=3)), claims=True), 5, 6),
    "a job with a key": (lambda store: store.post(new(job(*DEBATE, name=ENDED), "k"), claims=True), 7, 9),
    "a conversation that begins its job": (of(moved(ConversationState.RUNNING)), 5, 6),
    "the words of a conversation": (of(ConversationWorded(job_id=J, conversation_id="c0", words=WORDS)), 3, 4),
    "a turn on a slot": (of(TurnMoved(key=key("m"), state=TurnState.IN_FLIGHT, worker="w", at=NOW)), 3, 4),
    "a turn that waits for a caller": (
        of(TurnMoved(key=key("a"), state=TurnState.AWAITED, worker=None, at=NOW, demand=DEMAND)),
        7,
        9,
    ),
    "the words of its caller": (lambda store: store.say(DEMAND.said(key("a"), "Yes.", (), NOW, NOW)), 7, 8),
    "a call of a tool": (
        of(ToolCallStarted(key=key("m"), call="1", number=1, name="t", arguments="{}", policy="again", at=NOW)),
        2,
        3,
    ),
    "the end of a call": (of(ToolCallEnded(key=key("m"), call="1", outcome="{}", at=NOW)), 2, 3),
    "an attempt that failed": (of(requeued("m", 0)), 4, 5),
    "a turn with its usage": (of(ended("m", used=used())), 6, 7),
    "a summary": (of(TurnEnded(turn=SUMMARY, at=NOW)), 4, 5),
    "a caller's turn that is cancelled": (of(TurnEnded(turn=SPOKEN, at=NOW)), 5, 6),
    "a memory that is cut": (of(MemoryCut(key=key("m"), from_round=1)), 2, 3),
    "a pattern that is given up": (of(GivenUp(key=key("m"), path="until/0", pattern="x+")), 2, 3),
    "the usage of a request": (of(RequestUsed(used=used())), 2, 2),
    "two facts of one job": (
        of(TurnEnded(turn=turn("a", number=1), at=NOW), TurnEnded(turn=turn("b", number=1), at=NOW)),
        7,
        8,
    ),
    "a caller's words that are heard after others": (hear, 5, 5),
    "a conversation that ends": (of(moved(ConversationState.COMPLETED)), 6, 7),
    "a conversation that a condition ends": (
        of(replace(moved(ConversationState.COMPLETED, "c2"), most=3)),
        8,
        9,
    ),
    "a conversation that is left": (release, 2, 3),
    "a claim": (lambda store: store.claim(["m"], 10), 7, 3),
    "a claim that finds nothing": (lambda store: store.claim(["m"], 10), 5, 1),
    "the end of a job": (of(moved(ConversationState.COMPLETED, "c0", ENDED)), 9, 10),
    "a cancellation": (lambda store: store.request_cancel(J), 3, 4),
    "a job that is deleted": (lambda store: store.delete(ENDED), 9, 10),
}
READS: dict[str, tuple[Callable[..., Any], tuple[object, ...], int]] = {
    "a job": (job_rows.job, (J,), 1),
    "the tally of a job": (job_rows.tally, (J,), 4),
    "a list of jobs": (job_rows.listed, (None, 10, None), 1),
    "events": (event_rows.listed, (J, 0, 10), 2),
    "a conversation": (conversation_rows.record, (J, "c0"), 6),
    "turns": (turn_rows.ended, (J, ["c0", "c1"]), 3),
    "calls of tools": (tool_rows.of_turn, (key("m"),), 1),
    "words": (conversation_rows.words, (J, ["c0", "c1"]), 2),
    "the conversations of a job": (conversation_rows.listed, (J,), 2),
    "turns that wait for callers": (awaited_turns.listed, (awaited_turns.Which(job_id=J), 0, 10), 1),
}


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_each_write_and_read_costs_a_fixed_number_of_statements(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The fence of a group counts, as do PostgreSQL's locks; BEGIN, COMMIT and notices, which have a rhythm, do not."""
    monkeypatch.setattr(membership_shared, "NOTICE_S", 1e6)
    real: SqliteDatabase | PostgresDatabase = SqliteDatabase(tmp_path / FILE_NAME)
    if kind == "postgres":
        real = PostgresDatabase(request.getfixturevalue("postgres").new_database(), 60.0, ["m"])
    real.prepare()
    told: list[str] = []
    cost: dict[str, int] = {}
    with open_store(ReportedDatabase(real, lambda _connection, sql, _parameters: told.append(sql))) as store:
        await store.flush()
        for what, (write, *_) in WRITES.items():
            told.clear()
            await write(store)
            cost[what] = len(told)
        for what, (read, values, _) in READS.items():
            told.clear()
            await store.read(read, *values)
            cost[what] = len(told)
    writes = {what: on_sqlite if kind == "sqlite" else other for what, (_, on_sqlite, other) in WRITES.items()}
    assert cost == {**writes, **{what: count for what, (*_, count) in READS.items()}}

"""What every store keeps of turns, their tools and their times."""

from typing import cast

import pytest
from msgspec.structs import replace

from service.conversations.job.client_request import PostedRequest, WholeAnswer
from service.conversations.job.states import ConversationState, JobState, TurnState
from service.conversations.record.transcript import Attempt, Charges, UnfinishedTurn
from service.store import conversation_rows, event_rows, job_rows, tool_rows, turn_rows
from service.store.news import FactsLost
from service.store.records import (
    StoredToolCall,
    ToolCallEnded,
    ToolCallStarted,
    TurnEnded,
    TurnMoved,
    TurnRequeued,
)
from service.store.store import Store
from service.store.turn_rows import TURNS_A_PAGE, After
from service.timeline.spans import TurnTimes, times_of
from tests.harness.jobs import DEBATE, job, key
from tests.harness.stored import NOW, J, append, ended, moved, new, post, requeued, turn
from tests.harness.waiting import wait_until


async def test_a_turn_that_cannot_be_written_ends_its_conversation(store: Store) -> None:
    """No later fact is stored without the missing one; other conversations and the store go on."""
    told: list[FactsLost] = []
    store.subscribe(lambda event: told.append(event) if isinstance(event, FactsLost) else None)
    await post(store, job(*DEBATE, conversations=2))
    await append(store, ended("a"))
    broken = replace(ended("b"), turn=replace(turn("b"), reason=cast("str", object())))
    await append(store, broken, ended("m"), TurnEnded(turn=turn("a", number=1), at=NOW))
    await wait_until(lambda: told, "it is told")
    assert [event.conversations for event in told] == [((J, "c0"),)]
    spoiled, other = [await store.read(conversation_rows.record, J, name, 0) for name in ("c0", "c1")]
    assert [(each.key.agent_id, each.state, each.reason) for each in spoiled.turns] == [
        ("a", TurnState.COMPLETED, None),
        ("b", TurnState.FAILED, "internal"),
    ]
    assert (spoiled.state, spoiled.reason) == (ConversationState.FAILED, "internal")
    assert [each.key.agent_id for each in other.turns] == ["a"]
    assert not await store.append([ended("m")])
    await append(store, moved(ConversationState.COMPLETED, "c1"))
    assert (await store.read(job_rows.job, J)).state is JobState.COMPLETED_WITH_FAILURES


async def test_a_turn_comes_back_unchanged_and_only_once(store: Store) -> None:
    """A result is recorded exactly once: a second one is refused, and its conversation ends there."""
    await post(store, job(*DEBATE))
    await append(store, ended("a"), ended("m", TurnState.FAILED))
    assert await store.read(turn_rows.ended, J, ["c0"]) == [turn("a"), turn("m", TurnState.FAILED)]
    talk = await store.read(conversation_rows.record, J, "c0")
    assert talk.turns == (turn("a"), turn("m", TurnState.FAILED))
    tally = await store.read(job_rows.tally, J)
    assert tally.turns == {TurnState.COMPLETED: 1, TurnState.FAILED: 1}
    assert not await store.append([moved(ConversationState.RUNNING), ended("a", text="another")])
    talk = await store.read(conversation_rows.record, J, "c0")
    assert (talk.state, talk.reason) == (ConversationState.FAILED, "internal")
    assert talk.turns == (turn("a"), turn("m", TurnState.FAILED))


async def test_a_posted_body_and_its_answer_come_back_to_the_byte(store: Store) -> None:
    """Clients and engines may send any bytes; a deleted job takes its bodies with it."""
    request = PostedRequest(path="/v1/chat/completions", body=b'{"a": "\\u0000"}\xff', name="m", model="m", chars=7)
    made = job(*DEBATE, conversations=2)
    posted = made.conversations[1].with_posted(request)
    await post(store, replace(made, conversations=(made.conversations[0], posted)))
    assert await store.read(conversation_rows.posted, J, ["c0", "c1"]) == {"c1": request}
    assert await store.read(conversation_rows.posted, J, ["c0"]) == {}
    answer = WholeAnswer(status=200, content_type="application/json", body=b"\x00{}\xff")
    await append(store, replace(ended("a"), turn=replace(turn("a"), answer=answer)))
    assert [each.answer for each in await store.read(turn_rows.ended, J, ["c0"])] == [answer]
    await append(store, moved(ConversationState.COMPLETED), moved(ConversationState.COMPLETED, "c1"))
    await store.delete(J, with_heirs=False)
    assert await store.read(conversation_rows.posted, J, ["c1"]) == {}


async def test_facts_are_applied_in_order_and_reported_once(store: Store) -> None:
    """Events are numbered without a gap, and an unchanged state is no event."""
    await post(store, job(*DEBATE))
    in_flight = TurnMoved(key=key("a"), state=TurnState.IN_FLIGHT, worker="w", at=NOW)
    running, completed = moved(ConversationState.RUNNING), moved(ConversationState.COMPLETED)
    await append(store, running, running, in_flight, completed)
    events, is_over = await store.read(event_rows.listed, J, 0, 99)
    assert is_over
    assert [(event.number, event.kind) for event in events] == [
        (1, "job"),
        (2, "job"),
        (3, "conversation"),
        (4, "turn"),
        (5, "conversation"),
        (6, "end"),
    ]
    assert await store.read(event_rows.listed, J, 3, 1) == (events[3:4], False)
    assert await store.read(event_rows.listed, J, 6, 1) == ([], True)
    stored = await store.read(job_rows.job, J)
    assert (stored.state, stored.started_at, stored.finished_at) == (JobState.COMPLETED, NOW, NOW)


async def test_charges_of_unfinished_turns_survive_a_restart(store: Store) -> None:
    """The newest charges count, and end with the turn."""
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
    assert await store.read(turn_rows.unfinished, J, ["c0"]) == [second.so_far]
    await append(store, ended("a", TurnState.FAILED))
    assert await store.read(turn_rows.unfinished, J, ["c0"]) == []


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
        page, after = await store.read(turn_rows.ended_page, J, after)
        assert len(page) <= TURNS_A_PAGE
        read += page
    assert sorted(read, key=lambda each: each.key) == sorted(map(times_of, turns), key=lambda each: each.key)
    ((unfinished,), none) = await store.read(turn_rows.unfinished_page, J, After())
    assert (unfinished.key, [each.reason for each in unfinished.attempts], none) == (
        key("m", 0, count), ["engine_died"], None,
    )  # fmt: skip


async def test_the_ledger_keeps_every_call_and_its_outcome(store: Store) -> None:
    """A call without an outcome has an unknown effect; the same call in another attempt is the same row."""
    await post(store, job(*DEBATE))

    def started(call: str, number: int) -> ToolCallStarted:
        return ToolCallStarted(
            key=key("a"), call=call, number=number, name="pay", arguments="{}", policy="ask_model", at=NOW
        )

    await append(store, started("x", 1), started("y", 2), started("x", 1))
    await append(store, ToolCallEnded(key=key("a"), call="y", outcome='{"result": 1}', at=NOW))
    assert await store.read(tool_rows.of_turn, key("a")) == [
        StoredToolCall(call="x", number=1, name="pay", arguments="{}", policy="ask_model", outcome=None),
        StoredToolCall(call="y", number=2, name="pay", arguments="{}", policy="ask_model", outcome='{"result": 1}'),
    ]
    assert await store.read(tool_rows.of_turn, key("b")) == []
    await append(store, started("y", 2))  # again, since it had failed: what came of it is not known any more
    assert [call.outcome for call in await store.read(tool_rows.of_turn, key("a"))] == [None, None]

"""The ledger of calls: a call is recognised in a later attempt, and none is repeated silently."""

from collections.abc import Sequence

import pytest

from service.scheduling.asking.tool_calls import TurnCalls, describe_calls
from service.store.records import Record, StoredToolCall, ToolCallEnded, ToolCallStarted
from tests.harness.jobs import key
from workers.errors import JournalClosed
from workers.tools.call_journal import Begun, Unverified


class Store:
    """Keeps what a store would, and refuses on request."""

    def __init__(self) -> None:
        self.calls: dict[str, StoredToolCall] = {}
        self.is_ours = True

    async def append(self, records: Sequence[Record]) -> bool:
        for record in records if self.is_ours else ():
            if isinstance(record, ToolCallStarted):
                self.calls[record.call] = StoredToolCall(
                    call=record.call, number=record.number, name=record.name, arguments=record.arguments,
                    policy=record.policy, outcome=None,
                )  # fmt: skip
            elif isinstance(record, ToolCallEnded):
                known = self.calls[record.call]
                self.calls[record.call] = StoredToolCall(
                    call=known.call, number=known.number, name=known.name, arguments=known.arguments,
                    policy=known.policy, outcome=record.outcome,
                )  # fmt: skip
        return self.is_ours

    def attempt(self) -> TurnCalls:
        return TurnCalls(key("a"), list(self.calls.values()), self.append)


async def begin(calls: TurnCalls, name: str = "pay", **arguments: object) -> Begun:
    return await calls.begin_call(name, arguments, Unverified.ASK_MODEL)


async def test_the_same_call_is_recognised_in_the_next_attempt() -> None:
    """Its result is returned, if there is one; the order of arguments and other calls do not matter."""
    store = Store()
    first = store.attempt()
    paid = await begin(first, to="x", sum=1)
    assert paid == Begun(key=paid.key)
    await first.end_call(paid.key, result='{"ok": true}', failure=None)
    lost = await begin(first, to="y", sum=1)
    again = store.attempt()
    await begin(again, "other")
    assert await begin(again, sum=1, to="x") == Begun(key=paid.key, was_begun=True, result='{"ok": true}')
    assert await begin(again, to="y", sum=1) == Begun(key=lost.key, was_begun=True)
    assert [call.number for call in store.calls.values()] == [1, 2, 3]


async def test_a_second_identical_call_is_another_call() -> None:
    """A model may mean to pay twice: the n-th call is the n-th in every attempt."""
    store = Store()
    calls = store.attempt()
    first, second = await begin(calls, to="x"), await begin(calls, to="x")
    assert first.key != second.key
    again = store.attempt()
    assert [(await begin(again, to="x")).key for _ in range(3)][:2] == [first.key, second.key]
    assert len(store.calls) == 3


async def test_a_failed_call_may_be_made_again() -> None:
    """Its outcome is known, and it has no result."""
    store = Store()
    calls = store.attempt()
    begun = await begin(calls, to="x")
    await calls.end_call(begun.key, result=None, failure="tool_timeout: too slow")
    assert await begin(store.attempt(), to="x") == Begun(key=begun.key)


async def test_no_call_is_made_whose_record_is_refused() -> None:
    """Another node has the job: a refused record prevents the call."""
    store = Store()
    store.is_ours = False
    with pytest.raises(JournalClosed):
        await begin(store.attempt(), to="x")


async def test_the_model_is_shown_earlier_calls() -> None:
    """Each has its result, its failure, or the note that its outcome is unknown."""
    store = Store()
    calls = store.attempt()
    for number, ends in enumerate(({"result": "1", "failure": None}, {"result": None, "failure": "no"}, None)):
        begun = await begin(calls, to=number)
        if ends is not None:
            await calls.end_call(begun.key, **ends)
    told = describe_calls(list(store.calls.values()))
    assert told is not None
    assert told.splitlines()[1:] == [
        '- pay({"to":0}): 1',
        '- pay({"to":1}): it failed (no)',
        '- pay({"to":2}): whether it took effect is not known',
    ]
    assert describe_calls([]) is None

"""Turns that callers speak, as every store keeps them (specification, "Turns of callers")."""

import anyio
import anyio.lowlevel
import pytest
from msgspec.structs import replace

from service.conversations.job.job import SpokenBy, TurnKey
from service.conversations.job.states import ConversationState, TurnState
from service.conversations.record.awaited_turn import AwaitedTurn
from service.conversations.record.transcript import Turn
from service.errors import ConversationNotFound
from service.store import awaited_turns, conversation_rows, event_rows, job_rows, turn_rows, usage, waits
from service.store.awaited_turns import Which
from service.store.records import TurnEnded, TurnMoved
from service.store.store import Store
from tests.harness.jobs import DEBATE, job, key
from tests.harness.stored import NOW, J, append, ended, moved, post, turn
from tests.harness.waiting import LIMIT_S

DEMAND = AwaitedTurn(role="guest")
PLACE = (J, "c0")


def awaits(demand: AwaitedTurn = DEMAND, name: str = "a") -> TurnMoved:
    return TurnMoved(key=key(name), state=TurnState.AWAITED, worker=None, at=NOW, demand=demand)


def words(text: str = "hello", name: str = "a") -> Turn:
    return DEMAND.said(key(name), text, (), NOW, NOW)


async def kinds(store: Store, what: str) -> int:
    events, _ = await store.read(event_rows.listed, J, 0, 99)
    return sum(what in event.data for event in events)


async def told(store: Store) -> list[Turn]:
    return await store.read(awaited_turns.said_to, store.node_id)


async def test_words_are_stored_once(store: Store) -> None:
    """A second speaker gets the stored words; before the turn is awaited and after its end no words are accepted."""
    await post(store, job(*DEBATE))
    assert await store.say(words()) is None
    await append(store, awaits(), awaits())
    assert await kinds(store, '"awaited"') == 1, "told once, over claims"
    assert (await store.read(job_rows.tally, J)).awaited == 1
    found = await store.read(awaited_turns.find, key("a"))
    assert isinstance(found, tuple)
    assert (found[0].until, found[1]) == (None, DEMAND)
    first, second = await store.say(words()), await store.say(words("other"))
    assert (first is not None and first.is_new, second is not None and second.is_new) == (True, False)
    assert second is not None
    assert second.turn.text == "hello"
    assert await store.read(awaited_turns.find, key("a")) == words()
    assert (await store.read(job_rows.tally, J)).awaited == 0
    assert await told(store) == [words()]
    store.forget_said_nowait([key("a")])
    await store.flush()
    assert await told(store) == []
    with pytest.raises(ConversationNotFound):
        await store.read(awaited_turns.find, replace_conversation("x"))


def replace_conversation(name: str) -> TurnKey:
    return key("a")._replace(conversation_id=name)


async def test_a_conversation_that_only_callers_move_is_claimed_with_their_words(store: Store) -> None:
    """Never before, by any node; and once, even if the words arrive during its release."""
    await post(store, job(*DEBATE))
    await append(store, awaits())
    store.release_nowait({PLACE: ()}, {PLACE: [key("a")]})
    assert await store.claim(["m"], 10) == []
    await store.say(words())
    assert len(await store.claim(["m"], 10)) == 1
    await append(store, awaits(name="b"))
    await store.say(words(name="b"))
    store.release_nowait({PLACE: ()}, {PLACE: [key("b")]})
    assert len(await store.claim(["m"], 10)) == 1, "its node did not know of them"
    store.release_nowait({PLACE: ()}, {PLACE: [key("m")]})
    assert await store.claim(["m"], 10) == [], "what it knew wakes nobody"


async def spoken(store: Store, after: int = 0) -> list[str]:
    """Return the agents of a transcript's ended turns."""
    record = await store.read(conversation_rows.record, J, "c0", after)
    return [each.key.agent_id for each in record.turns]


async def resumed(store: Store) -> list[str]:
    """Return the agents of the turns that a node goes on from."""
    return [each.key.agent_id for each in await store.read(turn_rows.ended, J, ["c0"])]


async def test_a_callers_turn_has_the_place_at_which_it_was_heard(store: Store) -> None:
    """Its node may have heard others since the words were stored; a reader never sees a turn change its place."""
    await post(store, job(*DEBATE))
    await append(store, awaits(), awaits(name="b"))
    await store.say(words())
    assert (await spoken(store), await resumed(store)) == ([], ["a"])
    await append(store, ended("m"))
    assert (await spoken(store), await resumed(store)) == (["m"], ["m", "a"])
    store.forget_said_nowait([key("a")])
    store.forget_said_nowait([key("a")])
    await store.say(words(name="b"))
    store.forget_said_nowait([key("a"), key("b")])
    await store.flush()
    assert (await spoken(store), await spoken(store, 1), await resumed(store)) == (
        ["m", "a", "b"],
        ["a", "b"],
        ["m", "a", "b"],
    )


async def test_an_agent_that_leaves_unheard_has_not_left_yet(store: Store) -> None:
    """Its turn and its leaving are shown together."""
    await post(store, job(*DEBATE))
    demand = replace(DEMAND, wait_s=1.0, leaves=True)
    await append(store, awaits(demand))
    await store.say(demand.unsaid(key("a"), NOW, NOW))
    assert (await store.read(conversation_rows.record, J, "c0")).left == ()
    store.forget_said_nowait([key("a")])
    await store.flush()
    assert (await store.read(conversation_rows.record, J, "c0")).left == ("a",)


async def test_words_that_were_never_heard_are_the_last_of_a_conversation(store: Store) -> None:
    """They came as it ended."""
    await post(store, job(*DEBATE))
    await append(store, awaits(), awaits(name="b"))
    await store.say(words(name="b"))
    await store.say(words())
    await append(store, ended("m"), moved(ConversationState.COMPLETED))
    assert (await spoken(store), await spoken(store, 1)) == (["m", "b", "a"], ["b", "a"])


async def test_words_to_a_conversation_that_no_node_runs_are_shown(store: Store) -> None:
    """Nothing can be said before they are heard, so they have their place."""
    await post(store, job(*DEBATE))
    await append(store, awaits(), ended("m"))
    store.release_nowait({PLACE: ()}, {PLACE: [key("a")]})
    await store.say(words())
    assert await spoken(store) == ["m", "a"]


async def test_a_cancelled_job_is_claimed_to_be_ended(store: Store) -> None:
    """Words from before the cancel are recorded, and later ones are refused: nobody would answer them."""
    await post(store, job(*DEBATE))
    await append(store, awaits(), awaits(name="b"))
    store.release_nowait({PLACE: ()}, {PLACE: [key("a"), key("b")]})
    await store.flush()
    await store.say(words())
    await store.request_cancel(J)
    assert len(await store.claim(["m"], 10)) == 1
    assert await store.say(words(name="b")) is None
    cut = replace(turn("a", TurnState.CANCELLED), by=SpokenBy.CALLER, attempts=())
    await append(store, TurnEnded(turn=cut, at=NOW), moved(ConversationState.CANCELLED))
    assert await store.read(turn_rows.ended, J, ["c0"]) == [words()]
    assert await store.say(words(name="b")) is None
    assert await store.read(awaited_turns.find, key("b")) == ConversationState.CANCELLED
    assert await store.read(awaited_turns.listed, Which(), 0, 10) == []


async def test_a_total_counts_words_that_came_as_a_condition_ended_the_conversation(store: Store) -> None:
    """Turns that do not exist are subtracted; the recorded ones count."""
    await post(store, job(*DEBATE, rounds=2))
    await append(store, awaits(), ended("b"))
    await store.say(words())
    await append(store, replace(moved(ConversationState.COMPLETED), most=6))
    assert (await store.read(job_rows.job, J)).total_turns == 2


async def test_waits_end_by_the_clock_of_the_database(store: Store) -> None:
    """The first to run out ends first; time without a running node extends all of them."""
    await post(store, job(*DEBATE))
    await append(store, awaits(replace(DEMAND, wait_s=0.01)), awaits(replace(DEMAND, wait_s=1000.0), "b"))
    assert await store.read(waits.ends_next) is not None
    with anyio.fail_after(LIMIT_S):
        while not (due := (await store.take_due()).turns):
            await anyio.lowlevel.checkpoint()
    assert [(each.key, demand.wait_s) for each, demand in due] == [(key("a"), 0.01)]
    await store.say(replace(DEMAND, wait_s=0.01).unsaid(key("a"), NOW, NOW))
    before = (await store.read(awaited_turns.listed, Which(job_id=J), 0, 10))[0]
    assert before.until is not None
    await store.write(lambda connection: connection.execute("UPDATE waits SET seen = seen - 500, pause_s = 0"))
    await store.write(lambda connection: connection.execute("UPDATE awaited_turns SET since = since - 600"))
    assert (await store.take_due()).turns == []
    after = (await store.read(awaited_turns.listed, Which(job_id=J), 0, 10))[0]
    assert after.until is not None
    assert after.until - before.until == pytest.approx(500, abs=2)


async def test_a_list_is_for_a_job_or_for_a_key(store: Store) -> None:
    """The oldest first, in pages."""
    await post(store, replace(job(*DEBATE), owner="alice"))
    await append(store, awaits(), awaits(name="b"), awaits(name="m"))
    read = [each.key for each in await store.read(awaited_turns.listed, Which(job_id=J, conversation_id="c0"), 1, 1)]
    assert read == [key("b")]
    assert len(await store.read(awaited_turns.listed, Which(owner="alice"), 0, 10)) == 3
    assert await store.read(awaited_turns.listed, Which(owner="bob"), 0, 10) == []
    assert await store.read(usage.unfinished_of, "alice") == 0, "they do not count as queued"


async def test_awaited_turns_are_counted_and_listed_with_the_last_words(store: Store) -> None:
    """For all keys, or one; a conversation that a node runs is not parked."""
    await post(store, job(*DEBATE))
    await append(store, awaits(), ended("b"))
    counted = await store.read(awaited_turns.count_all, None)
    assert (counted.turns, counted.parked) == (1, {})
    assert (await store.read(awaited_turns.count_all, "another")).turns == 0
    assert await store.read(awaited_turns.agents, J) == {"c0": ["a"]}
    store.release_nowait({PLACE: ()}, {PLACE: [key("a")]})
    await store.flush()
    assert (await store.read(awaited_turns.count_all, None)).parked == {J: 1}
    ((name, head),) = await store.read(turn_rows.last_heads, [PLACE])
    assert head is not None
    assert (name, head.key.agent_id) == ("j", "b")

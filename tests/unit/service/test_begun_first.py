"""Conversations that have begun go on before new ones begin, while together they fill a KV cache."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.conversations.job import JobId, Mode, TurnKey
from service.scheduling.core.capacity.room_keeper import PRESSED, RELIEVED
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue import begun_first
from service.scheduling.core.queue.begun_first import BegunFirst
from service.scheduling.core.queue.ready_queue import ReadyTurn
from tests.unit.service.test_capacity import admit, asks, core_of, done, ready, room_of, seated, turn

CONTEXT = 300  # tokens that a conversation has in the cache after a turn; the cache holds a thousand


def waiting(name: str, order: int, *, priority: int = 0, is_front: bool = False, was_held: bool = False) -> ReadyTurn:
    return ReadyTurn(
        key=TurnKey(JobId(name), "c", "a", 0),
        job_priority=priority,
        rounds_completed=0,
        conversation_order=order,
        agent_order=0,
        ready_order=order,
        path=1.0,
        is_front=is_front,
        was_held=was_held,
    )


class Line:
    """A queue whose pressure and beginnings are ours to say."""

    def __init__(self, policy: str, *turns: ReadyTurn, begun: Iterable[str] = ()) -> None:
        self.begun = set(begun)
        self.is_pressed = True
        self.queue = BegunFirst(POLICIES[policy], lambda key: key.job_id in self.begun, lambda: self.is_pressed)
        for each in turns:
            self.queue.push(each)

    def rest(self) -> list[str]:
        return [self.queue.pop().key.job_id for _ in range(len(self.queue))]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_has_begun_goes_first_and_the_others_in_their_order(policy: str) -> None:
    """Whatever came before it; what is looked at goes as it was shown."""
    turns = [waiting(name, order) for order, name in enumerate(["n0", "n1", "b0", "n2", "b1"])]
    line = Line(policy, *turns, begun=["b0", "b1"])
    assert [each.key.job_id for each in line.queue.heads(5)] == ["b0", "b1", "n0", "n1", "n2"]
    assert line.rest() == ["b0", "b1", "n0", "n1", "n2"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_pressure_nothing_changes(policy: str) -> None:
    """And those that were put aside go in turn with the others when it is over."""
    turns = [waiting(name, order) for order, name in enumerate(["n0", "n1", "b0"])]
    line = Line(policy, *turns, begun=["b0"])
    line.is_pressed = False
    assert line.rest() == ["n0", "n1", "b0"]
    line = Line(policy, *turns, begun=["b0"])
    assert line.queue.pop().key.job_id == "b0"
    for order in (5, 6, 7):
        line.queue.push(waiting(f"n{order}", order))
    line.is_pressed = False
    assert line.rest() == ["n0", "n5", "n1", "n6", "n7"]


def test_a_turn_that_was_on_a_slot_or_held_is_ahead_of_all() -> None:
    """Its conversation has begun, whoever says so."""
    held, front = waiting("h", 1, was_held=True), waiting("f", 2, is_front=True)
    line = Line("fifo", waiting("b", 0), held, front, begun=["b"])
    assert line.queue.has_front
    assert line.rest() == ["f", "h", "b"]


def test_no_job_of_a_higher_priority_is_put_behind() -> None:
    """It begins before others go on, aside or not; among its like it waits as they do."""
    line = Line("fifo", waiting("urgent", 0, priority=5), waiting("b", 1), waiting("n", 2), begun=["b"])
    assert line.rest() == ["urgent", "b", "n"]
    line = Line("fifo", waiting("n", 0), waiting("b0", 1), waiting("b1", 2), begun=["b0", "b1"])
    assert line.queue.pop().key.job_id == "b0"
    line.queue.push(waiting("urgent", 3, priority=5))
    assert line.rest() == ["urgent", "b1", "n"]


def test_a_sibling_of_a_turn_that_has_started_has_begun() -> None:
    """It comes back into the line."""
    line = Line("fifo", waiting("n0", 0), waiting("n1", 1), waiting("b", 2), begun=["b"])
    assert line.queue.pop().key.job_id == "b"
    line.begun.add("n1")
    line.queue.note_begun(TurnKey(JobId("n1"), "c", "a", 0))
    assert line.rest() == ["n1", "n0"]


def test_so_many_are_put_aside_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a new one begins after all: a search takes its bound."""
    monkeypatch.setattr(begun_first, "PARKED_AT_ONCE", 3)
    line = Line("fifo", *(waiting(f"n{order}", order) for order in range(5)), waiting("b", 9), begun=["b"])
    assert line.rest() == ["n0", "b", "n1", "n2", "n3", "n4"]


@given(st.data())
def test_every_turn_goes_once_whatever_happens(data: st.DataObject) -> None:
    """Pushed, put back, dropped, begun, with pressure and without."""
    line = Line(data.draw(st.sampled_from(sorted(POLICIES))))
    inside: dict[TurnKey, ReadyTurn] = {}
    for order in range(data.draw(st.integers(1, 60))):
        step = data.draw(st.sampled_from(["push", "push", "pop", "back", "discard", "press", "begin"]))
        some = data.draw(st.sampled_from(sorted(inside))) if inside else None
        if step == "push":
            new = waiting(f"j{order}", order, priority=data.draw(st.integers(0, 2)))
            inside[new.key] = new
            line.queue.push(new)
        elif step == "press":
            line.is_pressed = not line.is_pressed
        elif some is not None and step == "discard":
            assert line.queue.discard(some) is inside.pop(some)
        elif some is not None and step == "begin":
            line.begun.add(some.job_id)
            line.queue.note_begun(some)
        elif some is not None:
            taken = line.queue.pop()
            assert inside.pop(taken.key) is taken
            if step == "back":
                line.queue.push_back(taken)
                inside[taken.key] = taken
        assert set(line.queue) == set(inside)
        assert len(line.queue) == len(inside)
    assert set(line.rest()) == {key.job_id for key in inside}
    assert not line.queue._priorities


# Through the core


def started(core: SchedulingCore, *ended: TurnKey, context: int = CONTEXT) -> list[tuple[str, str, int]]:
    actions = core.handle(*(done(key, context) for key in ended))
    return [(key.job_id, key.conversation_id, key.round) for key in seated(actions)]


def talks(count: int, rounds: int = 3) -> SchedulingCore:
    """Return a core with two slots, and conversations whose turns take a tenth of the cache."""
    return core_of(ready(slots=2), jobs=[asks("j", 100, conversations=count, rounds=rounds)])


def full(core: SchedulingCore, conversations: Sequence[int]) -> None:
    for number in conversations:
        started(core, turn("j", 0, conversation=number))


def test_conversations_begin_until_they_fill_the_cache_and_then_go_on() -> None:
    """By fifo all of them would begin first; four of three hundred tokens fill a thousand."""
    core = talks(8)
    full(core, range(3))
    assert not room_of(core).is_pressed("m")
    assert started(core, turn("j", 0, conversation=3)) == [("j", "c0", 1)], "c5 was to begin"
    assert room_of(core).is_pressed("m")
    assert started(core, turn("j", 0, conversation=4)) == [("j", "c1", 1)]


def test_others_begin_again_only_when_there_is_clearly_room() -> None:
    """Between the two marks it stays as it was."""
    core = talks(8, rounds=1)
    needs = room_of(core)._needs
    for known, is_pressed in ((950, False), (951, True), (810, True), (800, True), (799, False), (949, False)):
        needs.known["m"] = known
        room_of(core).note_pressure("m")
        assert room_of(core).is_pressed("m") is is_pressed
    assert (PRESSED, RELIEVED) == (0.95, 0.8)


def test_a_slot_is_not_left_idle_for_it() -> None:
    """Where nobody who has begun is ready, somebody begins."""
    core = talks(6, rounds=2)
    full(core, range(4))
    assert room_of(core).is_pressed("m")
    flying = set(core._in_flight._workers)
    assert len(flying) == 2
    core.handle(*(done(key, CONTEXT) for key in flying))
    assert len(core._in_flight._workers) == 2


def test_what_a_conversation_held_is_forgotten_with_it() -> None:
    """However it ends; nothing is known of a job that is over."""
    core = talks(4, rounds=1)
    for number in range(4):
        started(core, turn("j", 0, conversation=number))
    assert not +room_of(core)._needs.known
    assert not room_of(core)._pressed


@pytest.mark.parametrize("mode", Mode)
def test_both_agents_of_a_conversation_begin_together(mode: Mode) -> None:
    """The second of a round is no new conversation once the first has started."""
    core = core_of(ready(slots=1), jobs=[asks("j", 100, 100, conversations=6, rounds=3, mode=mode)])
    room_of(core)._needs.known["m"] = 2000
    room_of(core).note_pressure("m")
    (first,) = core._in_flight._workers
    (second,) = seated(core.handle(done(first, CONTEXT)))
    assert second[:2] == first[:2]
    assert second.agent_id != first.agent_id


def test_a_model_that_slots_bound_is_never_pressed() -> None:
    """Nor one of whose workers one has no budget."""
    core = core_of(ready("w"), ready("v", None), jobs=[asks("j", 100, conversations=4)])
    room_of(core)._needs.known["m"] = 10**6
    room_of(core).note_pressure("m")
    assert not room_of(core).is_pressed("m")
    core.handle(admit(asks("k", 100)))

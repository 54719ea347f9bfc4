"""Conversations that have begun go on before new ones begin, while together they fill a KV cache."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from service.conversations.job.job import JobId, Mode, TurnKey
from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.policies import POLICIES
from service.scheduling.core.queue import begun_first
from service.scheduling.core.queue.begun_first import BegunFirst
from service.scheduling.core.queue.ready_queue import ReadyTurn
from service.scheduling.core.working_set import PRESSED, RELIEVED, WorkingSet
from tests.harness.capacity import admit, asks, core_of, done, ready, seated, turn

CONTEXT = 300  # tokens that a conversation has in the cache after a turn; the cache holds a thousand


def waiting(
    name: str, order: int, *, priority: int = 0, is_front: bool = False, was_deferred: bool = False
) -> ReadyTurn:
    return ReadyTurn(
        key=TurnKey(JobId(name), "c", "a", 0),
        job_priority=priority,
        rounds_completed=0,
        conversation_order=order,
        agent_order=0,
        ready_order=order,
        path=1.0,
        is_front=is_front,
        was_deferred=was_deferred,
    )


class Line:
    """A queue for which the test sets the pressure and the conversations that have begun."""

    def __init__(self, policy: str, *turns: ReadyTurn, begun: Iterable[str] = ()) -> None:
        self.begun = set(begun)
        self.is_pressed = True
        self.queue = BegunFirst(POLICIES[policy], lambda key: key.job_id in self.begun, lambda: self.is_pressed)
        for each in turns:
            self.queue.push(each)

    def rest(self) -> list[str]:
        return [self.queue.pop().key.job_id for _ in range(len(self.queue))]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_begun_conversations_go_first_and_the_others_in_policy_order(policy: str) -> None:
    """They go first whatever the policy says; the order that is shown is the order in which turns start."""
    turns = [waiting(name, order) for order, name in enumerate(["n0", "n1", "b0", "n2", "b1"])]
    line = Line(policy, *turns, begun=["b0", "b1"])
    assert [each.key.job_id for each in line.queue.heads(5)] == ["b0", "b1", "n0", "n1", "n2"]
    assert line.rest() == ["b0", "b1", "n0", "n1", "n2"]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_pressure_nothing_changes(policy: str) -> None:
    """Turns that were put aside start in turn with the others when the pressure is over."""
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


def test_turns_that_were_on_a_slot_or_deferred_go_ahead_of_all() -> None:
    """Such a turn's conversation has begun, even if it is not recorded as begun."""
    held, front = waiting("h", 1, was_deferred=True), waiting("f", 2, is_front=True)
    line = Line("fifo", waiting("b", 0), held, front, begun=["b"])
    assert line.queue.has_front
    assert line.rest() == ["f", "h", "b"]


def test_a_turn_put_aside_is_next_when_the_pressure_is_over() -> None:
    """Turns that were put aside alternate with others, and stay behind one that was passed often enough."""
    line = Line("fifo", waiting("n0", 0), waiting("n1", 1), waiting("b0", 2), begun=["b0"])
    assert line.queue.pop().key.job_id == "b0"
    for name in ("d0", "d1"):
        line.queue.push(waiting(name, 9, was_deferred=True))
    line.is_pressed = False
    assert line.rest() == ["d0", "d1", "n0", "n1"]


def test_no_job_of_a_higher_priority_is_put_aside() -> None:
    """It begins before jobs of lower priority go on. Among jobs of its own priority it waits as they do."""
    line = Line("fifo", waiting("urgent", 0, priority=5), waiting("b", 1), waiting("n", 2), begun=["b"])
    assert line.rest() == ["urgent", "b", "n"]
    line = Line("fifo", waiting("n", 0), waiting("b0", 1), waiting("b1", 2), begun=["b0", "b1"])
    assert line.queue.pop().key.job_id == "b0"
    line.queue.push(waiting("urgent", 3, priority=5))
    assert line.rest() == ["urgent", "b1", "n"]


def test_a_sibling_of_a_turn_that_has_started_has_begun() -> None:
    """A turn that was put aside returns to the queue when its conversation begins."""
    line = Line("fifo", waiting("n0", 0), waiting("n1", 1), waiting("b", 2), begun=["b"])
    assert line.queue.pop().key.job_id == "b"
    line.begun.add("n1")
    line.queue.note_begun(TurnKey(JobId("n1"), "c", "a", 0))
    assert line.rest() == ["n1", "n0"]


def test_a_search_puts_aside_a_bounded_number_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that many a new conversation begins after all, since a search may take only so long."""
    monkeypatch.setattr(begun_first, "MOVED_AT_ONCE", 3)
    line = Line("fifo", *(waiting(f"n{order}", order) for order in range(5)), waiting("b", 9), begun=["b"])
    assert line.rest() == ["n0", "b", "n1", "n2", "n3", "n4"]


@given(st.data())
def test_every_turn_goes_once_in_any_course_of_events(data: st.DataObject) -> None:
    """Turns are pushed, put back, dropped and begun, with pressure and without."""
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
    line.is_pressed = True
    line.begun.add("last")
    line.queue.push(waiting("last", 99, priority=-1))
    assert line.rest() == ["last"], "nobody is aside, so nobody there has a higher priority"


# Through the core


def started(core: SchedulingCore, *ended: TurnKey, context: int = CONTEXT) -> list[tuple[str, str, int]]:
    actions = core.handle(*(done(key, context) for key in ended))
    return [(key.job_id, key.conversation_id, key.round) for key in seated(actions)]


def talks(count: int, rounds: int = 3) -> SchedulingCore:
    """Return a core with two slots, and conversations whose turns take a tenth of the cache."""
    return core_of(ready(slots=2), jobs=[asks("j", 100, conversations=count, rounds=rounds)])


def keep_idle(core: SchedulingCore, tokens: int) -> None:
    """Leave an agent between two turns with this many tokens cached: it waits for one whose model has no worker."""
    job = asks("x", 100, 100, rounds=2)
    core.handle(admit(replace(job, agents=(job.agents[0], replace(job.agents[1], model="absent")))))
    core.handle(done(turn("x"), tokens))
    assert core.view.capacity().idle == {"m": tokens}


def bounded(*budgets: int | None) -> WorkingSet:
    """Return the working set of idle workers with these budgets."""
    in_flight = InFlightPool()
    for number, budget in enumerate(budgets):
        in_flight.open(f"w{number}", "m", 8, budget)
    return WorkingSet(in_flight)


def test_conversations_begin_until_they_fill_the_cache_and_then_go_on() -> None:
    """In fifo order all eight would begin before one goes on."""
    core = talks(8)
    rounds = []
    for number in range(4):
        ((_, _, round_number),) = started(core, turn("j", 0, conversation=number))
        rounds.append((round_number, "m" in core.view.capacity().pressed))
    assert rounds == sorted(rounds)
    assert rounds[0] == (0, False)
    assert rounds[-1] == (1, True)


def test_conversations_begin_again_only_when_there_is_clearly_room() -> None:
    """Between the two marks the pressure stays as it was.

    Without cached contexts to return to there is nothing to protect.
    """
    working_set = bounded(1000)
    filled = turn("x"), turn("y")
    for tokens, is_pressed in ((950, False), (951, True), (800, True), (799, False), (949, False), (1200, True)):
        working_set.end_turn(filled[0], "m", tokens - 100)
        working_set.end_turn(filled[1], "m", 100)
        assert working_set.is_pressed("m") is is_pressed
    working_set.forget(*filled[0][:2])
    assert not working_set.is_pressed("m")
    assert (PRESSED, RELIEVED) == (0.95, 0.8)


def test_no_slot_stays_idle_to_protect_cached_contexts() -> None:
    """If no begun conversation is ready, a new one begins while turns in flight hold less than half of the cache."""
    core = core_of(ready(slots=9))
    keep_idle(core, 2000)
    assert core.view.capacity().pressed == {"m"}
    assert list(seated(core.handle(admit(asks("a", 499)), admit(asks("b", 100))))) == [turn("a"), turn("b")]
    room = core.view.capacity().workers["w"]
    assert (room.reserved, room.budget) == (599, 1000)
    assert seated(core.handle(admit(asks("c", 100)))) == {}
    assert seated(core.handle(done(turn("b")))).keys() == {turn("c")}
    assert seated(core.handle(admit(asks("late", 1)))) == {}, "it waits, and is passed by none"
    assert not core.view.capacity().passed


def test_an_ended_conversations_contexts_are_forgotten() -> None:
    """However a conversation ends, its last turn leaves no context that a later turn would use."""
    core = talks(4, rounds=2)
    for number in range(4):
        started(core, turn("j", 0, conversation=number))
    assert core.view.capacity().idle == {"m": 4 * CONTEXT - 2 * CONTEXT}
    core.handle(events.JobCancelled(job_id=JobId("j")))
    core.handle(*(events.TurnCutOff(key=key) for key in core.view.capacity().workers["w"].needs))
    left = core.view.capacity()
    assert (left.idle, left.kept, left.pressed) == ({}, frozenset(), frozenset())


@pytest.mark.parametrize("mode", Mode)
def test_both_agents_of_a_conversation_begin_together(mode: Mode) -> None:
    """The second turn of a round counts as begun once the first has started."""
    core = core_of(ready(slots=1))
    keep_idle(core, 2000)
    (first,) = seated(core.handle(admit(asks("j", 100, 100, conversations=6, rounds=3, mode=mode))))
    (second,) = seated(core.handle(done(first, CONTEXT)))
    assert second[:2] == first[:2]
    assert second.agent_id != first.agent_id


def test_a_model_bounded_by_slots_is_never_under_pressure() -> None:
    """Nor is a model with a worker without a budget."""
    working_set = bounded(1000, None)
    working_set.end_turn(turn("x"), "m", 10**6)
    assert not working_set.is_pressed("m")
    assert working_set.may_begin("m")

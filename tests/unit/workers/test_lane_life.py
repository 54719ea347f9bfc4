"""The life of an engine on a lane: its table of steps, and the moves of its phase, over every course of events."""

import functools
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

import msgspec
import pytest
from msgspec.structs import replace

from workers import states
from workers.outcome import FailureReason
from workers.policy import lifecycle
from workers.policy.lane_life import MOVES, LaneEngine, LanePhase, LaneStep, diagram, load_step, next_step
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.policy.restart import RestartPolicy
from workers.states import PASSING, Hold, WorkerState

DESIGN: Final = Path(states.__file__).parent / "design.md"
LIMITS: Final = LifecycleLimits(
    start_s=60, stop_grace_s=5, restart=RestartPolicy(initial_s=1, max_s=4, failures=2, window_s=100, retry_s=300)
)
STEPS: Final = 40  # after which nothing new comes
BOTH: Final = (False, True)


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One lane with one worker, as its pool and its supervisor see it; ``next`` says that another model wants it."""

    now: Lifecycle = Lifecycle()
    is_turning: bool = False
    next: bool = False
    in_flight: bool = False

    @property
    def engine(self) -> LaneEngine:
        return LaneEngine(
            state=self.now.state,
            holds=self.now.holds,
            is_coming=self.now.state in {WorkerState.STARTING, WorkerState.BACKOFF}
            or (self.now.state is WorkerState.STOPPING and self.now.is_wanted),
            is_turning=self.is_turning,
            in_flight=int(self.in_flight),
        )

    def tell(self, *events: lifecycle.Event) -> "Lane":
        """Return the lane after events at its supervisor; an engine that ends asleep is not started again."""
        lane = self
        for event in events:
            before, lane = lane.now.state, lane.after(event)
            is_over = lane.engine.is_coming or lane.now.state is WorkerState.FAILED
            if lane.now.state is not before and is_over and Hold.ASLEEP in lane.now.holds:
                lane = lane.after(lifecycle.StopRequested(because="it slept"))
        return lane

    def after(self, event: lifecycle.Event) -> "Lane":
        now, actions = lifecycle.decide(self.now, event, 0.0, LIMITS)
        ends = any(isinstance(action, lifecycle.EndRequests) for action in actions)
        now = replace(now, failed_at=now.failed_at[:2], paused_at=(), because="")  # a few of each are enough
        return replace(self, now=now, in_flight=self.in_flight and not ends)


def after_engine(lane: Lane) -> Iterator[Lane]:
    """Yield the lanes after an event of the engine or of its supervisor's timer."""
    number = lane.now.incarnation
    yield lane.tell(lifecycle.EngineReady(incarnation=number))
    yield lane.tell(lifecycle.EngineBroken(incarnation=number, reason=FailureReason.STALLED_DECODE, because="silent"))
    yield lane.tell(lifecycle.EngineGone(incarnation=number, because="died", jitter=0.5))
    yield lane.tell(lifecycle.TimerElapsed(timer=lane.now.timer))
    yield replace(lane, in_flight=False)
    yield replace(lane, in_flight=lane.in_flight or lane.now.state is WorkerState.READY)


def after_others(lane: Lane) -> Iterator[Lane]:
    """Yield the lanes after an operator's or an update's request."""
    yield lane.tell(lifecycle.RestartRequested(because="an operator"))
    for hold in (Hold.OPERATOR, Hold.UPDATE):
        yield lane.tell(lifecycle.DrainRequested(because="held", hold=hold))
        yield lane.tell(lifecycle.ResumeRequested(because="held no more", hold=hold))


def after_pool(lane: Lane) -> Iterator[Lane]:
    """Yield the lanes after a step of the placement or the pool, and after the end of sleeping or waking."""
    phase, swap = lane.engine.phase, lifecycle.DrainRequested(because="swap", hold=Hold.SWAP)
    if phase in {LanePhase.READY, LanePhase.BROKEN}:
        yield replace(lane.tell(swap), next=True)
    if phase in {LanePhase.EMPTY, LanePhase.LEAVING}:
        yield replace(lane, next=True)
    if phase is LanePhase.READY and not lane.in_flight:
        yield lane.tell(swap)
    if phase is LanePhase.EMPTY:  # this model's turn comes, or another's engine has come and gone meanwhile
        free = replace(lane, next=False)
        for is_as_wanted in BOTH:
            yield loaded(free, load_step(free.engine, is_as_wanted=is_as_wanted))
    for is_left_alone in BOTH:
        yield stepped(
            lane, next_step(lane.engine, is_wanted=lane.next, is_left_alone=is_left_alone, can_sleep=lambda: True)
        )
    if lane.is_turning:
        turned = replace(lane, is_turning=False)
        yield turned
        if lane.engine.is_asleep and Hold.SWAP in lane.now.holds:
            yield turned.tell(lifecycle.ResumeRequested(because="it sleeps", hold=Hold.SWAP))
        elif lane.engine.is_asleep:
            yield turned.tell(lifecycle.ResumeRequested(because="it has woken", hold=Hold.ASLEEP))
            yield turned.tell(lifecycle.StopRequested(because="it did not wake"))


def loaded(lane: Lane, step: LaneStep) -> Lane:
    if step is LaneStep.WAKE:
        return replace(lane, is_turning=True)
    start = lifecycle.StartRequested()
    return lane.tell(start) if step is LaneStep.START else lane.tell(lifecycle.StopRequested(because="changed"), start)


def stepped(lane: Lane, step: LaneStep | None) -> Lane:
    match step:
        case LaneStep.DRAIN:
            return lane.tell(lifecycle.DrainRequested(because="wanted", hold=Hold.SWAP))
        case LaneStep.SLEEP:
            return replace(lane.tell(lifecycle.DrainRequested(because="left", hold=Hold.ASLEEP)), is_turning=True)
        case LaneStep.END:
            return lane.tell(lifecycle.StopRequested(because="left"))
        case _:
            return lane


@functools.cache
def transitions() -> list[tuple[Lane, Lane]]:
    """Return all reachable lanes, each with its successors; numbers that only grow are left out."""
    found: list[tuple[Lane, Lane]] = []
    seen: set[Lane] = set()
    level = [Lane()]
    for _ in range(STEPS):
        following = []
        for lane in level:
            for after in (*after_engine(lane), *after_others(lane), *after_pool(lane)):
                found.append((lane, after))
                shape = replace(after, now=replace(after.now, timer=0, incarnation=0))
                if shape not in seen:
                    seen.add(shape)
                    following.append(after)
        level = following
    assert not level, "there is more"
    return found


def test_the_moves_of_a_lane_are_those_of_the_table() -> None:
    """The engine, the pool and the operator may act in any order."""
    phases = {(before.engine.phase, after.engine.phase) for before, after in transitions()}
    assert {move for move in phases if move[0] is not move[1]} == {(old, new) for old in MOVES for new in MOVES[old]}


def test_no_engine_is_ended_for_another_model_while_turns_are_on_it() -> None:
    """Nor is it put to sleep; an engine that is being updated, or is falling asleep or waking, is left alone."""
    for lane, _ in transitions():
        engine = lane.engine
        step = next_step(engine, is_wanted=True, is_left_alone=False, can_sleep=lambda: True)
        if engine.in_flight or engine.is_turning or not engine.holds.isdisjoint(PASSING):
            assert step in {None, LaneStep.DRAIN} or engine.phase is LanePhase.BROKEN


def test_a_lane_that_another_model_wants_becomes_empty() -> None:
    """It does so once its turns have ended, in any course of events."""
    for lane in {lane for lane, _ in transitions() if lane.next}:
        now = lane
        for _ in range(8):
            now = replace(now, in_flight=False)
            now = now.tell(lifecycle.ResumeRequested(because="it is changed", hold=Hold.UPDATE))
            now = stepped(now, next_step(now.engine, is_wanted=True, is_left_alone=False, can_sleep=lambda: True))
            if now.is_turning:
                now = replace(now, is_turning=False)
                now = now.tell(lifecycle.ResumeRequested(because="it sleeps", hold=Hold.SWAP))
            elif now.now.state is WorkerState.STARTING:
                now = now.tell(lifecycle.EngineReady(incarnation=now.now.incarnation))
            elif now.now.has_process and now.engine.phase is not LanePhase.READY:
                now = now.tell(lifecycle.EngineGone(incarnation=now.now.incarnation, because="", jitter=0.5))
        assert now.engine.phase is LanePhase.EMPTY, lane


@pytest.mark.parametrize(
    ("engine", "is_wanted", "is_left_alone", "step"),
    [
        (LaneEngine(state=WorkerState.READY, in_flight=3), True, False, LaneStep.DRAIN),
        (LaneEngine(state=WorkerState.FAILED), False, False, LaneStep.END),
        (LaneEngine(state=WorkerState.BACKOFF), False, True, LaneStep.END),
        (LaneEngine(state=WorkerState.BACKOFF), True, False, LaneStep.END),
        (LaneEngine(state=WorkerState.BACKOFF), False, False, None),
        (LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP}), is_turning=True), True, False, None),
        (LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP}), in_flight=1), True, False, None),
        (LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP})), True, False, LaneStep.SLEEP),
        (
            LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP, Hold.OPERATOR})),
            True,
            False,
            LaneStep.END,
        ),
        (LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP, Hold.UPDATE})), True, False, None),
        (LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.OPERATOR})), False, False, None),
        (LaneEngine(state=WorkerState.READY), False, True, None),
    ],
)
def test_each_row_of_the_table_of_steps_holds(
    engine: LaneEngine, step: LaneStep | None, *, is_wanted: bool, is_left_alone: bool
) -> None:
    """The first row that matches decides what the pool does."""
    assert next_step(engine, is_wanted=is_wanted, is_left_alone=is_left_alone, can_sleep=lambda: True) is step


def test_an_engine_that_cannot_sleep_is_ended() -> None:
    """The question is never put to an engine with a turn on it."""
    left = LaneEngine(state=WorkerState.DRAINING, holds=frozenset({Hold.SWAP}))
    assert next_step(left, is_wanted=True, is_left_alone=False, can_sleep=lambda: False) is LaneStep.END
    busy = replace(left, in_flight=1)
    assert next_step(busy, is_wanted=True, is_left_alone=False, can_sleep=lambda: pytest.fail("asked")) is None


@pytest.mark.parametrize(("state", "is_as_wanted"), [*product(WorkerState, BOTH)])
def test_a_model_is_woken_where_its_engine_sleeps(state: WorkerState, *, is_as_wanted: bool) -> None:
    """An engine that would wake with old weights is ended.

    Then, or without a sleeping engine, another one is started.
    """
    sleeping = LaneEngine(state=state, holds=frozenset({Hold.ASLEEP}))
    wake = LaneStep.WAKE if is_as_wanted else LaneStep.RESTART
    assert load_step(sleeping, is_as_wanted=is_as_wanted) is (wake if state in states.SERVING else LaneStep.START)


def test_the_diagram_in_the_design_notes_is_the_table_of_moves() -> None:
    """A reader of the notes reads what the code allows."""
    assert f"```mermaid\n{diagram()}\n```" in DESIGN.read_text(encoding="utf-8")

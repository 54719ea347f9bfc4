import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from workers import states
from workers.errors import IllegalTransition
from workers.outcome import FailureReason
from workers.policy.lifecycle import (
    KILL_LIMIT_S,
    Action,
    DrainRequested,
    EndRequests,
    EngineAnswered,
    EngineBegun,
    EngineBroken,
    EngineExited,
    EngineGone,
    EngineReady,
    Event,
    FailureCounted,
    FailureExplained,
    KeepIncident,
    KillEngine,
    RestartRequested,
    ResumeRequested,
    SpawnEngine,
    StartRequested,
    StartTimer,
    StopRequested,
    TerminateEngine,
    TimerElapsed,
    decide,
)
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.policy.restart import RestartPolicy
from workers.states import ALLOWED, Hold, WorkerState

LIMITS = LifecycleLimits(
    start_s=60, stop_grace_s=5, restart=RestartPolicy(initial_s=1, max_s=4, failures=3, window_s=100, retry_s=300)
)
DESIGN = Path(states.__file__).parent / "design.md"


class Life:
    """One supervision and the actions it asked for, event by event."""

    def __init__(self, limits: LifecycleLimits | None = None) -> None:
        self.now = Lifecycle()
        self.at = 0.0
        self.limits = limits or LIMITS

    def tell(self, event: Event) -> tuple[Action, ...]:
        self.now, actions = decide(self.now, event, self.at, self.limits)
        return actions

    def gone(self, because: str = "it died") -> tuple[Action, ...]:
        return self.tell(EngineGone(incarnation=self.now.incarnation, because=because, jitter=0.0))

    def ready(self) -> tuple[Action, ...]:
        return self.tell(EngineReady(incarnation=self.now.incarnation))

    def timer(self) -> tuple[Action, ...]:
        return self.tell(TimerElapsed(timer=self.now.timer))


@pytest.fixture
def life() -> Life:
    life = Life()
    life.tell(StartRequested())
    return life


def test_a_start_spawns_a_process_and_is_bounded() -> None:
    """Every wait has a bound. That of loading begins with the process, not while others start on its device."""
    life = Life()
    assert life.tell(StartRequested()) == (SpawnEngine(incarnation=1),)
    assert life.tell(EngineBegun(incarnation=1)) == (StartTimer(timer=life.now.timer, after_s=60),)
    assert (life.now.state, life.ready(), life.now.state) == (WorkerState.STARTING, (), WorkerState.READY)


def test_an_unexpected_exit_ends_the_requests_and_backs_off(life: Life) -> None:
    """Requests fail with their reason, and another incarnation follows after a pause."""
    life.ready()
    assert life.gone("exited with status 0") == (
        EndRequests(reason=FailureReason.ENGINE_DIED, because="exited with status 0", brought_down=True),
        StartTimer(timer=life.now.timer, after_s=1.0),
    )
    assert life.now.state is WorkerState.BACKOFF
    assert life.timer() == (SpawnEngine(incarnation=2),)


def test_the_pause_doubles_up_to_its_bound_and_then_the_worker_gives_up(life: Life) -> None:
    """A crash loop has an end; old failures are forgiven."""
    pauses = []
    for _ in range(2):
        pauses += [action.after_s for action in life.gone() if isinstance(action, StartTimer)]
        life.timer()
    life.gone()
    assert (pauses, life.now.state) == ([1.0, 2.0], WorkerState.FAILED)
    assert "gave up after 3 failures in 100 s, the last: it died" in life.now.because
    assert isinstance(life.tell(StartRequested())[0], SpawnEngine)
    assert life.now.failed_at == ()


def test_failures_outside_the_window_do_not_count(life: Life) -> None:
    """An engine that fails once a day is started again for ever."""
    for day in range(10):
        life.at = day * 101.0
        life.gone()
        life.timer()
    assert life.now.state is WorkerState.STARTING


def test_a_death_under_investigation_does_not_count_yet(life: Life) -> None:
    """The pauses grow nevertheless. It counts once no request explains it, and never if another program killed it."""
    for _ in range(9):
        life.ready()
        life.tell(EngineGone(incarnation=life.now.incarnation, because="died", jitter=0.0, is_deferred=True))
        assert (life.now.state, life.now.failed_at) == (WorkerState.BACKOFF, ())
        life.timer()
    life.ready()
    (_, pause) = life.tell(EngineGone(incarnation=10, because="killed", jitter=0.0, is_outside=True))
    assert isinstance(pause, StartTimer)
    assert (pause.after_s, life.now.failed_at) == (4.0, ())
    life.timer()
    for _ in range(2):
        life.tell(FailureCounted())
    assert (life.now.state, len(life.now.failed_at)) == (WorkerState.STARTING, 2)
    life.gone()
    assert life.now.state is WorkerState.FAILED


def test_the_first_deaths_under_investigation_lengthen_no_pause(life: Life) -> None:
    """All turns wait for the result; an engine that goes on dying still gets pauses."""
    pauses = []
    for _ in range(5):
        life.ready()
        told = life.tell(EngineGone(incarnation=life.now.incarnation, because="died", jitter=0.0, is_deferred=True))
        pauses += [action.after_s for action in told if isinstance(action, StartTimer)]
        life.timer()
    assert pauses == [1.0, 1.0, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("proof", [EngineAnswered(incarnation=4), FailureExplained()], ids=["answer", "conviction"])
def test_pauses_start_small_again_after_an_answer_or_a_conviction(life: Life, proof: Event) -> None:
    """Either proves that the engine is not the cause of the failures before it."""
    for _ in range(3):
        life.ready()
        life.tell(EngineGone(incarnation=life.now.incarnation, because="died", jitter=0.0, is_deferred=True))
        life.timer()
    life.ready()
    assert life.tell(proof) == ()
    (_, pause) = life.tell(EngineGone(incarnation=4, because="died", jitter=0.0, is_deferred=True))
    assert isinstance(pause, StartTimer)
    assert pause.after_s == 1.0


def test_a_kill_with_suspects_is_investigated_and_one_without_counts(life: Life) -> None:
    """A stall has suspects; an engine that refuses every request has none."""
    for is_deferred, counted in ((True, 0), (False, 1)):
        life.ready()
        reason = FailureReason.STALLED_DECODE
        incarnation = life.now.incarnation
        life.tell(EngineBroken(incarnation=incarnation, reason=reason, because="silent", is_deferred=is_deferred))
        life.gone()
        assert len(life.now.failed_at) == counted
        life.timer()


def test_a_stop_goes_from_sigterm_to_sigkill_to_giving_up(life: Life) -> None:
    """SIGTERM to the group, the grace period, SIGKILL to the tree, and a bound even on that."""
    life.ready()
    assert life.tell(StopRequested(because="bye")) == (
        EndRequests(reason=FailureReason.SHUTDOWN, because="bye"),
        TerminateEngine(),
        StartTimer(timer=life.now.timer, after_s=5),
    )
    assert life.timer() == (KillEngine(), StartTimer(timer=life.now.timer, after_s=KILL_LIMIT_S))
    assert (life.timer(), life.now.state) == ((), WorkerState.FAILED)
    assert "have not died" in life.now.because
    assert life.tell(StartRequested()) == ()  # the old tree may still hold the device
    assert (life.gone(), life.now.state) == ((SpawnEngine(incarnation=2),), WorkerState.STARTING)


def test_a_hung_tree_that_was_asked_to_end_is_stopped_once_it_has_died(life: Life) -> None:
    """No new engine is wanted."""
    life.ready()
    life.tell(StopRequested(because="bye"))
    life.timer()
    assert (life.timer(), life.now.state) == ((), WorkerState.FAILED)
    assert (life.gone(), life.now.state) == ((), WorkerState.STOPPED)


@pytest.mark.parametrize("retry_s", [None, 300.0])
def test_a_worker_goes_on_once_a_process_that_hung_in_the_kernel_has_died(retry_s: float | None) -> None:
    """It has not given up: its engine was killed for a failure, as any broken one (Process groups)."""
    life = Life(replace(LIMITS, restart=dataclasses.replace(LIMITS.restart, retry_s=retry_s)))
    life.tell(StartRequested())
    life.ready()
    life.tell(EngineBroken(incarnation=1, reason=FailureReason.STALLED_DECODE, because="silent"))
    assert (life.timer(), life.now.state) == ((), WorkerState.FAILED)
    assert (life.gone(), life.now.state) == ((SpawnEngine(incarnation=2),), WorkerState.STARTING)
    assert len(life.now.failed_at) == 1


def test_a_stopped_engine_is_not_started_again(life: Life) -> None:
    """An exit on request is no failure."""
    life.tell(StopRequested(because="bye"))
    assert (life.gone(), life.now.state, life.now.failed_at) == ((), WorkerState.STOPPED, ())


@pytest.mark.parametrize("word", [ResumeRequested(because="back"), RestartRequested(because="back")])
def test_an_operator_may_start_an_ending_engine_again(life: Life, word: ResumeRequested | RestartRequested) -> None:
    """The operator's last request counts, and is no failure; other requests do not start what was stopped."""
    life.ready()
    life.tell(StopRequested(because="bye"))
    assert life.tell(ResumeRequested(because="woken", hold=Hold.ASLEEP)) == ()
    assert life.tell(StartRequested()) == ()
    assert not life.now.is_wanted
    assert life.tell(word) == ()
    assert (life.gone(), life.now.state, life.now.failed_at) == (
        (SpawnEngine(incarnation=2),), WorkerState.STARTING, (),
    )  # fmt: skip


def test_a_worker_that_leaves_is_not_restarted(life: Life) -> None:
    """Another one takes its place."""
    life.ready()
    life.tell(DrainRequested(because="it leaves", hold=Hold.LEAVING))
    life.tell(StopRequested(because="it leaves"))
    life.tell(ResumeRequested(because="back"))
    assert (life.gone(), life.now.state) == ((), WorkerState.STOPPED)


def test_a_second_stop_kills_at_once(life: Life) -> None:
    """An operator may end the grace period."""
    life.tell(StopRequested(because="bye"))
    kill = life.tell(StopRequested(because="now", at_once=True))
    assert kill == (KillEngine(), StartTimer(timer=life.now.timer, after_s=KILL_LIMIT_S))
    assert life.tell(StopRequested(because="now", at_once=True)) == ()


def test_a_broken_engine_is_killed_and_restarted(life: Life) -> None:
    """A stall kills the whole tree, and the next incarnation starts only when the tree is gone."""
    life.ready()
    broken = EngineBroken(incarnation=1, reason=FailureReason.STALLED_DECODE, because="silent")
    assert life.tell(broken) == (
        EndRequests(reason=FailureReason.STALLED_DECODE, because="silent", suspects={}),
        KillEngine(),
        StartTimer(timer=life.now.timer, after_s=KILL_LIMIT_S),
    )
    assert life.tell(broken) == ()
    assert life.gone() == (StartTimer(timer=life.now.timer, after_s=1.0),)
    assert (life.now.state, life.now.because) == (WorkerState.BACKOFF, "silent")


def test_an_engine_that_never_becomes_ready_is_killed(life: Life) -> None:
    """The start has a limit."""
    assert KillEngine() in life.timer()
    assert (life.now.state, life.now.because) == (WorkerState.STOPPING, "not ready within 60 s")


def test_a_drained_worker_is_not_ready_and_stops_in_order(life: Life) -> None:
    """A drained worker admits no new turns and ends none."""
    life.ready()
    assert (life.tell(DrainRequested(because="going")), life.now.state) == ((), WorkerState.DRAINING)
    assert TerminateEngine() in life.tell(StopRequested(because="bye"))


def test_news_of_an_earlier_engine_and_old_timers_change_nothing(life: Life) -> None:
    """A late observation must not cause a change."""
    old_timer = life.now.timer
    life.ready()
    life.gone()
    life.timer()
    before = life.now
    for event in (
        EngineReady(incarnation=1),
        EngineGone(incarnation=1, because="late", jitter=0.0),
        EngineBroken(incarnation=1, reason=FailureReason.STALLED_DECODE, because="late"),
        TimerElapsed(timer=old_timer),
    ):
        assert (life.tell(event), life.now) == ((), before)


@pytest.mark.parametrize("failed_at", [(), (0.0,), (0.0, 0.0, 0.0)])
def test_an_adopted_engine_keeps_its_past(
    failed_at: tuple[float, ...],
) -> None:
    """Its number, its failures and an operator's hold survive: a crash loop has an end across an upgrade too."""
    life = Life()
    held = frozenset({Hold.OPERATOR, Hold.ADAPTERS})
    life.now = Lifecycle(incarnation=6, is_adopting=True, holds=held, failed_at=failed_at, paused_at=failed_at)
    assert life.tell(StartRequested(after=9)) == (SpawnEngine(incarnation=7),)
    assert (life.now.holds, life.now.failed_at, life.now.paused_at) == (held, failed_at, failed_at)
    assert (life.ready(), life.now.state) == ((), WorkerState.DRAINING)
    life.tell(StopRequested(because="bye", at_once=True))
    life.gone()
    life.tell(StartRequested())
    assert (life.now.holds, life.now.failed_at) == (frozenset({Hold.ADAPTERS}), ())


def test_an_incident_is_recorded_of_an_engine_that_ends_unexpectedly(life: Life) -> None:
    """Its cause is the reason of the kill, if there was one. A stop, a restart and an old engine leave none."""
    exited = EngineExited(incarnation=1, because="exited with status 1")
    assert life.tell(exited) == (KeepIncident(because="exited with status 1"),)
    life.ready()
    assert life.tell(replace(exited, incarnation=0)) == ()
    life.tell(EngineBroken(incarnation=1, reason=FailureReason.STALLED_DECODE, because="silent"))
    life.tell(StopRequested(because="bye"))
    assert life.tell(exited) == (KeepIncident(because="silent"),)
    for asked in (StopRequested(because="bye"), RestartRequested(because="an operator")):
        other = Life()
        other.tell(StartRequested())
        other.ready()
        other.tell(asked)
        assert other.tell(exited) == ()


def all_events(now: Lifecycle) -> Iterator[Event]:
    for incarnation in (now.incarnation - 1, now.incarnation):
        yield EngineReady(incarnation=incarnation)
        yield EngineBroken(incarnation=incarnation, reason=FailureReason.STALLED_PREFILL, because="silent")
        yield EngineGone(incarnation=incarnation, because="died", jitter=0.5)
        yield EngineAnswered(incarnation=incarnation)
        for is_deferred, is_outside in ((True, False), (False, True)):
            yield EngineGone(
                incarnation=incarnation, because="died", jitter=0.5, is_outside=is_outside, is_deferred=is_deferred
            )
    yield from (FailureCounted(), FailureExplained())
    for timer in (now.timer - 1, now.timer):
        yield TimerElapsed(timer=timer)
    yield StartRequested()
    yield from (DrainRequested(because="drain", hold=hold) for hold in KINDS)
    yield from (ResumeRequested(because="over", hold=hold) for hold in KINDS)
    yield StopRequested(because="stop")
    yield StopRequested(because="stop", at_once=True)


# An operator's hold and a swap's end with a start; the others are all as that of an update.
KINDS = (Hold.OPERATOR, Hold.SWAP, Hold.UPDATE)


@functools.cache
def reachable(depth: int) -> set[Lifecycle]:
    """Return all states after this many events at one time; numbers that only grow are left out."""
    seen: dict[Lifecycle, Lifecycle] = {}
    level = [Lifecycle()]
    for _ in range(depth):
        following = []
        for now in level:
            for event in all_events(now):
                after, _ = decide(now, event, 0.0, LIMITS)
                shape = replace(after, timer=0, incarnation=0, because="")
                if shape not in seen:
                    seen[shape] = after
                    following.append(after)
        level = following
    return set(seen.values())


def test_every_state_is_reached_and_every_move_is_legal() -> None:
    """The product of reachable states and events makes only moves of the table (``decide`` checks each)."""
    assert {now.state for now in reachable(12)} == set(WorkerState)


def test_every_state_can_be_stopped_for_good() -> None:
    """From every state, a stop and the death of the tree end with no process and none planned."""
    for now in reachable(12):
        stopped, _ = decide(now, StopRequested(because="stop", at_once=True), 0.0, LIMITS)
        if stopped.has_process:
            stopped, _ = decide(
                stopped, EngineGone(incarnation=stopped.incarnation, because="killed", jitter=0.0), 0.0, LIMITS
            )
        assert not stopped.has_process
        assert stopped.state in {WorkerState.STOPPED, WorkerState.FAILED}


def test_a_worker_is_held_until_every_hold_is_released(life: Life) -> None:
    """A weight update does not end an operator's drain, and neither starts a stopped worker."""
    life.ready()
    for hold in Hold:
        life.tell(DrainRequested(because="hold", hold=hold))
    states = []
    for hold in sorted(Hold):
        life.tell(ResumeRequested(because="over", hold=hold))
        states.append(life.now.state)
    assert states == [*[WorkerState.DRAINING] * (len(Hold) - 1), WorkerState.READY]
    life.tell(StopRequested(because="enough"))
    life.gone()
    assert life.tell(ResumeRequested(because="over", hold=Hold.STALE_WEIGHTS)) == ()
    assert life.now.state is WorkerState.STOPPED


def test_an_engine_behind_in_weights_becomes_ready_when_it_is_up_to_date(life: Life) -> None:
    """It answers, and gets no traffic until its weights are the current ones."""
    life.tell(DrainRequested(because="weights 3", hold=Hold.STALE_WEIGHTS))
    life.ready()
    assert (life.now.state, "not the model's current" in life.now.because) == (WorkerState.DRAINING, True)
    life.tell(ResumeRequested(because="weights 3", hold=Hold.STALE_WEIGHTS))
    assert life.now.state is WorkerState.READY


def test_a_spawn_never_meets_a_tree_that_may_be_alive() -> None:
    """Two incarnations never run at the same time, in any course of events."""
    for now in reachable(12):
        for event in all_events(now):
            _, actions = decide(now, event, 0.0, LIMITS)
            if any(isinstance(action, SpawnEngine) for action in actions):
                assert not now.has_process or isinstance(event, EngineGone)


def test_the_table_names_every_state_and_the_design_note_draws_it() -> None:
    """The design note's diagram is made from the table."""
    assert set(ALLOWED) == set(WorkerState)
    assert states.diagram() in DESIGN.read_text()
    for old, new in itertools.product(WorkerState, repeat=2):
        if new not in ALLOWED[old]:
            with pytest.raises(IllegalTransition):
                states.check_move(old, new)


@given(st.integers(1, 4), st.floats(0, 1, exclude_max=True))
def test_the_restart_delay_stays_within_its_bounds(count: int, jitter: float) -> None:
    """Jitter spreads restarts, and never lengthens a pause or cuts more than half of it."""
    policy = RestartPolicy(initial_s=1, max_s=5, failures=5, window_s=10)
    delay = policy.delay_s(count, jitter)
    full = min(5.0, 2.0 ** (count - 1))
    assert full / 2 <= delay <= full


def test_a_worker_of_a_library_may_never_give_up() -> None:
    """``failures=None`` waits for ever, as for an attached server; the configuration requires a number."""
    assert not RestartPolicy(failures=None).are_too_many(tuple(map(float, range(1000))))
    assert RestartPolicy(failures=1).are_too_many((0.0,))

"""The decisions of a worker's supervisor: a state and an event in, a state and actions out. Pure.

Every event that speaks of an engine names its incarnation, and every timer its number, so that news of an engine that
is gone already changes nothing.
"""

from dataclasses import dataclass, replace
from typing import Final

from workers.outcome import FailureReason
from workers.policy.restart import RestartPolicy
from workers.states import HELD, Hold, WorkerState, check_move

KILL_LIMIT_S: Final = (
    30.0  # from SIGKILL to an empty tree; beyond it a process hangs in the kernel (a driver, a dead disk)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """All that the supervisor decides by."""

    state: WorkerState = WorkerState.STOPPED
    because: str = "not started"
    incarnation: int = 0
    has_process: bool = False  # the tree of this incarnation may still have members
    is_wanted: bool = False  # when the engine is gone, another is to follow
    is_killed: bool = False  # SIGKILL was sent to this incarnation
    is_broken: bool = False  # it was found of no more use, and its end is an incident whoever stops it meanwhile
    is_asked: bool = False  # an operator wants this incarnation replaced: its end is no failure
    holds: frozenset[Hold] = frozenset()  # for which nothing new is admitted, by later incarnations neither
    is_half_open: bool = False  # one try after giving up: a failure gives up again at once
    failed_at: tuple[float, ...] = ()  # monotonic seconds of the failures that count
    timer: int = 0  # the number of the only timer that means anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator configured, in seconds."""

    start_s: float
    stop_grace_s: float
    restart: RestartPolicy


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequested:
    """Somebody wants an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Somebody wants no engine; ``at_once`` leaves out the grace."""

    because: str
    at_once: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Nothing new is to be admitted, until what it is held for is over."""

    because: str
    hold: Hold = Hold.OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """What it was held for is over; an operator also starts a worker that gave up or was stopped."""

    because: str
    hold: Hold = Hold.OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRequested:
    """Somebody wants another engine in place of this one, now."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBegun:
    """The engine's process is being started; until now others were, and its time has not run."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The readiness probe has succeeded."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBroken:
    """The engine lives and is of no more use."""

    incarnation: int
    reason: FailureReason
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGone:
    """The engine's whole tree is gone, or it never came to be; ``jitter`` in [0, 1) spreads the restart."""

    incarnation: int
    because: str
    jitter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerElapsed:
    """A timer of ours has run down."""

    timer: int


Request = StartRequested | StopRequested | DrainRequested | ResumeRequested | RestartRequested
News = EngineBegun | EngineReady | EngineBroken | EngineGone
Event = Request | News | TimerElapsed


# Actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnEngine:
    """Start the process of this incarnation and probe it until it is ready."""

    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateEngine:
    """Send SIGTERM to the engine's group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillEngine:
    """Kill the engine's whole tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimer:
    """Send ``TimerElapsed`` with this number after so many seconds."""

    timer: int
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRequests:
    """End all requests in flight; the reason ``shutdown`` tells a stop that was asked for from a breakdown.

    ``brought_down`` says that the engine ended by itself under them: each of them may be the cause.
    """

    reason: FailureReason
    because: str
    brought_down: bool = False


Action = SpawnEngine | TerminateEngine | KillEngine | StartTimer | EndRequests
Decision = tuple[Supervision, tuple[Action, ...]]

_RUNNING: Final = frozenset({WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING})
_SERVING: Final = frozenset({WorkerState.READY, WorkerState.DRAINING})


def decide(now: Supervision, event: Event, at: float, limits: Limits) -> Decision:
    """Return what follows from ``event`` at ``at`` (monotonic seconds)."""
    match event:
        case EngineBegun() | EngineReady() | EngineBroken() | EngineGone():
            return _news(now, event, at, limits) if event.incarnation == now.incarnation else (now, ())
        case TimerElapsed():
            return _elapsed(now, limits) if event.timer == now.timer else (now, ())
        case _:
            return _asked(now, event, limits)


def _asked(now: Supervision, event: Request, limits: Limits) -> Decision:
    match event:
        case StartRequested():
            return _start(replace(now, holds=now.holds - {Hold.OPERATOR}), "asked to start")
        case StopRequested():
            return _stop(now, event, limits)
        case DrainRequested():
            return _drain(now, event)
        case ResumeRequested():
            return _resume(now, event)
        case RestartRequested():
            return _restart(now, event, limits)


def _news(now: Supervision, event: News, at: float, limits: Limits) -> Decision:
    match event:
        case EngineBegun() if now.state is WorkerState.STARTING:
            return now, (StartTimer(timer=now.timer, after_s=limits.start_s),)
        case EngineReady() if now.state is WorkerState.STARTING:
            ready = replace(now, is_half_open=False)
            if now.holds:
                told = "; ".join(HELD[hold] for hold in sorted(now.holds))
                return _move(ready, WorkerState.DRAINING, f"the engine answers; {told}"), ()
            return _move(ready, WorkerState.READY, "the engine answers"), ()
        case EngineBroken() if now.state in _SERVING:
            return _kill(now, event.reason, event.because)
        case EngineGone() if now.has_process:
            return _gone(now, event, at, limits)
        case _:
            return now, ()


def _drain(now: Supervision, event: DrainRequested) -> Decision:
    held = replace(now, holds=now.holds | {event.hold})
    return (_move(held, WorkerState.DRAINING, event.because) if now.state is WorkerState.READY else held), ()


def _resume(now: Supervision, event: ResumeRequested) -> Decision:
    free = replace(now, holds=now.holds - {event.hold})
    if now.state is WorkerState.DRAINING:
        return (free if free.holds else _move(free, WorkerState.READY, event.because)), ()
    return _start(free, event.because) if event.hold is Hold.OPERATOR else (free, ())


def _restart(now: Supervision, event: RestartRequested, limits: Limits) -> Decision:
    if now.state in _RUNNING:
        moved = replace(_move(now, WorkerState.STOPPING, event.because), is_wanted=True, is_asked=True)
        end = EndRequests(reason=FailureReason.ENGINE_DIED, because=event.because)
        return moved, (end, TerminateEngine(), StartTimer(timer=moved.timer, after_s=limits.stop_grace_s))
    if now.state is WorkerState.BACKOFF:
        return _spawn(replace(now, failed_at=()), event.because)
    return _start(now, event.because)


def _move(now: Supervision, state: WorkerState, because: str) -> Supervision:
    check_move(now.state, state)
    # A new number makes every timer of the state that is left meaningless.
    return replace(now, state=state, because=because, timer=now.timer + 1)


def _start(now: Supervision, because: str) -> Decision:
    if now.state not in {WorkerState.STOPPED, WorkerState.FAILED} or now.has_process:
        return now, ()
    return _spawn(replace(now, failed_at=(), is_half_open=False), because)


def _spawn(now: Supervision, because: str) -> Decision:
    moved = replace(
        _move(now, WorkerState.STARTING, because),
        incarnation=now.incarnation + 1,
        has_process=True,
        is_wanted=True,
        is_killed=False,
        is_broken=False,
        is_asked=False,
    )
    return moved, (SpawnEngine(incarnation=moved.incarnation),)


def _stop(now: Supervision, event: StopRequested, limits: Limits) -> Decision:
    if now.state in _RUNNING:
        moved = replace(_move(now, WorkerState.STOPPING, event.because), is_wanted=False, is_killed=event.at_once)
        signal = KillEngine() if event.at_once else TerminateEngine()
        wait_s = KILL_LIMIT_S if event.at_once else limits.stop_grace_s
        end = EndRequests(reason=FailureReason.SHUTDOWN, because=event.because)
        return moved, (end, signal, StartTimer(timer=moved.timer, after_s=wait_s))
    if now.state is WorkerState.STOPPING:
        unwanted = replace(now, is_wanted=False)
        return _kill_after_grace(unwanted) if event.at_once and not now.is_killed else (unwanted, ())
    if now.state in {WorkerState.BACKOFF, WorkerState.FAILED} and not now.has_process:
        return replace(_move(now, WorkerState.STOPPED, event.because), is_wanted=False), ()
    return now, ()


def _kill(now: Supervision, reason: FailureReason, because: str) -> Decision:
    moved = replace(_move(now, WorkerState.STOPPING, because), is_wanted=True, is_killed=True, is_broken=True)
    end = EndRequests(reason=reason, because=because, brought_down=True)
    return moved, (end, KillEngine(), StartTimer(timer=moved.timer, after_s=KILL_LIMIT_S))


def _kill_after_grace(now: Supervision) -> Decision:
    killing = replace(now, is_killed=True, timer=now.timer + 1)
    return killing, (KillEngine(), StartTimer(timer=killing.timer, after_s=KILL_LIMIT_S))


def _gone(now: Supervision, event: EngineGone, at: float, limits: Limits) -> Decision:
    gone = replace(now, has_process=False)
    if now.state is WorkerState.FAILED:
        return _await_retry(gone, limits) if now.is_wanted else (gone, ())
    if now.state is WorkerState.STOPPING and not now.is_wanted:
        return _move(gone, WorkerState.STOPPED, now.because), ()
    if now.state is WorkerState.STOPPING and now.is_asked:
        return _spawn(gone, now.because)
    if now.state is WorkerState.STOPPING:
        return _fail(gone, now.because, at, event.jitter, limits)
    failed, actions = _fail(gone, event.because, at, event.jitter, limits)
    end = EndRequests(reason=FailureReason.ENGINE_DIED, because=event.because, brought_down=True)
    return failed, (end, *actions)


def _fail(gone: Supervision, because: str, at: float, jitter: float, limits: Limits) -> Decision:
    """Count a failure, and wait for the next try, or give up."""
    failed_at = (*limits.restart.recent(gone.failed_at, at), at)
    delay_s = None if gone.is_half_open else limits.restart.delay_s(failed_at, jitter)
    gone = replace(gone, failed_at=failed_at)
    if delay_s is not None:
        waiting = _move(gone, WorkerState.BACKOFF, because)
        return waiting, (StartTimer(timer=waiting.timer, after_s=delay_s),)
    text = f"gave up after {len(failed_at)} failures in {limits.restart.window_s:g} s, the last: {because}"
    if gone.is_half_open:
        text = f"gave up again: {because}"
    return _await_retry(_move(gone, WorkerState.FAILED, text), limits)


def _await_retry(failed: Supervision, limits: Limits) -> Decision:
    if limits.restart.retry_s is None:
        return failed, ()
    waiting = replace(failed, timer=failed.timer + 1)
    return waiting, (StartTimer(timer=waiting.timer, after_s=limits.restart.retry_s),)


def _elapsed(now: Supervision, limits: Limits) -> Decision:
    match now.state:
        case WorkerState.STARTING:
            return _kill(now, FailureReason.ENGINE_UNREACHABLE, f"not ready within {limits.start_s:g} s")
        case WorkerState.BACKOFF:
            return _spawn(now, f"restarted: {now.because}")
        case WorkerState.FAILED if not now.has_process:
            return _spawn(replace(now, is_half_open=True), "one more try, after giving up")
        case WorkerState.STOPPING if not now.is_killed:
            return _kill_after_grace(now)
        case WorkerState.STOPPING:
            text = f"{now.because}; and its processes have not died {KILL_LIMIT_S:g} s after SIGKILL"
            return _move(now, WorkerState.FAILED, text), ()
        case _:
            return now, ()

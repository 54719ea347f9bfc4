"""The decisions of a worker's supervisor: a state and an event in, a state and actions out. Pure.

Events carry their engine's incarnation, and timers a number, so that late news of a former engine changes nothing.
"""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.outcome import FailureReason
from workers.policy.lifecycle_state import Lifecycle, LifecycleLimits
from workers.states import SERVING, Hold, WorkerState, check_move

TRIED_AT_ONCE: Final = 2  # deaths after the first that lengthen no pause while trials explain them: others wait for it
KILL_LIMIT_S: Final = 30.0  # from SIGKILL to an empty tree; beyond it a process hangs in the kernel (a driver, a disk)
_RUNNING: Final = SERVING | {WorkerState.STARTING}


class StartRequested(msgspec.Struct, frozen=True, kw_only=True):
    """An engine is wanted, with a number above ``after``: the number of another model's engine on its lane."""

    because: str = "asked to start"
    after: int = 0


class StopRequested(msgspec.Struct, frozen=True, kw_only=True):
    """No engine is wanted; ``at_once`` skips the grace."""

    because: str
    at_once: bool = False


class DrainRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Admission stops until the hold is over."""

    because: str
    hold: Hold = Hold.OPERATOR


class ResumeRequested(msgspec.Struct, frozen=True, kw_only=True):
    """A hold is over; an operator's resume also starts a worker that gave up or was stopped, if it ``starts``."""

    because: str
    hold: Hold = Hold.OPERATOR
    starts: bool = True


class RestartRequested(msgspec.Struct, frozen=True, kw_only=True):
    """Another engine must replace this one now."""

    because: str


class EngineBegun(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's process starts now; until then others were starting, and its time has not run."""

    incarnation: int


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """The readiness probe has succeeded."""

    incarnation: int


class EngineBroken(msgspec.Struct, frozen=True, kw_only=True):
    """The engine lives but is useless.

    ``suspects`` are the requests that may have caused it, by id, each with its own reason; ``is_deferred`` says that
    trials find out which of them did.
    """

    incarnation: int
    reason: FailureReason
    because: str
    suspects: Mapping[int, FailureReason] = msgspec.field(default_factory=dict)
    is_deferred: bool = False


class EngineExited(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's process has ended, or never started; others of its tree may be left."""

    incarnation: int
    because: str


class EngineGone(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's whole tree is gone, or never started; ``jitter`` in [0, 1) spreads the restart.

    ``is_outside``: it died of a signal that neither we nor the OOM killer sent. ``is_deferred``: trials find out if a
    request was the cause. ``is_elsewhere``: another member of its span ended first. None of these is a failure.
    """

    incarnation: int
    because: str
    jitter: float
    is_outside: bool = False
    is_deferred: bool = False
    is_elsewhere: bool = False


class EngineAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has completed a request: pauses before restarts begin from scratch."""

    incarnation: int


class FailureCounted(msgspec.Struct, frozen=True, kw_only=True):
    """No request was at fault for a deferred death: it counts towards giving up at the next failure."""


class FailureExplained(msgspec.Struct, frozen=True, kw_only=True):
    """A request was convicted of a deferred death: pauses before restarts begin from scratch."""


class TimerElapsed(msgspec.Struct, frozen=True, kw_only=True):
    """A timer of ours has elapsed."""

    timer: int


Request = StartRequested | StopRequested | DrainRequested | ResumeRequested | RestartRequested
News = EngineBegun | EngineReady | EngineBroken | EngineGone | EngineAnswered
Event = Request | News | EngineExited | TimerElapsed | FailureCounted | FailureExplained


# Actions


class SpawnEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Start the process of this incarnation and probe it until it is ready."""

    incarnation: int


class TerminateEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Send SIGTERM to the engine's group."""


class KillEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Kill the engine's whole tree."""


class StartTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Send ``TimerElapsed`` with this number after ``after_s``."""

    timer: int
    after_s: float


class EndRequests(msgspec.Struct, frozen=True, kw_only=True):
    """End all requests in flight; the reason ``shutdown`` marks a stop that was asked for.

    ``brought_down`` says that the engine ended by itself under them: each of them may be the cause; ``is_outside`` that
    a signal from outside ended it. A killed engine charges only its ``suspects``, by id.
    """

    reason: FailureReason
    because: str
    brought_down: bool = False
    is_outside: bool = False
    suspects: Mapping[int, FailureReason] | None = None


class KeepIncident(msgspec.Struct, frozen=True, kw_only=True):
    """Keep an incident of the engine, which ended unasked."""

    because: str


Action = SpawnEngine | TerminateEngine | KillEngine | StartTimer | EndRequests | KeepIncident
Decision = tuple[Lifecycle, tuple[Action, ...]]


def decide(now: Lifecycle, event: Event, at: float, limits: LifecycleLimits) -> Decision:
    """Return the state and the actions after ``event`` at ``at`` (monotonic seconds)."""
    match event:
        case EngineExited():
            return now, _incident(now, event)
        case EngineBegun() | EngineReady() | EngineBroken() | EngineGone() | EngineAnswered():
            return _news(now, event, at, limits) if event.incarnation == now.incarnation else (now, ())
        case TimerElapsed():
            return _elapsed(now, limits) if event.timer == now.timer else (now, ())
        case FailureExplained():
            return replace(now, paused_at=()), ()
        case FailureCounted():
            return replace(now, failed_at=(*limits.restart.recent(now.failed_at, at), at)), ()
        case _:
            return _asked(now, event, limits)


def _asked(now: Lifecycle, event: Request, limits: LifecycleLimits) -> Decision:
    match event:
        case StartRequested():
            is_down = now.state in {WorkerState.STOPPED, WorkerState.FAILED} and not now.is_adopting
            number = max(now.incarnation, event.after) if is_down else now.incarnation
            over = frozenset() if now.is_adopting else {Hold.OPERATOR, Hold.SWAP, Hold.ASLEEP}
            return _start(replace(now, incarnation=number, holds=now.holds - over), event.because)
        case StopRequested():
            return _stop(now, event, limits)
        case DrainRequested():
            return _drain(now, event, limits)
        case ResumeRequested():
            return _resume(now, event)
        case RestartRequested():
            return _restart(now, event, limits)


def _news(now: Lifecycle, event: News, at: float, limits: LifecycleLimits) -> Decision:
    match event:
        case EngineBegun() if now.state is WorkerState.STARTING:
            return now, (StartTimer(timer=now.timer, after_s=limits.start_s),)
        case EngineReady() if now.state is WorkerState.STARTING:
            return _ready(now), ()
        case EngineAnswered():
            return replace(now, paused_at=()), ()
        case EngineBroken() if now.state in SERVING:
            end = EndRequests(reason=event.reason, because=event.because, suspects=event.suspects)
            return _kill(replace(now, is_deferred=event.is_deferred), end)
        case EngineGone() if now.has_process:
            return _gone(now, event, at, limits)
        case _:
            return now, ()


def _incident(now: Lifecycle, exited: EngineExited) -> tuple[KeepIncident, ...]:
    is_unasked = now.is_broken or (now.is_wanted and not now.is_asked)
    because = now.because if now.state is WorkerState.STOPPING else exited.because
    return (KeepIncident(because=because),) if is_unasked and exited.incarnation == now.incarnation else ()


def _ready(now: Lifecycle) -> Lifecycle:
    ready = replace(now, is_half_open=False)
    because = f"the engine answers; {now.held_because}" if now.holds else "the engine answers"
    return _move(ready, WorkerState.DRAINING if now.holds else WorkerState.READY, because)


def _drain(now: Lifecycle, event: DrainRequested, limits: LifecycleLimits) -> Decision:
    held = replace(now, holds=now.holds | {event.hold})
    if now.state is WorkerState.BACKOFF and event.hold is Hold.SPARE:
        return _wait(held, limits.restart.spare_delay_s(len(now.paused_at), 0.0))
    if now.state is WorkerState.READY:
        return _move(held, WorkerState.DRAINING, event.because), ()
    is_more = now.state is WorkerState.DRAINING and event.hold not in now.holds
    return replace(held, because=f"{now.because}; {event.because}" if is_more else now.because), ()


def _resume(now: Lifecycle, event: ResumeRequested) -> Decision:
    free = replace(now, holds=now.holds - {event.hold})
    if now.state is WorkerState.DRAINING:
        held = replace(free, because=free.held_because)
        return (held if free.holds else _move(free, WorkerState.READY, event.because)), ()
    return _start_for_operator(free, event.because) if event.hold is Hold.OPERATOR and event.starts else (free, ())


def _restart(now: Lifecycle, event: RestartRequested, limits: LifecycleLimits) -> Decision:
    if now.state in _RUNNING:
        moved = replace(_move(now, WorkerState.STOPPING, event.because), is_wanted=True, is_asked=True)
        end = EndRequests(reason=FailureReason.ENGINE_DIED, because=event.because)
        return moved, (end, TerminateEngine(), StartTimer(timer=moved.timer, after_s=limits.stop_grace_s))
    if now.state is WorkerState.BACKOFF:
        return _spawn(replace(now, failed_at=(), paused_at=()), event.because)
    return _start_for_operator(now, event.because)


def _start_for_operator(now: Lifecycle, because: str) -> Decision:
    if now.state is WorkerState.STOPPING and not now.is_wanted and Hold.LEAVING not in now.holds:
        return replace(now, is_wanted=True, is_asked=True, because=because), ()  # the last request counts
    return _start(now, because)


def _move(now: Lifecycle, state: WorkerState, because: str) -> Lifecycle:
    check_move(now.state, state)
    return replace(now, state=state, because=because, timer=now.timer + 1)  # disarms the timers of the former state


def _start(now: Lifecycle, because: str) -> Decision:
    if now.state not in {WorkerState.STOPPED, WorkerState.FAILED}:
        return now, ()
    if now.is_adopting:  # its failures count, and an operator's hold on it lasts
        return _spawn(now, because)
    anew = replace(now, failed_at=(), paused_at=(), is_half_open=False)
    if now.has_process:  # it hangs in the kernel: no engine starts beside it, and the wish is kept until it has died
        return replace(anew, is_wanted=True), ()
    return _spawn(anew, because)


def _spawn(now: Lifecycle, because: str) -> Decision:
    moved = replace(
        _move(now, WorkerState.STARTING, because),
        incarnation=now.incarnation + 1,
        holds=now.holds - {Hold.ASLEEP},
        has_process=True,
        is_adopting=False,
        is_wanted=True,
        is_killed=False,
        is_broken=False,
        is_asked=False,
        is_deferred=False,
    )
    return moved, (SpawnEngine(incarnation=moved.incarnation),)


def _stop(now: Lifecycle, event: StopRequested, limits: LifecycleLimits) -> Decision:
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
    return replace(now, is_wanted=False), ()


def _kill(now: Lifecycle, end: EndRequests) -> Decision:
    moved = replace(_move(now, WorkerState.STOPPING, end.because), is_wanted=True, is_killed=True, is_broken=True)
    return moved, (end, KillEngine(), StartTimer(timer=moved.timer, after_s=KILL_LIMIT_S))


def _kill_after_grace(now: Lifecycle) -> Decision:
    killing = replace(now, is_killed=True, timer=now.timer + 1)
    return killing, (KillEngine(), StartTimer(timer=killing.timer, after_s=KILL_LIMIT_S))


def _gone(now: Lifecycle, event: EngineGone, at: float, limits: LifecycleLimits) -> Decision:
    gone = replace(now, has_process=False)
    if now.state is WorkerState.FAILED:
        return _died_at_last(gone, at, limits)
    if now.state is WorkerState.STOPPING and not now.is_wanted:
        return _move(gone, WorkerState.STOPPED, now.because), ()
    if now.state is WorkerState.STOPPING and now.is_asked:
        return _spawn(gone, now.because)
    if now.state is WorkerState.STOPPING:
        return _fail(gone, now.because, at, event.jitter, limits)
    counts_not = event.is_elsewhere or (now.state in SERVING and (event.is_outside or event.is_deferred))
    failed, actions = _fail(replace(gone, is_deferred=counts_not), event.because, at, event.jitter, limits)
    end = EndRequests(
        reason=FailureReason.ENGINE_DIED, because=event.because, brought_down=True, is_outside=event.is_outside
    )
    return failed, (end, *actions)


def _died_at_last(gone: Lifecycle, at: float, limits: LifecycleLimits) -> Decision:
    """Go on after a process that hung in the kernel: it had been killed for a failure, like any broken one."""
    if not gone.is_wanted:
        return _move(gone, WorkerState.STOPPED, gone.because), ()
    failed_at = (*limits.restart.recent(gone.failed_at, at), at)
    counted = replace(gone, failed_at=failed_at, paused_at=(*limits.restart.recent(gone.paused_at, at), at))
    if limits.restart.are_too_many(failed_at):
        return _await_retry(counted, limits)
    return _spawn(counted, "its processes have died at last")


def _fail(gone: Lifecycle, because: str, at: float, jitter: float, limits: LifecycleLimits) -> Decision:
    """Count a failure, and wait for the next try, or give up; a deferred one only causes the wait."""
    restart = limits.restart
    delay_s = restart.spare_delay_s if Hold.SPARE in gone.holds else restart.delay_s
    paused_at = (*restart.recent(gone.paused_at, at), at)
    failed_at = restart.recent(gone.failed_at, at) + (() if gone.is_deferred else (at,))
    gone = replace(gone, failed_at=failed_at, paused_at=paused_at)
    if not gone.is_half_open and (gone.is_deferred or not restart.are_too_many(failed_at)):
        waiting = _move(gone, WorkerState.BACKOFF, because)
        failures = max(1, len(paused_at) - TRIED_AT_ONCE) if gone.is_deferred else len(paused_at)
        return waiting, (StartTimer(timer=waiting.timer, after_s=delay_s(failures, jitter)),)
    counted = "1 failure" if len(failed_at) == 1 else f"{len(failed_at)} failures"
    times = "again" if gone.is_half_open else f"after {counted} in {limits.restart.window_s:g} s, the last"
    return _await_retry(_move(gone, WorkerState.FAILED, f"gave up {times}: {because}"), limits)


def _await_retry(failed: Lifecycle, limits: LifecycleLimits) -> Decision:
    return (failed, ()) if limits.restart.retry_s is None else _wait(failed, limits.restart.retry_s)


def _wait(now: Lifecycle, after_s: float) -> Decision:
    waiting = replace(now, timer=now.timer + 1)
    return waiting, (StartTimer(timer=waiting.timer, after_s=after_s),)


def _elapsed(now: Lifecycle, limits: LifecycleLimits) -> Decision:
    match now.state:
        case WorkerState.STARTING:
            because = f"not ready within {limits.start_s:g} s"
            return _kill(now, EndRequests(reason=FailureReason.ENGINE_UNREACHABLE, because=because, suspects={}))
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

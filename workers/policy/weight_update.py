"""The decisions of an update of weights: its state and an event in, its state and actions out. Pure.

All workers of a model go through the phases together: a phase begins when every remaining worker has ended the one
before. Until the weights are received nothing has changed, if the transfer stages them: then every live engine can go
on with the old ones. A worker that fails when its weights may be half changed is killed.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, assert_never

import msgspec
from msgspec.structs import replace

from workers.policy.weights import UpdateMode, UpdatePhase
from workers.states import state_diagram


class UpdateState(StrEnum):
    """The state of an update."""

    RUNNING = "running"
    COMPLETED = "completed"
    PARTIAL = "partial"  # the version is the model's; failed workers are restarted and catch up
    FAILED = "failed"  # the model keeps its former version


class UpdateStage(StrEnum):
    """The stage of one worker in an update."""

    WAITING = "waiting"
    PAUSING = "pausing"
    PAUSED = "paused"
    STARTING = "starting"
    STARTED = "started"
    RECEIVING = "receiving"
    RECEIVED = "received"
    FINISHING = "finishing"
    FINISHED = "finished"
    RESUMING = "resuming"
    SERVING = "serving"
    FAILED = "failed"


DOING: Final[Mapping[UpdatePhase, UpdateStage]] = {
    UpdatePhase.PAUSE: UpdateStage.PAUSING,
    UpdatePhase.START: UpdateStage.STARTING,
    UpdatePhase.RECEIVE: UpdateStage.RECEIVING,
    UpdatePhase.FINISH: UpdateStage.FINISHING,
    UpdatePhase.RESUME: UpdateStage.RESUMING,
}
DONE: Final[Mapping[UpdatePhase, UpdateStage]] = {
    UpdatePhase.PAUSE: UpdateStage.PAUSED,
    UpdatePhase.START: UpdateStage.STARTED,
    UpdatePhase.RECEIVE: UpdateStage.RECEIVED,
    UpdatePhase.FINISH: UpdateStage.FINISHED,
    UpdatePhase.RESUME: UpdateStage.SERVING,
}
STAGES: Final[Mapping[UpdateStage, frozenset[UpdateStage]]] = {
    UpdateStage.WAITING: frozenset({UpdateStage.PAUSING}),
    **{DOING[phase]: frozenset({DONE[phase], UpdateStage.FAILED}) for phase in UpdatePhase},
    **{
        DONE[phase]: frozenset({DOING[after], UpdateStage.FAILED})  # it may be taken back, and fail in that
        for phase, after in zip(tuple(UpdatePhase), tuple(UpdatePhase)[1:], strict=False)
    },
    UpdateStage.SERVING: frozenset(),
    UpdateStage.FAILED: frozenset(),
}


class Failure(StrEnum):
    """The failure of a worker in a phase."""

    TIMED_OUT = "timed_out"
    NO_PAUSE = "no_pause"  # its engine cannot pause: nothing was done to it
    BROKEN = "broken"  # its engine refused, died, or gave no readable answer


class WorkerPart(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part in an update.

    ``is_late``: it exceeded a limit by its own fault; ``is_gone``: its engine has died; ``is_left_out``: it needs no
    rollback, since it was killed or never changed.
    """

    stage: UpdateStage = UpdateStage.WAITING
    error: str | None = None
    is_late: bool = False
    is_gone: bool = False
    is_left_out: bool = False


class UpdateProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The whole basis of an update's decisions; ``parts`` are by worker name.

    ``needs_all`` says that nothing can be received while one worker is missing, ``is_staged`` that a worker which
    failed to receive still has all of its old weights.
    """

    mode: UpdateMode
    needs_all: bool
    is_staged: bool
    parts: Mapping[str, WorkerPart]
    phase: UpdatePhase = UpdatePhase.PAUSE
    state: UpdateState = UpdateState.RUNNING
    error: str | None = None
    is_committing: bool = False

    @property
    def survivors(self) -> list[str]:
        """The workers that have not failed."""
        return [worker for worker, part in self.parts.items() if part.error is None]

    @property
    def failed(self) -> list[str]:
        """The workers that have failed."""
        return [worker for worker, part in self.parts.items() if part.error is not None]

    def words(self) -> str:
        """Describe which workers failed, and how."""
        return "; ".join(f"{worker}: {self.parts[worker].error}" for worker in self.failed)

    def changed(self, worker: str, **changes: object) -> "UpdateProgress":
        """Return it with one part changed."""
        part = replace(self.parts[worker], **changes)
        return replace(self, parts={**self.parts, worker: part})


# Events


class UpdateBegun(msgspec.Struct, frozen=True, kw_only=True):
    """The workers are known, and may be changed."""


class StepEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has ended the phase."""

    worker: str


class StepFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker has failed in the phase; ``is_gone`` says that its engine has died."""

    worker: str
    failure: Failure
    detail: str
    is_gone: bool = False


class VersionCommitted(msgspec.Struct, frozen=True, kw_only=True):
    """The model has the new version."""


class TakeBackFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker cannot go on with its old weights."""

    worker: str
    detail: str


UpdateEvent = UpdateBegun | StepEnded | StepFailed | VersionCommitted | TakeBackFailed


# Actions


class BeginStep(msgspec.Struct, frozen=True, kw_only=True):
    """A worker begins a phase."""

    worker: str
    phase: UpdatePhase


class EndPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase is over for all workers; ``is_whole`` says that none failed in it."""

    phase: UpdatePhase
    is_whole: bool


class HurryReceivers(msgspec.Struct, frozen=True, kw_only=True):
    """Give workers that still wait for the trainer a moment: if one is missing it may never send."""


class KillWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Replace an engine whose weights are not known."""

    worker: str
    because: str


class CommitVersion(msgspec.Struct, frozen=True, kw_only=True):
    """Make the new version the model's."""


class TakeBack(msgspec.Struct, frozen=True, kw_only=True):
    """Let a worker that still has all of its old weights go on with them."""

    worker: str


UpdateAction = BeginStep | EndPhase | HurryReceivers | KillWorker | CommitVersion | TakeBack
UpdateDecision = tuple[UpdateProgress, tuple[UpdateAction, ...]]


def decide(now: UpdateProgress, event: UpdateEvent) -> UpdateDecision:
    """Return the update's state after ``event``, and its next steps; its state says when it is over."""
    match event:
        case UpdateBegun():
            return _begin_phase(now, UpdatePhase.PAUSE) if now.parts else _fail(now)
        case StepEnded():
            return _pass_barrier(now.changed(event.worker, stage=DONE[now.phase]), ())
        case StepFailed():
            return _fail_step(now, event)
        case VersionCommitted():
            # They have the old weights, or unknown ones.
            kills = tuple(KillWorker(worker=each, because=now.parts[each].error or "") for each in now.failed)
            after, actions = _begin_phase(replace(now, is_committing=False), UpdatePhase.RESUME)
            return after, (*kills, *actions)
        case TakeBackFailed():
            because = f"it cannot go on with its old weights: {event.detail}"
            part = now.parts[event.worker]
            error = part.error or f"{now.phase}: {because}"
            after = now.changed(event.worker, stage=UpdateStage.FAILED, error=error, is_left_out=True)
            return after, (KillWorker(worker=event.worker, because=because),)
        case _:
            assert_never(event)


def _begin_phase(now: UpdateProgress, phase: UpdatePhase) -> UpdateDecision:
    after = replace(now, phase=phase)
    for worker in now.survivors:
        after = after.changed(worker, stage=DOING[phase])
    return after, tuple(BeginStep(worker=worker, phase=phase) for worker in now.survivors)


def _fail_step(now: UpdateProgress, event: StepFailed) -> UpdateDecision:
    phase, detail, is_late = now.phase, event.detail, False
    if event.failure is Failure.TIMED_OUT:
        others = ", ".join(now.failed) if phase is UpdatePhase.RECEIVE else ""
        detail, is_late = (f"given up after {others} had failed", False) if others else (detail, True)
    is_killed = _is_doubtful(now, event.failure)
    is_left_out = is_killed or event.failure is Failure.NO_PAUSE
    error = f"{phase}: {detail}"
    after = now.changed(
        event.worker,
        stage=UpdateStage.FAILED,
        error=error,
        is_late=is_late,
        is_gone=event.is_gone,
        is_left_out=is_left_out,
    )
    actions: tuple[UpdateAction, ...] = (KillWorker(worker=event.worker, because=error),) if is_killed else ()
    if phase is UpdatePhase.RECEIVE and now.needs_all:
        actions = (*actions, HurryReceivers())
    return _pass_barrier(after, actions)


def _is_doubtful(now: UpdateProgress, failure: Failure) -> bool:
    """Whether a failed worker may be in a state that cannot be taken back."""
    if failure is Failure.NO_PAUSE:
        return False
    if now.phase is UpdatePhase.PAUSE and now.mode is UpdateMode.WAIT and failure is Failure.TIMED_OUT:
        return False  # its requests took longer than the update may wait
    return not (now.is_staged and now.phase in {UpdatePhase.START, UpdatePhase.RECEIVE})


def _pass_barrier(now: UpdateProgress, actions: tuple[UpdateAction, ...]) -> UpdateDecision:
    """Begin the next phase when no worker is left in this one."""
    phase = now.phase
    if any(now.parts[worker].stage is DOING[phase] for worker in now.survivors):
        return now, actions
    is_whole = not any((part.error or "").startswith(f"{phase}: ") for part in now.parts.values())
    actions = (*actions, EndPhase(phase=phase, is_whole=is_whole))
    after, more = _next(now)
    return after, (*actions, *more)


def _next(now: UpdateProgress) -> UpdateDecision:
    match now.phase:
        case UpdatePhase.RESUME:
            state = UpdateState.PARTIAL if now.failed else UpdateState.COMPLETED
            return replace(now, state=state, error=now.words() or None), ()
        case _ if not now.survivors:
            return _fail(now)
        case UpdatePhase.PAUSE:
            return _begin_phase(now, UpdatePhase.START)
        case UpdatePhase.START:
            return _fail(now) if now.needs_all and now.failed else _begin_phase(now, UpdatePhase.RECEIVE)
        case UpdatePhase.RECEIVE:
            return _begin_phase(now, UpdatePhase.FINISH)
        case UpdatePhase.FINISH:
            return replace(now, is_committing=True), (CommitVersion(),)
        case _:
            assert_never(now.phase)


def _fail(now: UpdateProgress) -> UpdateDecision:
    words = now.words() or "no worker was left"
    is_alive = not any(now.parts[worker].is_gone for worker in now.failed)
    if now.phase is UpdatePhase.RECEIVE and now.needs_all and is_alive:
        words = f"the trainer (rank 0) has not sent everything: {words}"
    intact = [worker for worker, part in now.parts.items() if not part.is_left_out and not part.is_gone]
    after = replace(now, state=UpdateState.FAILED, error=words)
    return after, tuple(TakeBack(worker=worker) for worker in intact)


def diagram() -> str:
    """Return the stages of a worker as a Mermaid state diagram, for ``design.md``."""
    return state_diagram(STAGES)

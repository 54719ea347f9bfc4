"""Runs one update: carries out the actions of ``policy.weight_update``, and reports their results to it.

Actions that take time are tasks of the run, and return as events.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, assert_never

import anyio

from transport.control import EngineControl
from transport.errors import EngineError, EngineRejected, EngineUnreachable
from workers.health.recovery import DEATH_NOTICE_S
from workers.outcome import Cancelled, CancelReason, FailureReason
from workers.policy import weight_update
from workers.policy.weight_update import (
    BeginStep,
    CommitVersion,
    EndPhase,
    Failure,
    HurryReceivers,
    KillWorker,
    StepEnded,
    StepFailed,
    TakeBack,
    TakeBackFailed,
    UpdateAction,
    UpdateBegun,
    UpdateEvent,
    UpdateProgress,
    VersionCommitted,
    WorkerPart,
)
from workers.policy.weights import UpdateMode, UpdatePhase, WeightsPolicy
from workers.spec import WorkerId
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.transfer import Transfer
from workers.weights.update import WeightUpdate, WorkerProgress

DROP_LIMIT_S: Final = 10.0
ABORT_POLL_S: Final = 0.05
GRACE_S: Final = 5.0  # for the others to receive, when one of a group has failed
TIMED_OUT: Final = "weights_timeout"  # why an engine that goes on has an incident
_ABSENT: Final = 404
logger = logging.getLogger(__name__)
Observe = Callable[[str, UpdatePhase, float, str], None]
Commit = Callable[[], Awaitable[None]]
Work = Callable[[], Awaitable[UpdateEvent | None]]


class UpdateRun:
    """One update in progress; ``begun`` is set when every engine was asked to receive it, or when it is over."""

    def __init__(
        self,
        model: str,
        update: WeightUpdate,
        workers: Mapping[WorkerId, SupervisedWorker],
        transfer: Transfer,
        limits: WeightsPolicy,
        observe: Observe,
    ) -> None:
        self.update = update
        self.begun = anyio.Event()
        self._model = model
        self._workers = workers
        self._transfer = transfer
        self._limits = limits
        self._observe = observe
        self._progress = UpdateProgress(
            mode=update.request.mode,
            needs_all=transfer.needs_all,
            is_staged=transfer.is_staged,
            parts={worker: WorkerPart() for worker in workers},
        )
        self._phase_at = update.clock()
        self._untold = set(workers)
        self._scopes: dict[WorkerId, anyio.CancelScope] = {}

    def __repr__(self) -> str:
        return f"<UpdateRun {self._model} {self.update.version} {self.update.state} {self.update.phase}>"

    async def run(self, commit: Commit) -> None:
        """Run it to its end; ``commit`` is called when the model's version changes.

        No worker is left held or paused.
        """
        update = self.update
        try:
            async with anyio.create_task_group() as tasks:

                def post(event: UpdateEvent) -> None:
                    self._progress, actions = weight_update.decide(self._progress, event)
                    update.take_progress(self._progress)
                    for action in actions:
                        work = self._act(action, commit)
                        if work is not None:
                            tasks.start_soon(perform, work)

                async def perform(work: Work) -> None:
                    event = await work()
                    if event is not None:
                        post(event)

                post(UpdateBegun())
        except BaseException:
            update.fail(update.error or "interrupted")
            raise
        finally:
            for worker in self._workers.values():
                worker.watch.unpause()
                worker.resume_nowait(f"weights {update.version}: {update.state}", Hold.UPDATE)
            self.begun.set()
            logger.info("model %s: weights %d: %s %s", self._model, update.version, update.state, update.error or "")

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a worker's change of state: a step that waits for a lost engine ends."""
        share, scope = self.update.shares.get(worker.spec.id), self._scopes.get(worker.spec.id)
        if share is not None and scope is not None and self._is_gone(share):
            scope.cancel()

    # Actions

    def _act(self, action: UpdateAction, commit: Commit) -> Work | None:
        """Do an instant action, or return the work of a slow one, which returns the event of its end."""
        match action:
            case BeginStep():
                self._phase_at = self.update.clock()
                return partial(self._step, self.update.shares[WorkerId(action.worker)], action.phase)
            case EndPhase():
                elapsed_s = self.update.phase_s[action.phase] = self.update.clock() - self._phase_at
                self._observe(self._model, action.phase, elapsed_s, "ok" if action.is_whole else "failed")
            case HurryReceivers():
                for scope in self._scopes.values():
                    scope.deadline = min(scope.deadline, anyio.current_time() + GRACE_S)
            case KillWorker():
                self._kill(self.update.shares[WorkerId(action.worker)], action.because)
            case CommitVersion():
                return partial(_commit, commit)
            case TakeBack():
                return partial(self._take_back, self.update.shares[WorkerId(action.worker)])
            case _:
                assert_never(action)
        return None

    def _kill(self, share: WorkerProgress, because: str) -> None:
        if not self._is_gone(share):
            reason = FailureReason.ENGINE_UNREACHABLE
            self._workers[share.worker].break_engine(reason, f"weights {self.update.version}: {because}", {})

    async def _take_back(self, share: WorkerProgress) -> TakeBackFailed | None:
        worker = self._workers[share.worker]
        if self._is_gone(share):
            return None
        if share.part.is_late:
            worker.recorder.note_failure(TIMED_OUT, f"weights {self.update.version}: {share.error}")
        control = EngineControl(worker.endpoint)
        try:
            with anyio.fail_after(DROP_LIMIT_S):
                await self._transfer.drop(control)
                await control.resume()
        except (TimeoutError, EngineError) as error:
            return TakeBackFailed(worker=share.worker, detail=str(error) or "no answer")
        self._note_running(share)
        return None

    # Steps

    async def _step(self, share: WorkerProgress, phase: UpdatePhase) -> StepEnded | StepFailed:
        """Run a phase on one worker, within the phase's limit."""
        worker, limit_s = self._workers[share.worker], self._limits.limit_s(phase, self.update.request.mode)
        try:
            with anyio.fail_after(limit_s) as self._scopes[share.worker]:
                self._check_same(share)
                await self._do(worker, share, phase)
            self._check_same(share)  # the scope may have ended because it is not
        except TimeoutError:
            return self._failed(share, Failure.TIMED_OUT, f"not within {limit_s:g} s")
        except EngineError as error:
            if isinstance(error, EngineUnreachable):
                await anyio.sleep(DEATH_NOTICE_S)
            has_no_pause = phase is UpdatePhase.PAUSE and isinstance(error, EngineRejected) and error.status == _ABSENT
            detail = f"its engine has died ({worker.supervisor.because})" if self._is_gone(share) else str(error)
            return self._failed(share, Failure.NO_PAUSE if has_no_pause else Failure.BROKEN, detail)
        finally:
            self._scopes.pop(share.worker, None)
        if phase is UpdatePhase.RECEIVE:
            self._note_asked(share)
        return StepEnded(worker=share.worker)

    def _failed(self, share: WorkerProgress, failure: Failure, detail: str) -> StepFailed:
        self._note_asked(share)
        return StepFailed(worker=share.worker, failure=failure, detail=detail, is_gone=self._is_gone(share))

    async def _do(self, worker: SupervisedWorker, share: WorkerProgress, phase: UpdatePhase) -> None:
        update, control = self.update, EngineControl(worker.endpoint)
        match phase:
            case UpdatePhase.PAUSE:
                await self._pause(worker, share, control)
            case UpdatePhase.START:
                await self._transfer.start(control, update.number, update.request)
            case UpdatePhase.RECEIVE:
                await self._transfer.receive_weights(
                    control, update.number, update.request, share, lambda: self._note_asked(share)
                )
            case UpdatePhase.FINISH:
                await self._transfer.finish(control, update.number, update.version)
                self._check_same(share)
                assert worker.weights is not None  # noqa: S101 - only workers that have any are updated
                worker.weights.change(update.version, share.incarnation)
            case UpdatePhase.RESUME:
                await control.resume()
                self._note_running(share)
            case _:
                assert_never(phase)

    async def _pause(self, worker: SupervisedWorker, share: WorkerProgress, control: EngineControl) -> None:
        update = self.update
        worker.drain_nowait(f"weights {update.version}", Hold.UPDATE)
        match update.request.mode:
            case UpdateMode.WAIT:
                with anyio.fail_after(self._limits.wait_s):
                    await worker.slots.wait_empty()
            case UpdateMode.ABORT:
                while worker.slots.in_use:  # one with a slot that is not in flight yet is ended once it is
                    worker.in_flight.end_all(Cancelled(reason=CancelReason.WEIGHTS))
                    with anyio.move_on_after(ABORT_POLL_S):
                        await worker.slots.wait_empty()
            case UpdateMode.KEEP:
                pass
        worker.watch.pause()
        share.paused_at = update.clock()
        await control.pause(clear_cache=update.request.clear_cache)

    def _check_same(self, share: WorkerProgress) -> None:
        if self._is_gone(share):
            raise EngineUnreachable("the engine is not the one that the update began with")

    def _is_gone(self, share: WorkerProgress) -> bool:
        worker = self._workers[share.worker]
        return worker.now.incarnation != share.incarnation or not worker.now.is_serving

    # Notes

    def _note_asked(self, share: WorkerProgress) -> None:
        """Record that an engine was asked to receive, or never will be."""
        self._untold.discard(share.worker)
        if not self._untold:
            self.begun.set()

    def _note_running(self, share: WorkerProgress) -> None:
        if share.paused_at is not None:
            share.paused_s = self.update.clock() - share.paused_at


async def _commit(commit: Commit) -> VersionCommitted:
    await commit()
    return VersionCommitted()

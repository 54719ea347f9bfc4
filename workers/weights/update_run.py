"""Runs one update through its phases: pause, start, receive, finish, resume, with a barrier after each.

What a failure means is decided at the barriers. Until the weights are received nothing has changed, if the way of
transfer stages them: then whoever lives goes on with the old ones. A worker that fails when its weights may be half
changed is killed, and is brought to the model's version before it takes traffic again; the others go on.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio

from transport.control import EngineControl
from transport.errors import EngineError, EngineRejected, EngineUnreachable
from workers.health.recovery import DEATH_NOTICE_S
from workers.outcome import Cancelled, CancelReason, FailureReason
from workers.spec import WorkerId
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.phases import WORKING, Phase, UpdateMode, WeightsPolicy
from workers.weights.transfer import Transfer
from workers.weights.update import Share, UpdateState, WeightUpdate

DROP_LIMIT_S: Final = 10.0
ABORT_POLL_S: Final = 0.05
GRACE_S: Final = 5.0  # for the others to receive, when one of a group has failed
TIMED_OUT: Final = "weights_timeout"  # why an engine that goes on has an incident
_ABSENT: Final = 404
logger = logging.getLogger(__name__)
Act = Callable[[SupervisedWorker, Share], Awaitable[None]]
Observe = Callable[[str, Phase, float, str], None]


class UpdateRun:
    """One update on its way; ``told`` is set when every engine has been told to receive, or when it is over."""

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
        self.told = anyio.Event()
        self._model = model
        self._workers = workers
        self._transfer = transfer
        self._limits = limits
        self._observe = observe
        self._untold = set(workers)
        self._left_out: set[WorkerId] = set()  # whoever was killed, or knows no pause: nothing is to be taken back
        self._scopes: dict[WorkerId, anyio.CancelScope] = {}

    def __repr__(self) -> str:
        """State how far it is."""
        return f"<UpdateRun {self._model} {self.update.version} {self.update.state} {self.update.phase}>"

    async def run(self, commit: Callable[[], Awaitable[None]]) -> None:
        """Run it to its end; ``commit`` is called when the model's version changes. Nothing is left held or paused."""
        update = self.update
        try:
            await self._run(commit)
        except BaseException:
            update.error = update.error or "interrupted"
            update.state = UpdateState.FAILED
            raise
        finally:
            for worker in self._workers.values():
                worker.unpause_watch()
                worker.resume_nowait(f"weights {update.version}: {update.state}", Hold.UPDATE)
            self.told.set()
            logger.info("model %s: weights %d: %s %s", self._model, update.version, update.state, update.error or "")

    async def _run(self, commit: Callable[[], Awaitable[None]]) -> None:
        update, transfer = self.update, self._transfer
        await self._phase(Phase.PAUSE, self._pause)
        await self._phase(Phase.START, self._start)
        if update.survivors and not (transfer.needs_all and update.failed):
            await self._phase(Phase.RECEIVE, self._receive)
            if update.survivors:
                await self._phase(Phase.FINISH, self._finish)
                if update.survivors:
                    await commit()
                    for share in update.failed:  # they have the old weights, or nobody knows which
                        self._kill(share, self._workers[share.worker], share.error or "")
                    await self._phase(Phase.RESUME, self._resume)
                    update.state = UpdateState.PARTIAL if update.failed else UpdateState.COMPLETED
                    update.error = update.words() or None
                    return
        update.error = self._blame()
        update.state = UpdateState.FAILED
        await self._go_back()

    def _blame(self) -> str:
        """Name who is to blame."""
        words = self.update.words() or "no worker was left"
        alive = all(self._workers[share.worker].incarnation == share.incarnation for share in self.update.failed)
        if self.update.phase is Phase.RECEIVE and self._transfer.needs_all and alive:
            return f"the trainer (rank 0) has not sent everything: {words}"
        return words

    async def _go_back(self) -> None:
        """Let everybody who still has all of the old weights go on with them."""
        intact = [
            (share, worker)
            for share, worker in ((share, self._workers[share.worker]) for share in self.update.shares.values())
            if share.worker not in self._left_out and worker.incarnation == share.incarnation and worker.is_serving
        ]
        async with anyio.create_task_group() as tasks:
            for share, worker in intact:
                tasks.start_soon(self._take_back, share, worker)

    async def _take_back(self, share: Share, worker: SupervisedWorker) -> None:
        if share.is_late:
            worker.recorder.note_failure(TIMED_OUT, f"weights {self.update.version}: {share.error}")
        control = EngineControl(worker.endpoint)
        try:
            with anyio.fail_after(DROP_LIMIT_S):
                await self._transfer.drop(control)
                await control.resume()
            self._note_running(share)
        except (TimeoutError, EngineError) as error:
            self._kill(share, worker, f"it cannot go on with its old weights: {str(error) or 'no answer'}")

    def take_change(self, worker: SupervisedWorker) -> None:
        """Take the fact that a worker's state has changed: whoever waits for an engine that is gone waits no more."""
        share = self.update.shares.get(worker.spec.id)
        scope = self._scopes.get(worker.spec.id)
        if (
            share is not None
            and scope is not None
            and (worker.incarnation != share.incarnation or not worker.is_serving)
        ):
            scope.cancel()

    # Phases

    async def _phase(self, phase: Phase, act: Act) -> bool:
        """Do one step on all workers that are left; return whether all of them have done it."""
        update, limit_s = self.update, self._limits.limit_s(phase, self.update.request.mode)
        update.phase, began_at = phase, update.clock()
        before = update.survivors
        async with anyio.create_task_group() as tasks:
            for share in before:
                tasks.start_soon(self._one, phase, share, act, limit_s)
        update.phase_s[phase] = update.clock() - began_at
        is_whole = len(update.survivors) == len(before)
        self._observe(self._model, phase, update.phase_s[phase], "ok" if is_whole else "failed")
        return is_whole

    async def _one(self, phase: Phase, share: Share, act: Act, limit_s: float) -> None:
        worker, (doing, done) = self._workers[share.worker], WORKING[phase]
        self.update.enter(share, doing)
        # An engine that could not be made to receive and still has its old weights is well.
        is_intact = phase in {Phase.START, Phase.RECEIVE} and self._transfer.is_staged
        try:
            with anyio.fail_after(limit_s) as self._scopes[share.worker]:
                self._check_same(worker, share)
                await act(worker, share)
            self._check_same(worker, share)  # and the scope may have been left because it is not
        except TimeoutError:
            others = ", ".join(each.worker for each in self.update.failed) if phase is Phase.RECEIVE else ""
            share.is_late = not others
            self.update.fail(share, f"given up after {others} had failed" if others else f"not within {limit_s:g} s")
            if not is_intact and not (phase is Phase.PAUSE and self.update.request.mode is UpdateMode.WAIT):
                self._kill(share, worker, share.error or "")
        except EngineError as error:
            if isinstance(error, EngineUnreachable):
                await anyio.sleep(DEATH_NOTICE_S)
            self.update.fail(share, self._words(worker, share, error))
            if phase is Phase.PAUSE and isinstance(error, EngineRejected) and error.status == _ABSENT:
                self._left_out.add(share.worker)
            elif not is_intact:
                self._kill(share, worker, share.error or "")
        else:
            self.update.enter(share, done)
        finally:
            self._scopes.pop(share.worker, None)
            self._note_told(share)
            if share.error is not None and phase is Phase.RECEIVE and self._transfer.needs_all:
                self._hasten()

    def _check_same(self, worker: SupervisedWorker, share: Share) -> None:
        if worker.incarnation != share.incarnation or not worker.is_serving:
            raise EngineUnreachable("the engine is not the one that the update began with")

    def _hasten(self) -> None:
        """Give those who still wait for the trainer a moment: where one is missing it may never send."""
        for scope in self._scopes.values():
            scope.deadline = min(scope.deadline, anyio.current_time() + GRACE_S)

    def _words(self, worker: SupervisedWorker, share: Share, error: EngineError) -> str:
        if worker.incarnation != share.incarnation or not worker.is_serving:
            return f"its engine has died ({worker.because})"
        return str(error)

    async def _pause(self, worker: SupervisedWorker, share: Share) -> None:
        update = self.update
        worker.drain_nowait(f"weights {update.version}", Hold.UPDATE)
        match update.request.mode:
            case UpdateMode.WAIT:
                with anyio.fail_after(self._limits.wait_s):
                    await worker.wait_idle()
            case UpdateMode.ABORT:
                while worker.slots_in_use:  # one that has its slot and is not in flight yet is ended when it is
                    worker.end_requests(Cancelled(reason=CancelReason.WEIGHTS))
                    with anyio.move_on_after(ABORT_POLL_S):
                        await worker.wait_idle()
            case UpdateMode.KEEP:
                pass
        worker.pause_watch()
        share.paused_at = update.clock()
        await EngineControl(worker.endpoint).pause(clear_cache=update.request.clear_cache)

    async def _start(self, worker: SupervisedWorker, _share: Share) -> None:
        await self._transfer.start(EngineControl(worker.endpoint), self.update.number, self.update.request)

    async def _receive(self, worker: SupervisedWorker, share: Share) -> None:
        update = self.update
        control = EngineControl(worker.endpoint)
        await self._transfer.receive(control, update.number, update.request, share, lambda: self._note_told(share))

    async def _finish(self, worker: SupervisedWorker, share: Share) -> None:
        await self._transfer.finish(EngineControl(worker.endpoint), self.update.number, self.update.version)
        self._check_same(worker, share)
        assert worker.weights is not None  # noqa: S101 - only workers that have any are updated
        worker.weights.change(self.update.version, share.incarnation)

    async def _resume(self, worker: SupervisedWorker, share: Share) -> None:
        await EngineControl(worker.endpoint).resume()
        self._note_running(share)

    # Notes

    def _note_told(self, share: Share) -> None:
        """Take the fact that an engine has been told to receive, or will not be any more."""
        if self.update.phase is Phase.RECEIVE or share.error is not None:
            self._untold.discard(share.worker)
        if not self._untold:
            self.told.set()

    def _note_running(self, share: Share) -> None:
        if share.paused_at is not None:
            share.paused_s = self.update.clock() - share.paused_at

    def _kill(self, share: Share, worker: SupervisedWorker, because: str) -> None:
        """Have an engine started again whose weights nobody can vouch for."""
        self._left_out.add(share.worker)
        self.update.fail(share, because)
        if worker.incarnation == share.incarnation and worker.is_serving:
            reason = FailureReason.ENGINE_UNREACHABLE
            worker.break_engine(reason, f"weights {self.update.version}: {because}", {})

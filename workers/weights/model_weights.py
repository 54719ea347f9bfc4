"""The weights of one model: its workers' versions, one update at a time, and workers that must catch up."""

import logging
import shutil
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from transport.errors import EngineError, EngineTimeout
from workers.engine.launch.vllm import is_extended
from workers.errors import InvalidUpdate, NoWorkerReady, UpdateRunning, VersionNotNewer
from workers.notifier import Notifier
from workers.policy.weight_update import UpdateState
from workers.policy.weights import Backend
from workers.spec import WorkerId
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker
from workers.weights.catch_up import CatchUp
from workers.weights.current_version import CurrentVersion, CurrentWeights, check_checkpoint, check_tensors
from workers.weights.group import Group, GroupRequest, GroupState, whole_group
from workers.weights.group_join import JOIN_POLL_S, TELL_LIMIT_S, join_engines, watch_joining
from workers.weights.receiver import ReceiverFiles
from workers.weights.transfer import CheckpointTransfer, GlooTransfer, NativeTransfer, Transfer
from workers.weights.update import UpdateRequest, WeightUpdate
from workers.weights.update_run import Observe, UpdateRun

REMEMBERED: Final = 20
logger = logging.getLogger(__name__)


class ModelWeights:
    """Written only by its own tasks; nothing happens unless ``run`` is running.

    ``lock`` is held during every change to the model's engines.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[SupervisedWorker],
        state_dir: Path | None,
        observe: Observe,
        lock: anyio.Lock,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.workers = {worker.spec.id: worker for worker in workers}
        self.updates: deque[WeightUpdate] = deque(maxlen=REMEMBERED)
        self.group: Group | None = None
        self.scratch: Path | None = None  # folder of the engines' progress files; it may be an earlier program's
        self.ended: Counter[UpdateState] = Counter()
        self.policy = workers[0].spec.weights
        self._model = workers[0].spec.model
        self._is_extended = is_extended(workers[0].spec)
        self._is_on_lanes = workers[0].spec.lane is not None
        self._current = CurrentVersion(name, state_dir, self._model)
        self._observe = observe
        self._clock = clock
        self._lock = lock
        self._tasks: TaskGroup | None = None
        self._numbers = 0
        self._run: UpdateRun | None = None
        self._ended = Notifier()
        self.catch_up = CatchUp(self.workers, lock, self._current, self._start_soon)

    def __repr__(self) -> str:
        return f"<ModelWeights {self.name} {self.current.version} group={self.group and self.group.state}>"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks until cancelled."""
        if self.scratch is None or not self.scratch.is_dir():
            self.scratch = Path(tempfile.mkdtemp(prefix="roundhouse-weights-"))
        try:
            self._files = ReceiverFiles(self.scratch)
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    # A trainer's calls

    @property
    def current(self) -> CurrentWeights:
        """The version that requests are to be answered with."""
        return self._current.now

    @property
    def running(self) -> WeightUpdate | None:
        """The update in progress."""
        newest = self.updates[-1] if self.updates else None
        return newest if newest is not None and newest.state is UpdateState.RUNNING else None

    @property
    def is_changing(self) -> bool:
        """Whether new weights are reaching the engines, or being written for later ones."""
        return self.running is not None or self.catch_up.is_keeping

    async def init(self, request: GroupRequest) -> Group:
        """Send every engine to a trainer's group; return when all have their ranks, and the trainer may join.

        Raises:
            UpdateRunning: not now.
            NoWorkerReady: no engine can be reached.
            InvalidUpdate: the model's engines know no such backend.
            EngineError: an engine cannot be reached.
        """
        if self.running is not None:
            raise UpdateRunning(f"model {self.name}: weights {self.running.version} are on their way")
        if request.backend is not self.policy.backend:
            raise InvalidUpdate(f"backend: the engines of {self.name} were started for {self.policy.backend}")
        async with self._lock:
            if not self._serving():
                raise NoWorkerReady(f"model {self.name}: no engine of it answers")
            self._numbers += 1
            group = Group(self._numbers, request)
            self.group = group
            try:
                group.members = await join_engines(group, self._serving(), self._files, self._start_soon)
            except EngineError as error:
                group.fail(str(error))
                raise
            except TimeoutError as error:
                group.fail("an engine did not answer in time")
                raise EngineTimeout("answer of every engine", TELL_LIMIT_S) from error
        self._start_soon(watch_joining, group, self._files)
        return group

    async def update(self, request: UpdateRequest) -> WeightUpdate:
        """Begin an update; return when every engine is ready to receive, so that a trainer may send, or at its end.

        Raises:
            WeightsUpdateError: it cannot begin.
        """
        if self._is_on_lanes and request.checkpoint is not None and not self._serving():
            return await self._keep_for_load(request)
        transfer = await self._check(request)
        update, run = self._begin(request, transfer)
        self._start_soon(self._perform, run, self.group if transfer.needs_all else None)
        await run.begun.wait()
        return update

    async def _keep_for_load(self, request: UpdateRequest) -> WeightUpdate:
        """Make a checkpoint the model's without an engine: the next that is loaded is brought to it.

        Raises:
            WeightsUpdateError: it cannot begin.
        """
        self._check_turn(request)
        await anyio.to_thread.run_sync(check_checkpoint, Path(str(request.checkpoint)), self._model)
        async with self._lock:
            update = self._new_update(request, {})
            update.complete()
            self.ended[update.state] += 1
            await self._commit(update)
            self.catch_up.bring_all()  # engines that were loaded meanwhile
        return update

    async def wait_over(self, number: int, limit_s: float) -> bool:
        """Return whether an update has ended, at the latest after ``limit_s``."""
        with anyio.move_on_after(limit_s):
            await self._ended.wait_until(lambda: not self._is_running(number))
        return not self._is_running(number)

    def _is_running(self, number: int) -> bool:
        return self.running is not None and self.running.number == number

    async def _check(self, request: UpdateRequest) -> Transfer:
        self._check_turn(request)
        if not self._serving():
            raise NoWorkerReady(f"model {self.name}: no engine of it answers")
        if request.checkpoint is not None:
            await anyio.to_thread.run_sync(check_checkpoint, Path(request.checkpoint), self._model)
            return CheckpointTransfer(is_extended=self._is_extended)
        await anyio.to_thread.run_sync(check_tensors, request.tensors, self._model)
        while self.group is not None and self.group.state is GroupState.JOINING:  # noqa: ASYNC110 - its limit ends that
            await anyio.sleep(JOIN_POLL_S)
        group = whole_group(self.group, request.group, self.name, self.workers)
        return GlooTransfer(group, self._files) if self.policy.backend is Backend.GLOO else NativeTransfer()

    def _check_turn(self, request: UpdateRequest) -> None:
        if self.running is not None:
            raise UpdateRunning(f"model {self.name}: weights {self.running.version} are on their way")
        if request.version is not None and request.version <= self.current.version:
            raise VersionNotNewer(f"model {self.name} has weights {self.current.version}, and versions only rise")

    def _begin(self, request: UpdateRequest, transfer: Transfer) -> tuple[WeightUpdate, UpdateRun]:
        workers = {worker.spec.id: worker for worker in self._serving()}
        update = self._new_update(request, workers)
        for worker in self.workers.values():
            if worker.now.state is WorkerState.STARTING:  # it would serve other weights after the update
                worker.drain_nowait(f"weights {update.version} are on their way", Hold.STALE_WEIGHTS)
        return update, UpdateRun(self.name, update, workers, transfer, self.policy, self._observe)

    def _new_update(self, request: UpdateRequest, workers: Mapping[WorkerId, SupervisedWorker]) -> WeightUpdate:
        self._check_turn(request)  # again: another caller may have been quicker while a checkpoint was checked
        self._numbers += 1
        update = WeightUpdate(
            self._numbers,
            self.current.version + 1 if request.version is None else request.version,
            self.current.version,
            request,
            self._clock,
            {name: worker.now.incarnation for name, worker in workers.items()},
        )
        self.updates.append(update)
        return update

    async def _perform(self, run: UpdateRun, group: Group | None) -> None:
        update = run.update
        try:
            async with self._lock:
                self._run = run
                await run.run(lambda: self._commit(update))
        except Exception as error:
            logger.exception("model %s: weights %d: a defect of Roundhouse", self.name, update.version)
            update.fail(f"{type(error).__name__}: {error}")
        finally:
            self._run = None
            self.ended[update.state] += 1
            if group is not None and update.state is not UpdateState.COMPLETED:
                group.fail(f"weights {update.version}: {update.error}")
            self._ended.notify()
        if update.request.tensors and update.state is not UpdateState.FAILED and self.policy.backend is Backend.GLOO:
            self.catch_up.keep_nowait(update, self._files)
        self.catch_up.bring_all()

    async def _commit(self, update: WeightUpdate) -> None:
        """Make the new version the model's, before any worker goes on with it."""
        self.catch_up.forget_fault()
        await self._current.change(replace(self.current, version=update.version, checkpoint=update.request.checkpoint))
        survivors = {share.worker for share in update.survivors}
        for worker in self.workers.values():
            if worker.spec.id in survivors:
                worker.resume_nowait(f"weights {update.version}", Hold.STALE_WEIGHTS)
            else:  # it was starting when the update began: it has its launch weights, or the last ones
                worker.drain_nowait(f"it lacks weights {update.version}", Hold.STALE_WEIGHTS)

    # Workers that must catch up

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a worker's change of state, without waiting."""
        weights = worker.weights
        if weights is None:
            return
        if self._run is not None:
            self._run.note_change(worker)
        if self.group is not None:
            self.group.note_member(
                worker.spec.id, worker.now.incarnation if worker.now.is_serving else None, worker.supervisor.because
            )
        if worker.now.state is WorkerState.STARTING and weights.incarnation != worker.now.incarnation:
            weights.change(self.current.launched, worker.now.incarnation)
            if self.current.version != self.current.launched or self.running is not None:
                worker.drain_nowait(f"it has weights {weights.version}", Hold.STALE_WEIGHTS)
        elif self._tasks is not None and worker.now.is_serving and Hold.STALE_WEIGHTS in worker.now.holds:
            self.catch_up.bring(worker)

    def _serving(self) -> list[SupervisedWorker]:
        return [worker for worker in self.workers.values() if worker.now.is_serving]

    def _start_soon(self, what: Callable[..., object], *args: object) -> None:
        if self._tasks is None:
            raise NoWorkerReady(f"model {self.name} is not running")
        self._tasks.start_soon(what, *args)  # type: ignore[arg-type]

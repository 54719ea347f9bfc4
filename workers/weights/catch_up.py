"""Brings engines with other weights than the model's to its version, before they take traffic.

A trainer's weights are stored for that through an engine that has them.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from msgspec.structs import replace

from transport.control import EngineControl
from transport.errors import EngineError
from workers.engine.launch.vllm import is_extended
from workers.errors import InvalidUpdate
from workers.log_context import line_about, of_worker
from workers.notifier import Notifier
from workers.outcome import FailureReason
from workers.spec import WorkerId
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.current_version import CurrentVersion, check_checkpoint
from workers.weights.receiver import ReceiverFiles, ask
from workers.weights.transfer import reload_checkpoint
from workers.weights.update import WeightUpdate

KEEP_POLL_S: Final = 0.2
DROP_LIMIT_S: Final = 30.0
BRING_AGAIN_S: Final = 5.0  # between two looks at a missing checkpoint
logger = logging.getLogger(__name__)


async def keep_weights(
    engines: Sequence[tuple[SupervisedWorker, int]],
    files: ReceiverFiles,
    update: int,
    folder: Path | None,
    limit_s: float,
) -> bool:
    """Have one engine write the weights to ``folder``, then all forget them; return whether one did.

    ``update`` is the update that brought them: weights of a later one are not touched.

    Engines are given with the incarnation that has the weights. If one dies meanwhile, the next one tries.
    """
    is_kept = False
    for worker, incarnation in engines if folder is not None else ():
        if worker.now.incarnation == incarnation and not is_kept:
            try:
                with anyio.fail_after(limit_s):
                    await _write(worker, files, update, str(folder))
                is_kept = True
            except (TimeoutError, EngineError) as error:
                line, said = line_about(of_worker(worker.spec.id, incarnation)), str(error) or "not in time"
                logger.warning("worker %s: weights could not be kept: %s", worker.spec.id, said, extra=line)
    for worker, incarnation in engines:
        if worker.now.incarnation == incarnation and worker.now.is_serving:
            try:
                with anyio.fail_after(DROP_LIMIT_S):
                    await ask(EngineControl(worker.endpoint), "forget", {"update": update})
            except (TimeoutError, EngineError) as error:
                line, said = line_about(of_worker(worker.spec.id, incarnation)), str(error) or "no answer"
                logger.warning("worker %s: weights are still in its memory: %s", worker.spec.id, said, extra=line)
    return is_kept


async def _write(worker: SupervisedWorker, files: ReceiverFiles, update: int, folder: str) -> None:
    state, *_ = await ask(EngineControl(worker.endpoint), "keep", {"folder": folder, "update": update})
    while state.stage != "kept":
        if (state.stage, state.update) != ("keeping", update) or not worker.now.is_serving:
            raise EngineError(state.error or state.stage)
        await anyio.sleep(KEEP_POLL_S)
        (state,) = files.read(worker.spec.id, 1)


class CatchUp:
    """Brings one model's engines up to date; ``lock`` guards each engine's change."""

    def __init__(
        self,
        workers: Mapping[WorkerId, SupervisedWorker],
        lock: anyio.Lock,
        current: CurrentVersion,
        start_soon: Callable[..., None],
    ) -> None:
        spec = next(iter(workers.values())).spec
        self._workers = workers
        self._model = spec.model
        self._name = spec.name
        self._policy = spec.weights
        self._is_extended = is_extended(spec)
        self.is_keeping = False  # the newest weights are being written for engines that start later
        self._kept = Notifier()
        self._lock = lock
        self._current = current
        self._start_soon = start_soon
        self._under_way: set[tuple[str, int]] = set()
        self._fault: str | None = None  # why no engine can load the version from its checkpoint

    def __repr__(self) -> str:
        return f"<CatchUp {sorted(self._under_way)} fault={self._fault!r}>"

    def forget_fault(self) -> None:
        """Forget the fault: the model has another version, with its own checkpoint."""
        self._fault = None

    def bring_all(self) -> None:
        """Begin to bring every engine to the version that has another."""
        for worker in self._workers.values():
            if worker.now.is_serving and Hold.STALE_WEIGHTS in worker.now.holds:
                self.bring(worker)

    def bring(self, worker: SupervisedWorker) -> None:
        """Begin to bring a worker's present engine to the version, unless that has begun."""
        place = (worker.spec.id, worker.now.incarnation)
        if place not in self._under_way:
            self._under_way.add(place)
            self._start_soon(self._bring, worker, worker.now.incarnation)

    def keep_nowait(self, update: WeightUpdate, files: ReceiverFiles) -> None:
        """Begin to store a trainer's weights through an engine, so that engines that start later can load them."""
        self.is_keeping = self._policy.keep
        self._start_soon(self._keep, update, files)

    async def wait_kept(self) -> None:
        """Return when no weights are being written for workers that start later."""
        await self._kept.wait_until(lambda: not self.is_keeping)

    async def _keep(self, update: WeightUpdate, files: ReceiverFiles) -> None:
        folder = self._current.kept_folder(update.version) if self._policy.keep else None
        engines = [(self._workers[share.worker], share.incarnation) for share in update.survivors]
        try:
            is_kept = await keep_weights(engines, files, update.number, folder, self._policy.keep_s)
            if folder is None:
                return
            if self._current.now.version == update.version and is_kept:
                self.forget_fault()
                await self._current.change(replace(self._current.now, checkpoint=str(folder)))
            elif self._current.now.version == update.version:
                logger.error("model %s: weights %d: no engine could keep them", self._name, update.version)
        finally:
            self.is_keeping = False
            self._kept.notify()
        await anyio.to_thread.run_sync(_remove_useless, folder, self._current.now.checkpoint)
        self.bring_all()

    def waits_for(self, worker: SupervisedWorker) -> str:
        """Return why a worker waits whose weights are not the model's."""
        if not worker.now.is_serving:
            return f"its engine: {worker.supervisor.because}"
        current = self._current.now
        is_there = current.checkpoint is not None or (worker.weights and worker.weights.version == current.version)
        if self._fault is None and is_there:
            return f"its turn to be brought to weights {current.version}"
        return self._missing()

    def _missing(self) -> str:
        how = "no copy of them was kept; the trainer's next update brings them"
        if self._fault is not None:
            how = f"their checkpoint cannot be read ({self._fault}); put it back, or bring others"
        elif self.is_keeping:
            how = "they are being written"
        return f"waits for weights {self._current.now.version}: {how}"

    async def _bring(self, worker: SupervisedWorker, incarnation: int) -> None:
        try:
            while worker.now.incarnation == incarnation and worker.now.is_serving:
                async with self._lock:
                    if worker.now.incarnation == incarnation and worker.now.is_serving:
                        self._fault = await self._load_current(worker, incarnation)
                if self._fault is None:
                    return
                line = line_about(of_worker(worker.spec.id, worker.now.incarnation))
                logger.warning("worker %s: %s", worker.spec.id, self._missing(), extra=line)
                await anyio.sleep(BRING_AGAIN_S)
        except (TimeoutError, EngineError) as error:
            because = f"it could not load weights {self._current.now.version}: {str(error) or 'not in time'}"
            if worker.now.incarnation == incarnation and worker.now.is_serving:
                worker.break_engine(FailureReason.ENGINE_UNREACHABLE, because, {})
        finally:
            self._under_way.discard((worker.spec.id, incarnation))

    async def _load_current(self, worker: SupervisedWorker, incarnation: int) -> str | None:
        """Load the version; return why that is impossible now, if trying would break the engine."""
        current, weights = self._current.now, worker.weights
        if weights is None:
            return None
        if weights.version != current.version:
            if current.checkpoint is None:
                line = line_about(of_worker(worker.spec.id, worker.now.incarnation))
                logger.warning("worker %s: %s", worker.spec.id, self._missing(), extra=line)
                return None
            try:
                await anyio.to_thread.run_sync(check_checkpoint, Path(current.checkpoint), self._model)
            except InvalidUpdate as error:
                return str(error)
            await self._load(worker, current.version, current.checkpoint)
            if worker.now.incarnation != incarnation:
                return None
            weights.change(current.version, incarnation)
        worker.resume_nowait(f"weights {current.version}", Hold.STALE_WEIGHTS)
        return None

    async def _load(self, worker: SupervisedWorker, version: int, checkpoint: str) -> None:
        control = EngineControl(worker.endpoint)
        worker.watch.pause()  # it may have turns in flight: it started before the end of the update that it missed
        try:
            with anyio.fail_after(self._policy.receive_s):
                await control.pause(clear_cache=True)
                await reload_checkpoint(control, checkpoint, is_extended=self._is_extended)
                await control.label(version)
                await control.resume()
        finally:
            worker.watch.unpause()


def _remove_useless(folder: Path, checkpoint: str | None) -> None:
    """Remove stored weights up to the version in ``folder``, except the checkpoint in use."""
    for other in folder.parent.glob("version-*"):
        if _version(other) <= _version(folder) and str(other) != checkpoint:
            shutil.rmtree(other, ignore_errors=True)


def _version(folder: Path) -> int:
    return int(folder.name.partition("-")[2])

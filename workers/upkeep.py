"""The weights and adapters that all engines of a model share, and the lock that guards changes to them."""

from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from workers.adapters.model_adapters import ModelAdapters
from workers.spec import WorkerSpec
from workers.supervised import SupervisedWorker
from workers.weights.model_weights import ModelWeights
from workers.weights.update_run import Observe


class ModelUpkeep:
    """One per model, for workers that load the same; nothing happens unless ``run`` is running.

    ``lock`` is held during every change to the model's engines.
    """

    def __init__(self, workers: Sequence[SupervisedWorker], state_dir: Path | None, observe: Observe) -> None:
        first = workers[0]
        self.name = first.spec.name
        self.lock = anyio.Lock()
        self.weights: ModelWeights | None = None
        self.adapters: ModelAdapters | None = None
        if first.weights is not None:
            self.weights = ModelWeights(self.name, workers, state_dir, observe, self.lock)
        if first.owns_engine and state_dir is not None:  # copies are kept there
            self.adapters = ModelAdapters(self.name, workers, state_dir, self.lock)
        self._loads = _what_is_loaded(first.spec)
        self._count = len(workers)
        self._scope: anyio.CancelScope | None = None

    def __repr__(self) -> str:
        return f"<ModelUpkeep {self.name} of {self._count}>"

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks until cancelled, or until ``end``."""
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as tasks:
                for part in (self.weights, self.adapters):
                    if part is not None:
                        await tasks.start(part.run)
                task_status.started()
                await anyio.sleep_forever()

    def end(self) -> None:
        """End the tasks."""
        if self._scope is not None:
            self._scope.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no worker is left."""
        return self._count == 0

    def fits(self, spec: WorkerSpec) -> bool:
        """Whether a worker of that specification loads the same as the present ones."""
        return _what_is_loaded(spec) == self._loads

    def add(self, worker: SupervisedWorker) -> None:
        """Add a worker whose engine has not been started; the caller holds the lock."""
        self._count += 1
        if self.weights is not None:
            self.weights.workers[worker.spec.id] = worker
        if self.adapters is not None:
            self.adapters.add(worker)

    def remove(self, worker: SupervisedWorker) -> None:
        """Remove a worker whose engine has ended; the caller holds the lock."""
        self._count -= 1
        if self.weights is not None:
            del self.weights.workers[worker.spec.id]
        if self.adapters is not None:
            self.adapters.workers.remove(worker)

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a worker's change of state, without waiting."""
        if self.weights is not None:
            self.weights.note_change(worker)
        if self.adapters is not None:
            self.adapters.note_change(worker)


def _what_is_loaded(spec: WorkerSpec) -> tuple[object, ...]:
    return spec.engine, spec.model, tuple(spec.command), spec.weights

"""The ready workers of one model together: their free slots, and those reserved for trials or wide turns. Pure."""

from service.conversations.job.job import TurnKey
from service.scheduling.core.kv_budgets import KvBudgets, KvNeed
from service.scheduling.core.slots import Reservation, WorkerSlots


class ModelSlots:
    """The ready workers of one model, in the order in which they got ready."""

    def __init__(self, kv: KvBudgets) -> None:
        self.workers: dict[str, WorkerSlots] = {}
        self.total = 0  # the slots of all workers
        self.coming: set[str] = set()  # workers whose next engine is on its way
        self.trial_worker: WorkerSlots | None = None  # reserved for suspects
        self._wide: tuple[WorkerSlots, TurnKey] | None = None  # worker reserved for a wide turn in this decision
        self._kv = kv

    def __repr__(self) -> str:
        return f"<ModelSlots {list(self.workers.values())}>"

    @property
    def free(self) -> int:
        """The slots that turns may take."""
        return sum(worker.offer for worker in self.workers.values())

    @property
    def has_free(self) -> bool:
        """Whether a turn may take any slot."""
        return any(worker.offer for worker in self.workers.values())

    @property
    def offering(self) -> list[WorkerSlots]:
        """The workers on which turns may start, the one with the most free slots first; full ones too."""
        return sorted((each for each in self.workers.values() if each.is_offering), key=lambda each: -each.free)

    @property
    def kv_budget(self) -> int | None:
        """The KV budget of all workers together, in tokens; None if slots bound one of them."""
        budgets = [self._kv.budget(worker) for worker in self.workers]
        known = [budget for budget in budgets if budget is not None]
        return sum(known) if known and len(known) == len(budgets) else None

    @property
    def kv_reserved(self) -> int:
        """The tokens that turns have reserved on the workers."""
        return sum(map(self._kv.reserved, self.workers))

    @property
    def emptiest(self) -> WorkerSlots | None:
        """The worker with the fewest taken slots; the newest of several."""
        return min(reversed(self.workers.values()), key=lambda worker: worker.taken, default=None)

    def best(self, cached: str | None, need: KvNeed, slots: int) -> WorkerSlots | None:
        """Return the worker for a turn: ``cached``, whose cache has its prompt, else the one with the most free slots.

        None unless ``slots`` are free on it, with room for ``need``.
        """
        best: WorkerSlots | None = None
        for each in self.workers.values():
            if each.is_offering and each.fits(slots, need):
                if each.name == cached:
                    return each
                if best is None or each.free > best.free:
                    best = each
        return best

    @property
    def is_reserved_for_wide(self) -> bool:
        """Whether a worker is reserved for a turn in this decision."""
        return self._wide is not None

    def reserve_for_wide(self, key: TurnKey, slots: int) -> None:
        """Reserve the worker that comes closest to ``slots`` free slots, then to room, until ``end_wide``."""

        def lacks(worker: WorkerSlots) -> tuple[int, int]:
            room = (self._kv.budget(worker.name) or 0) - self._kv.reserved(worker.name)
            return min(slots, worker.total) - worker.free, -room

        worker = min((each for each in self.workers.values() if each.is_offering), key=lacks, default=None)
        if worker is not None:
            worker.reserve(Reservation.WIDE)
            self._wide = worker, key

    def end_wide(self) -> tuple[TurnKey, int] | None:
        """End the reservation for a wide turn; return that turn and the worker's free slots.

        None without a reservation.
        """
        if self._wide is None:
            return None
        (worker, key), self._wide = self._wide, None
        worker.reserve(None)
        return key, worker.offer

    def reserve_for_trials(self, worker: WorkerSlots) -> None:
        """Reserve a worker for suspects, until it is released or not ready."""
        worker.reserve(Reservation.TRIALS)
        self.trial_worker = worker

    def release_trial_worker(self) -> None:
        """Release the worker reserved for trials: any turn may take it."""
        if self.trial_worker is not None:
            self.trial_worker.reserve(None)
            self.trial_worker = None

    def remove(self, worker: WorkerSlots) -> None:
        """Remove a worker that is no longer ready."""
        if self.trial_worker is worker:
            self.release_trial_worker()
        del self.workers[worker.name]
        self.count_slots()

    def count_slots(self) -> None:
        """Count the slots of all workers again."""
        self.total = sum(worker.total for worker in self.workers.values())

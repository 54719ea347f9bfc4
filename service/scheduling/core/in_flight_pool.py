"""The turns in flight, and the workers whose slots they are on (docs/lifecycle.md, "Turn"). Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.kv_budgets import NOTHING, KvBudgets, KvNeed
from service.scheduling.core.model_slots import ModelSlots
from service.scheduling.core.slots import Slot, WorkerSlots


class _Seat:
    """The seat of one turn: its slots, or the one slot that it has lent."""

    __slots__ = ("is_lent", "need", "opening", "slots", "worker")

    def __init__(self, worker: WorkerSlots, slots: Sequence[Slot], need: KvNeed) -> None:
        self.worker = worker
        self.slots = slots
        self.need = need
        self.opening = worker.opening
        self.is_lent = False


class _Models(dict[str, ModelSlots]):
    """The ready workers of each model; a model without any gets an empty entry when first read."""

    def __init__(self, kv: KvBudgets) -> None:
        super().__init__()
        self._kv = kv

    def __missing__(self, model: str) -> ModelSlots:
        self[model] = ModelSlots(self._kv)
        return self[model]


class InFlightPool:
    """Written by the core alone; a worker never has more turns than slots."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerSlots] = {}  # workers that are ready, or were
        self.ready: dict[str, WorkerSlots] = {}  # in the order in which they got ready
        self.by_job: Counter[JobId] = Counter()
        self.kv = KvBudgets()
        self.models = _Models(self.kv)
        self._seats: dict[TurnKey, _Seat] = {}

    def __repr__(self) -> str:
        return f"<InFlightPool {list(self.ready.values())}>"

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._seats)

    def __contains__(self, key: object) -> bool:
        """Tell whether a turn is in flight."""
        return key in self._seats

    def keys(self) -> list[TurnKey]:
        """List the turns in flight, in no order."""
        return list(self._seats)

    def conversations_of(self, job_id: JobId) -> list[str]:
        """List the conversations of a job that have a turn in flight."""
        if not self.by_job[job_id]:
            return []
        return list(dict.fromkeys(key.conversation_id for key in self._seats if key.job_id == job_id))

    # Workers

    def worker(self, name: str) -> WorkerSlots:
        """Return the slots of a worker; one that was never ready has none."""
        return self.workers.get(name) or WorkerSlots(name, self.kv)

    def open(self, worker: str, model: str, slots: int, kv_tokens: int | None = None, kv_block: int = 1) -> None:
        """Offer a worker's slots, up to the size of its KV cache."""
        self.kv.open(worker, kv_tokens, kv_block)
        opened = self.workers.setdefault(worker, WorkerSlots(worker, self.kv))
        opened.open(model, slots)
        self.ready[worker] = self.models[model].workers[worker] = opened
        self.models[model].count_slots()
        for each in self.models.values():
            each.coming.discard(worker)

    def close(self, worker: str, *, returns: bool = False) -> str | None:
        """Stop offering a worker's slots; return its model if it was open. Turns stay on it until they are removed.

        ``returns`` says that its next engine is on its way.
        """
        closed = self.ready.pop(worker, None)
        known = self.workers.get(worker)
        if known is None:
            return None
        of_model = self.models[known.model]
        was_coming = worker in of_model.coming
        of_model.coming.discard(worker)
        if returns and (closed or was_coming):
            of_model.coming.add(worker)
        if closed is None:
            return None
        of_model.remove(closed)
        closed.close()
        return closed.model

    # Turns

    def worker_of(self, key: TurnKey) -> WorkerSlots | None:
        """Return the worker that a turn is on, None unless it is in flight."""
        seat = self._seats.get(key)
        return None if seat is None else seat.worker

    def slots_of(self, key: TurnKey) -> int:
        """Return how many slots a turn in flight has, or had before it lent its one."""
        return len(self._seats[key].slots) if key in self._seats else 1

    def is_on_trial(self, key: TurnKey) -> bool:
        """Whether a turn is on trial."""
        seat = self._seats.get(key)
        return seat is not None and seat.worker.trial == key

    def add(
        self, key: TurnKey, worker: str, need: KvNeed = NOTHING, *, slots: int = 1, is_suspect: bool = False
    ) -> int:
        """Put a turn on one or several slots, with its need of the KV cache; return the number of its slots."""
        on = self.workers[worker]
        self.kv.reserve(worker, key, need)
        count = min(slots, on.total) if slots > 1 else 1
        self._seats[key] = _Seat(on, on.take(key, count, is_suspect=is_suspect), need)
        self.by_job[key.job_id] += 1
        return count

    def remove(self, key: TurnKey) -> str | None:
        """Take a turn off its slots; return the worker, None unless it is in flight."""
        seat = self._seats.pop(key, None)
        if seat is None:
            return None
        if seat.is_lent:
            seat.worker.forget_lent(key, seat.slots[0])
        else:
            seat.worker.take_off(key, seat.slots)
            self.kv.free_room(seat.worker.name, key)
        self.by_job[key.job_id] -= 1
        if not self.by_job[key.job_id]:
            del self.by_job[key.job_id]
        return seat.worker.name

    # Slots lent while tools run

    def may_lend(self, key: TurnKey) -> bool:
        """Whether a turn may lend its slot: it has one, and is not on trial."""
        seat = self._seats[key]
        return seat.worker.is_ready and len(seat.slots) == 1 and seat.worker.trial != key

    def lend(self, key: TurnKey) -> bool:
        """Lend the slot and the room of a turn in flight, if it may."""
        seat = self._seats[key]
        if seat.is_lent or not self.may_lend(key):
            return False
        seat.is_lent, seat.opening = True, seat.worker.opening
        seat.need = self.kv.need_of(seat.worker.name, key) or NOTHING
        seat.worker.lend(seat.slots[0])
        self.kv.free_room(seat.worker.name, key)
        return True

    def has_lent(self, key: TurnKey) -> bool:
        """Whether a turn in flight has lent its slot."""
        return self._seats[key].is_lent

    def lender(self, key: TurnKey) -> WorkerSlots | None:
        """Return the worker on which a turn has lent its slot; None if that worker was not ready all the time."""
        seat = self._seats.get(key)
        if seat is None or not seat.is_lent or not seat.worker.is_ready or seat.worker.opening != seat.opening:
            return None
        return seat.worker

    def take_back(self, key: TurnKey) -> bool:
        """Give a turn that lent its slot a free slot on the same worker, if its KV need fits.

        It gets one even if suspects are about to be tried there: without lending it would still have its slot.
        """
        seat = self._seats[key]
        worker = seat.worker
        if worker.trial is not None or not self.kv.fits(worker.name, seat.need):
            return False
        slot = worker.take_back(key, seat.slots[0])
        if slot is None:
            return False
        seat.slots, seat.is_lent = (slot,), False
        self.kv.reserve(worker.name, key, seat.need)
        return True

    # Integrity

    def check(self) -> Iterator[str | None]:
        """Report counts, slots, reservations and trials that do not add up."""
        if (by_job := Counter(key.job_id for key in self._seats)) != self.by_job:
            yield f"{dict(by_job)} are in flight, {dict(self.by_job)} are counted"
        seated: dict[str, dict[TurnKey, Sequence[Slot]]] = {}
        for key, seat in self._seats.items():
            if not seat.is_lent:
                seated.setdefault(seat.worker.name, {})[key] = seat.slots
            yield None
        for name, worker in self.workers.items():
            yield from worker.check(seated.get(name, {}))
        yield from (f"{name} has reserved, and is unknown" for name in self.kv.workers if name not in self.workers)
        yield from self.kv.check()

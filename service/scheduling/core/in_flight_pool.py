"""The slots of all ready workers, and the turns in flight on them (specification, "Three pools"). Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence

from service.conversations.job import JobId, TurnKey
from service.scheduling.core.kv_budgets import NOTHING, KvBudgets, KvNeed


class InFlightPool:
    """Written by the core alone; never more turns on a worker than it has slots."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[str, int]] = {}  # worker -> its model and its slots; only workers that are ready
        self._workers: dict[TurnKey, str] = {}
        self._wide: dict[TurnKey, int] = {}  # turns on more slots than one
        self._taken: dict[str, int] = {}
        self._most_taken: dict[str, int] = {}  # more than its slots where it was lowered under the turns on it
        self._coming: dict[str, str] = {}  # workers that will be ready again, and their models
        self._reserved: dict[str, str] = {}  # of a model: the worker that tries suspects, and takes nothing else
        self._trials: dict[str, TurnKey] = {}  # who is being tried on a worker
        self._openings: Counter[str] = Counter()  # of a worker: which time its slots are offered
        self._lent: dict[TurnKey, tuple[int, KvNeed]] = {}  # turns on no slot for now: since which opening, their need
        self._kept: tuple[str, TurnKey] | None = None  # a worker, and the turn it is kept for in this decision
        self._held: dict[TurnKey, str] = {}  # slots that wait for the next request of a program, by its last one
        self.owing: set[str] = set()  # workers that start nothing before they have given a slot back
        self.by_job: Counter[JobId] = Counter()
        self.kv = KvBudgets()

    def __repr__(self) -> str:
        return f"<InFlightPool {self._slots} taken={self._taken}>"

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._workers)

    def __contains__(self, key: object) -> bool:
        """Tell whether a turn is in flight."""
        return key in self._workers

    def keys(self) -> list[TurnKey]:
        """List the turns, in no order."""
        return list(self._workers)

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that are ready."""
        return tuple(self._slots)

    def conversations_of(self, job_id: JobId) -> list[str]:
        """List the conversations of a job that have a turn in flight."""
        if not self.by_job[job_id]:
            return []
        return list(dict.fromkeys(key.conversation_id for key in self._workers if key.job_id == job_id))

    def open(self, worker: str, model: str, slots: int, kv_tokens: int | None = None, kv_block: int = 1) -> None:
        """Offer a worker's slots, as far as there is room in its KV cache."""
        self.kv.open(worker, kv_tokens, kv_block)
        self._openings[worker] += worker not in self._slots
        self._slots[worker] = (model, slots)
        self._most_taken[worker] = max(slots, self._taken.get(worker, 0))
        self._coming.pop(worker, None)

    def close(self, worker: str, *, returns: bool = False) -> str | None:
        """Offer a worker's slots no more; return its model, if it was open. Turns on it stay until they are removed.

        ``returns`` says that another engine of it is on its way.
        """
        closed = self._slots.pop(worker, None)
        model = closed[0] if closed else self._coming.pop(worker, None)
        if model is not None and returns:
            self._coming[worker] = model
        self._reserved = {of: tries for of, tries in self._reserved.items() if tries != worker}
        self._held = {key: holder for key, holder in self._held.items() if holder != worker}  # its cache is gone
        return closed[0] if closed else None

    def kv_budget(self, model: str) -> int | None:
        """Return the KV budget of a model's ready workers together, in tokens; None if slots bound one of them."""
        budgets = [self.kv.budget(worker) for worker, (of, _) in self._slots.items() if of == model]
        known = [budget for budget in budgets if budget is not None]
        return sum(known) if known and len(known) == len(budgets) else None

    def kv_reserved(self, model: str) -> int:
        """Return the tokens that turns have reserved on a model's ready workers."""
        return sum(self.kv.reserved(worker) for worker, (of, _) in self._slots.items() if of == model)

    def has_model(self, worker: str, model: str) -> bool:
        """Whether a worker is ready and serves a model now."""
        return self._slots.get(worker, ("", 0))[0] == model

    def offer(self, worker: str) -> tuple[int, int]:
        """Return how many slots of a worker are free, and how many it has; nothing of one that lends none."""
        model, slots = self._slots.get(worker, ("", 0))
        if not self._takes_any(worker, model):
            return 0, 0
        return max(0, slots - self._taken.get(worker, 0) - (self.held_on(worker) if self._held else 0)), slots

    # Slots held for programs

    def hold(self, key: TurnKey, worker: str) -> bool:
        """Hold the slot of a turn that has just ended, unless its worker offers none or is wanted as a whole."""
        if worker not in self._slots or worker in self._trials or worker in self._reserved.values():
            return False
        if self.offer(worker)[0] < 1:
            return False
        self._held[key] = worker
        return True

    def end_hold(self, key: TurnKey) -> bool:
        """Let any turn have a slot that was held; return whether it was."""
        return self._held.pop(key, None) is not None

    def held_on(self, worker: str) -> int:
        """Count the slots of a worker that wait for the next requests of programs."""
        return sum(holder == worker for holder in self._held.values())

    # Slots kept for one turn

    def keep(self, model: str, key: TurnKey, slots: int) -> None:
        """Keep the worker that comes next to so many free slots, and to room, from all turns until ``end_keeping``."""
        offers = self._free_by_worker(model)
        lacks = {worker: min(slots, self._slots[worker][1]) - free for free, worker in offers}
        if lacks:
            room = {worker: (self.kv.budget(worker) or 0) - self.kv.reserved(worker) for worker in lacks}
            self._kept = min(lacks, key=lambda worker: (lacks[worker], -room[worker])), key

    @property
    def is_keeping(self) -> bool:
        """Whether a worker is kept for one turn."""
        return self._kept is not None

    def end_keeping(self) -> tuple[TurnKey, int] | None:
        """Let every worker take any turn again; return for which turn one was kept, and how many slots of it are free.

        None where none was.
        """
        if self._kept is None:
            return None
        (worker, key), self._kept = self._kept, None
        return key, self.offer(worker)[0]

    # Trials

    def reserved(self, model: str) -> str | None:
        """Return the worker of a model that tries suspects, if one does."""
        return self._reserved.get(model)

    def is_trying(self, worker: str) -> bool:
        """Whether a suspect is being tried there."""
        return worker in self._trials

    def is_on_trial(self, key: TurnKey) -> bool:
        """Whether a turn is being tried."""
        return self._trials.get(self._workers.get(key, "")) == key

    def slots_of(self, key: TurnKey) -> int:
        """Return how many slots a turn in flight has."""
        return self._wide.get(key, 1)

    def is_empty(self, worker: str) -> bool:
        """Whether no turn is on a worker."""
        return not self._taken.get(worker)

    def is_coming(self, model: str) -> bool:
        """Whether another engine of the model is on its way."""
        return model in self._coming.values()

    def is_alone(self, model: str) -> bool:
        """Whether a worker that tries suspects of a model leaves no other one that is ready."""
        return sum(of == model for of, _ in self._slots.values()) <= 1

    def emptiest(self, model: str) -> str | None:
        """Return the ready worker of a model with the fewest turns on it; the newest of several."""
        ready = [worker for worker, (of, _) in self._slots.items() if of == model]
        return min(reversed(ready), key=lambda worker: self._taken.get(worker, 0), default=None)

    def reserve(self, model: str, worker: str) -> None:
        """Reserve a worker for suspects, one at a time, until it is released or not ready."""
        self._reserved[model] = worker

    def ungroup_model(self, model: str) -> None:
        """Release all workers of a model for any turn."""
        self._reserved.pop(model, None)

    # Turns

    def with_room(self, model: str) -> list[str]:
        """List the workers of a model that have a free slot, the emptiest first."""
        offers = [(free, worker) for free, worker in self._free_by_worker(model) if free > 0]
        return [worker for _, worker in sorted(offers, key=lambda offer: -offer[0])]

    def total(self, model: str) -> int:
        """Count the slots of a model."""
        return sum(slots for offered, slots in self._slots.values() if offered == model)

    def free(self, model: str) -> int:
        """Count the free slots of a model."""
        return sum(max(0, free) for free, _ in self._free_by_worker(model))

    def has_free(self, model: str) -> bool:
        """Whether any slot of a model is free."""
        return any(free > 0 for free, _ in self._free_by_worker(model))

    def best(self, model: str, cached: str | None = None, need: KvNeed = NOTHING, slots: int = 1) -> str | None:
        """Return the worker for a turn: ``cached``, whose cache holds its prompt, else that with the most free slots.

        None where not so many ``slots`` are free, with room for ``need``.
        """
        free_slots = self._free_by_worker(model)
        offers = [(free, worker) for free, worker in free_slots if self._fits(worker, free, slots, need)]
        return max(offers, key=lambda offer: (offer[1] == cached, offer[0]), default=(0, None))[1]

    def fits(self, worker: str, slots: int, need: KvNeed) -> bool:
        """Whether a worker has so many slots free now, or all that it has, with room for ``need``."""
        return self._fits(worker, self.offer(worker)[0], slots, need)

    def worker_of(self, key: TurnKey) -> str | None:
        """Return the worker that a turn is on, None where it is on none."""
        return self._workers.get(key)

    def add(
        self, key: TurnKey, worker: str, need: KvNeed = NOTHING, *, slots: int = 1, is_suspect: bool = False
    ) -> int:
        """Put a turn on a slot, or on several, with what it needs of the KV cache; return how many slots it has."""
        self.kv.reserve(worker, key, need)
        taken = min(slots, self._slots[worker][1]) if slots > 1 else 1
        if taken > 1:
            self._wide[key] = taken
        if is_suspect:
            self._trials[worker] = key
        self._workers[key] = worker
        self.by_job[key.job_id] += 1
        self._taken[worker] = self._taken.get(worker, 0) + taken
        return taken

    def remove(self, key: TurnKey) -> str | None:
        """Take a turn off its slot; return the worker, None where it was on none."""
        worker = self._workers.pop(key, None)
        if worker is None:
            return None
        slots = self._wide.pop(key, 1)
        if self._lent.pop(key, None) is None:
            self._taken[worker] -= slots
            self.kv.free_room(worker, key)
        self.by_job[key.job_id] -= 1
        if not self.by_job[key.job_id]:
            del self.by_job[key.job_id]
        if self._trials.get(worker) == key:
            del self._trials[worker]
        return worker

    # Slots lent while tools run

    def may_lend(self, key: TurnKey) -> bool:
        """Whether others may have a turn's slot for a while: it has one, and is not tried there by itself."""
        worker = self._workers.get(key)
        return worker in self._slots and key not in self._wide and self._trials.get(worker) != key

    def lend(self, key: TurnKey) -> bool:
        """Let others have the slot and the room of a turn in flight, if they may."""
        if key in self._lent or not self.may_lend(key):
            return False
        worker = self._workers[key]
        self._lent[key] = (self._openings[worker], self.kv.need_of(worker, key) or NOTHING)
        self._taken[worker] -= 1
        self.kv.free_room(worker, key)
        return True

    def has_lent(self, key: TurnKey) -> bool:
        """Whether a turn in flight is on no slot for now."""
        return key in self._lent

    def lender(self, key: TurnKey) -> str | None:
        """Return the worker on which a turn has lent its slot; None where that offers none, or has not all the time."""
        worker = self._workers.get(key)
        opening, _ = self._lent.get(key, (0, NOTHING))
        return worker if worker in self._slots and self._openings[worker] == opening else None

    def take_back(self, key: TurnKey) -> bool:
        """Put a turn that has lent its slot on one of the same worker, if one is free, with room for the turn.

        It goes on where it was, even if its worker is about to try suspects: it would have kept its slot.
        """
        worker, (_, need) = self._workers[key], self._lent[key]
        _, slots = self._slots[worker]
        if worker in self._trials or not self._fits(worker, slots - self._taken.get(worker, 0), 1, need):
            return False
        del self._lent[key]
        self._taken[worker] += 1
        self.kv.reserve(worker, key, need)
        return True

    # Integrity

    def check(self) -> Iterator[str | None]:
        """Tell what does not add up: counts, slots, reservations, trials."""
        if (by_job := Counter(key.job_id for key in self._workers)) != self.by_job:
            yield f"{dict(by_job)} are in flight, {dict(self.by_job)} are counted"
        yield from (f"{key} is not in flight" for key in {*self._wide, *self._lent} - self._workers.keys())
        seated: dict[str, list[TurnKey]] = {}
        for key, worker in self._workers.items():
            if key not in self._lent:
                seated.setdefault(worker, []).append(key)
            yield None
        for worker in {*self._slots, *self._taken, *self.kv.workers, *seated}:
            yield from self._check_worker(worker, seated.get(worker, []))
        yield from self.kv.check()

    def _check_worker(self, worker: str, seated: Sequence[TurnKey]) -> Iterator[str | None]:
        taken, used = self._taken.get(worker, 0), sum(map(self.slots_of, seated))
        if taken != used:
            yield f"{worker}: turns have {used} slots, {taken} are counted"
        if worker in self._slots and taken > self._most_taken[worker]:
            yield f"{worker}: {taken} slots of {self._slots[worker][1]} are taken"
        if set(seated) != self.kv.needs(worker).keys():
            yield f"{worker}: {seated} are on slots, {sorted(self.kv.needs(worker))} have reserved"
        if worker in self._trials and seated != [self._trials[worker]]:
            yield f"{worker}: {self._trials[worker]} is tried beside {seated}"

    def _fits(self, worker: str, free: int, slots: int, need: KvNeed) -> bool:
        return free >= max(1, min(slots, self._slots.get(worker, ("", 0))[1])) and self.kv.fits(worker, need)

    def _free_by_worker(self, model: str) -> list[tuple[int, str]]:
        return [
            (slots - self._taken.get(worker, 0) - (self.held_on(worker) if self._held else 0), worker)
            for worker, (offered, slots) in self._slots.items()
            if offered == model and self._takes_any(worker, model)
        ]

    def _takes_any(self, worker: str, model: str) -> bool:
        # A worker that was drained and resumed in mid-trial is reserved no more, and the suspect is still alone on it.
        if self._kept is not None and worker == self._kept[0]:
            return False
        return worker != self._reserved.get(model) and worker not in self._trials and worker not in self.owing

"""Two of seed 000's three pools: pre-departure (here: ready) and in flight. Pending turns stay with their conversation.

A turn is in exactly one. Pure.
"""

import heapq
from collections import Counter

from service.conversations.job import JobId, TurnKey
from service.scheduling.policy import Rank


class ReadyPool:
    """Ready turns, a heap for each model, so that a full model's turns are never scanned to find another's."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[tuple[Rank, int, TurnKey]]] = {}
        self._entries: dict[TurnKey, tuple[str, int]] = {}  # the model, and the number of the entry that counts
        self._numbers = 0
        self._sizes: dict[str, int] = {}
        self.by_job: Counter[JobId] = Counter()

    def __len__(self) -> int:
        """Count the turns."""
        return len(self._entries)

    def __repr__(self) -> str:
        """State how many turns of each model wait."""
        return f"<ReadyPool {self._sizes}>"

    def models(self) -> list[str]:
        """Return the models for which turns wait."""
        return [model for model, size in self._sizes.items() if size]

    def count(self, model: str) -> int:
        """Count the turns of one model."""
        return self._sizes.get(model, 0)

    def push(self, key: TurnKey, model: str, rank: Rank) -> None:
        """Add a turn."""
        if key in self._entries:
            raise RuntimeError(f"{key} is ready already")
        self._numbers += 1
        self._entries[key] = (model, self._numbers)
        self._sizes[model] = self.count(model) + 1
        self.by_job[key.job_id] += 1
        heapq.heappush(self._heaps.setdefault(model, []), (rank, self._numbers, key))

    def pop(self, model: str) -> TurnKey:
        """Take the first turn of ``model``; IndexError where there is none."""
        heap = self._heaps.get(model, [])
        while True:
            _, number, key = heapq.heappop(heap)
            if self._entries.get(key) == (model, number):
                self.discard(key)
                return key

    def discard(self, key: TurnKey) -> None:
        """Take a turn out, if it is there; its place in the heap is cleared when it comes up."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._sizes[entry[0]] -= 1
            self.by_job -= Counter([key.job_id])


class Seats:
    """The slots of all ready workers, and which turns sit on them."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[str, int]] = {}  # worker -> its model and its slots; only workers that are ready
        self._seated: dict[TurnKey, str] = {}
        self._taken: dict[str, int] = {}
        self._suspects: dict[str, TurnKey] = {}  # at most one a worker
        self.by_job: Counter[JobId] = Counter()

    def __repr__(self) -> str:
        """State the workers and their turns."""
        return f"<Seats {self._slots} taken={self._taken}>"

    def __len__(self) -> int:
        """Count the turns in flight."""
        return len(self._seated)

    def __contains__(self, key: object) -> bool:
        """Tell whether a turn is in flight."""
        return key in self._seated

    def open(self, worker: str, model: str, slots: int) -> None:
        """Offer a worker's slots."""
        self._slots[worker] = (model, slots)

    def close(self, worker: str) -> None:
        """Offer a worker's slots no more; turns that sit there stay until they rise."""
        self._slots.pop(worker, None)

    def free(self, model: str) -> int:
        """Count the free slots of a model."""
        return sum(max(0, free) for free, _ in self._free_by_worker(model))

    def best(self, model: str, *, for_suspect: bool = False) -> str | None:
        """Return the worker of ``model`` with the most free slots, None where there is none with any.

        A suspect sits on no worker that has one already.
        """
        offers = self._free_by_worker(model)
        if for_suspect:
            offers = [(free, worker) for free, worker in offers if worker not in self._suspects]
        free, worker = max(offers, key=lambda offer: offer[0], default=(0, ""))
        return worker if free > 0 else None

    def seat(self, key: TurnKey, worker: str, *, is_suspect: bool = False) -> None:
        """Put a turn on a slot."""
        if is_suspect:
            self._suspects[worker] = key
        self._seated[key] = worker
        self.by_job[key.job_id] += 1
        self._taken[worker] = self._taken.get(worker, 0) + 1

    def rise(self, key: TurnKey) -> bool:
        """Take a turn off its slot; return whether it sat on one."""
        worker = self._seated.pop(key, None)
        if worker is None:
            return False
        self._taken[worker] -= 1
        self.by_job -= Counter([key.job_id])
        if self._suspects.get(worker) == key:
            del self._suspects[worker]
        return True

    def _free_by_worker(self, model: str) -> list[tuple[int, str]]:
        return [
            (slots - self._taken.get(worker, 0), worker)
            for worker, (offered, slots) in self._slots.items()
            if offered == model
        ]

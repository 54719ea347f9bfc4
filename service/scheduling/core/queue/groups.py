"""One kind of turn at a time on a worker (specification, "Grouping"): for engines that batch only what is alike. Pure.

A worker takes turns of one signature (adapter and sampling parameters) until it has none left, or others have waited
for ``STREAK`` times its slots; then it runs empty, and takes up the signature of the turn that has waited longest of
those others. So a signature waits for at most so many starts of each other one.
"""

import heapq
from typing import Final

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.queue.ready_queue import LEAST, SLACK, JobLoad, PolicyFactory, ReadyQueue, ReadyTurn

STREAK: Final = 4  # starts a slot, while others wait


class GroupedQueue(ReadyQueue):
    """The ready turns of one model, in a queue for each signature, each in the policy's order."""

    def __init__(self, policy: PolicyFactory) -> None:
        super().__init__()
        self._policy = policy
        self._groups: dict[str, ReadyQueue] = {}
        self._ages: dict[str, list[tuple[int, TurnKey]]] = {}  # of each group, a heap: when its turns got ready
        self._loads: dict[JobId, JobLoad] = {}
        self._slots: int | None = None

    def __repr__(self) -> str:
        return f"<GroupedQueue {len(self)} in {len(self._groups)}>"

    @property
    def entries(self) -> int:
        """The number of places that the orders of all groups, and their ages, keep."""
        ages = sum(map(len, self._ages.values()))
        return super().entries + ages + sum(group.entries for group in self._groups.values())

    @property
    def groups(self) -> tuple[ReadyQueue, ...]:
        """The queues of the signatures that wait."""
        return tuple(self._groups.values())

    def push(self, turn: ReadyTurn) -> None:
        """Add a turn to those of its signature."""
        if turn.key in self._turns:
            raise RuntimeError(f"{turn.key} is ready already")
        self._turns[turn.key] = turn
        if turn.is_front:  # ahead of all groups: others wait for it
            self._front.append(turn)
            return
        self._group(turn.signature).push(turn)
        self._note_age(turn)

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back that was taken and cannot start."""
        if turn.is_front:
            super().push_back(turn)
            return
        self._turns[turn.key] = turn
        self._group(turn.signature).push_back(turn)
        self._note_age(turn)

    def pop(self) -> ReadyTurn:
        """Take the next turn of the oldest signature; IndexError if no turn waits."""
        front = next(self._take_first(), None)
        if front is not None:
            del self._turns[front.key]
            return front
        oldest = self.oldest()
        if oldest is None:
            raise IndexError("no turn is ready")
        return self.pop_of(oldest)

    def pop_of(self, signature: str) -> ReadyTurn:
        """Take the turn that goes next among those of one signature, of which there is one."""
        turn = self._groups[signature].pop()
        del self._turns[turn.key]
        self._close(signature)
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Take a turn out, if it is there."""
        turn = self._turns.pop(key, None)
        if turn is not None and not turn.is_front:
            self._groups[turn.signature].discard(key)
            self._close(turn.signature)
        return turn

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next: those ahead of all, then signature by signature, the oldest first."""
        first = [turn for turn in self._front if self._is_waiting(turn)][:count]
        for signature in sorted(self._groups, key=self._age):
            if len(first) >= count:
                break
            first += self._groups[signature].heads(count - len(first))
        return first

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Tell every group."""
        if load is None:
            self._loads.pop(job_id, None)
        else:
            self._loads[job_id] = load
        for group in self._groups.values():
            group.note_load(job_id, load)

    def note_slots(self, slots: int) -> None:
        """Tell every group."""
        self._slots = slots
        for group in self._groups.values():
            group.note_slots(slots)

    def note_begun(self, key: TurnKey) -> None:
        """Tell its group."""
        turn = self._turns.get(key)
        if turn is not None and not turn.is_front:
            self._groups[turn.signature].note_begun(key)

    def oldest(self) -> str | None:
        """Return the signature of the turn that has waited longest."""
        return min(self._groups, key=self._age, default=None)

    def oldest_beside(self, signature: str) -> str | None:
        """Return the signature, other than one, of the turn that has waited longest."""
        return min((name for name in self._groups if name != signature), key=self._age, default=None)

    def has(self, signature: str) -> bool:
        """Whether any turn of a signature waits."""
        return signature in self._groups

    def has_others(self, signature: str) -> bool:
        """Whether any turn of another signature waits."""
        return len(self._groups) > self.has(signature)

    def _group(self, signature: str) -> ReadyQueue:
        group = self._groups.get(signature)
        if group is None:
            group = self._groups[signature] = self._policy()
            if self._slots is not None:
                group.note_slots(self._slots)
            for job_id, load in self._loads.items():
                group.note_load(job_id, load)
        return group

    def _close(self, signature: str) -> None:
        if not self._groups[signature]:
            del self._groups[signature]
            self._ages.pop(signature, None)

    def _note_age(self, turn: ReadyTurn) -> None:
        ages = self._ages.setdefault(turn.signature, [])
        heapq.heappush(ages, (turn.ready_order, turn.key))
        if len(ages) > SLACK * len(self) + LEAST:
            same = (each for each in self._turns.values() if each.signature == turn.signature and not each.is_front)
            self._ages[turn.signature] = sorted((each.ready_order, each.key) for each in same)

    def _age(self, signature: str) -> int:
        """Return when the turn of a group got ready that has waited longest."""
        ages = self._ages[signature]
        while True:
            ready_order, key = ages[0]
            turn = self._turns.get(key)
            if turn is not None and turn.ready_order == ready_order:
                return ready_order
            heapq.heappop(ages)

    def _insert(self, turn: ReadyTurn) -> None:
        self._group(turn.signature).push(turn)

    def _take(self) -> ReadyTurn:
        return self.pop()

    def _clear(self) -> None:
        self._groups.clear()


class Shifts:
    """Which signature each worker runs, and for how many starts while others waited; written by the core alone."""

    def __init__(self) -> None:
        self._shifts: dict[str, tuple[str, int]] = {}

    def __repr__(self) -> str:
        return f"<Shifts {self._shifts}>"

    def take_back(self, worker: str) -> None:
        """Uncount a start: the turn was taken, and has not started."""
        signature, streak = self._shifts[worker]
        self._shifts[worker] = (signature, max(0, streak - 1))

    def take_turn(self, worker: str, ready: GroupedQueue, *, slots: int, is_empty: bool) -> ReadyTurn | None:
        """Take the turn that a worker of so many slots starts now; None where it runs empty first, or none waits."""
        oldest = ready.oldest()
        if oldest is None:
            return None
        signature, streak = self._shifts.get(worker, (oldest, 0))
        if is_empty:
            other = ready.oldest_beside(signature) if streak >= STREAK * slots else None
            signature, streak = other or oldest, 0
        if not ready.has(signature):
            return None
        if not ready.has_others(signature):
            streak = 0
        elif streak >= STREAK * slots:
            return None
        else:
            streak += 1
        self._shifts[worker] = (signature, streak)
        return ready.pop_of(signature)

"""One kind of turn at a time on a worker (specification, "Grouping"), for engines that only batch equal turns. Pure.

A worker takes turns of one signature (adapter and sampling parameters) until none is left, or until other turns have
waited for ``STREAK`` starts per slot. Then it runs empty, and takes the signature of the other turn that has waited
longest. So a signature waits for at most that many starts of each other signature.
"""

import heapq
from typing import Final

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.queue.ready_queue import LEAST, SLACK, JobLoad, PolicyFactory, ReadyQueue, ReadyTurn

STREAK: Final = 4  # starts per slot while other turns wait


class GroupedQueue(ReadyQueue):
    """The ready turns of one model, in a queue for each signature, each in the policy's order."""

    def __init__(self, policy: PolicyFactory) -> None:
        super().__init__()
        self._policy = policy
        self._groups: dict[str, ReadyQueue] = {}
        # By group: a heap of the times at which its turns became ready
        self._ages: dict[str, list[tuple[int, TurnKey]]] = {}
        self._loads: dict[JobId, JobLoad] = {}
        self._slots: int | None = None

    def __repr__(self) -> str:
        return f"<GroupedQueue {len(self)} in {len(self._groups)}>"

    @property
    def entries(self) -> int:
        """The number of entries in the orders and the ages of all groups."""
        ages = sum(map(len, self._ages.values()))
        return super().entries + ages + sum(group.entries for group in self._groups.values())

    @property
    def groups(self) -> tuple[ReadyQueue, ...]:
        """The queues of the signatures that wait."""
        return tuple(self._groups.values())

    def push(self, turn: ReadyTurn) -> None:
        """Add a turn to the queue of its signature."""
        if turn.key in self._turns:
            raise RuntimeError(f"{turn.key} is ready already")
        self._turns[turn.key] = turn
        if turn.is_front:  # ahead of all groups, since others wait for it
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
        """Take the next turn of a signature that has one."""
        turn = self._groups[signature].pop()
        del self._turns[turn.key]
        self._close(signature)
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Remove a turn if it is there."""
        turn = self._turns.pop(key, None)
        if turn is not None and not turn.is_front:
            self._groups[turn.signature].discard(key)
            self._close(turn.signature)
        return turn

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next: front turns first, then by signature, the oldest first."""
        first = [turn for turn in self._front if self._is_waiting(turn)][:count]
        for signature in sorted(self._groups, key=self._age):
            if len(first) >= count:
                break
            first += self._groups[signature].heads(count - len(first))
        return first

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Pass the load to every group."""
        if load is None:
            self._loads.pop(job_id, None)
        else:
            self._loads[job_id] = load
        for group in self._groups.values():
            group.note_load(job_id, load)

    def note_slots(self, slots: int) -> None:
        """Pass the slots to every group."""
        self._slots = slots
        for group in self._groups.values():
            group.note_slots(slots)

    def note_begun(self, key: TurnKey) -> None:
        """Pass the turn to its group."""
        turn = self._turns.get(key)
        if turn is not None and not turn.is_front:
            self._groups[turn.signature].note_begun(key)

    def oldest(self) -> str | None:
        """Return the signature of the turn that has waited longest."""
        return min(self._groups, key=self._age, default=None)

    def oldest_beside(self, signature: str) -> str | None:
        """Return the signature of the turn that has waited longest, apart from turns of ``signature``."""
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
        """Return when the oldest waiting turn of a group became ready."""
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
    """The signature that each worker runs, and its starts while others waited; written by the core alone."""

    def __init__(self) -> None:
        self._shifts: dict[str, tuple[str, int]] = {}

    def __repr__(self) -> str:
        return f"<Shifts {self._shifts}>"

    def take_back(self, worker: str) -> None:
        """Take back the count of a start: the turn was taken but did not start."""
        signature, streak = self._shifts[worker]
        self._shifts[worker] = (signature, max(0, streak - 1))

    def take_turn(self, worker: str, ready: GroupedQueue, *, slots: int, is_empty: bool) -> ReadyTurn | None:
        """Take the turn that a worker starts now; None if the worker runs empty first, or no turn waits."""
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

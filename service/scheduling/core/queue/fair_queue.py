"""The ready turns of one model, in a queue for each key: the key with the least virtual time goes next. Pure.

Within a key the order is as without keys: turns that were on a slot before, then priorities, then the policy.
"""

from collections.abc import Mapping

from typing_extensions import override

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.queue.fair_shares import Owner, VirtualTimes
from service.scheduling.core.queue.ready_queue import JobLoad, PolicyFactory, ReadyQueue, ReadyTurn


class FairQueue(ReadyQueue):
    """A ``ReadyQueue`` over one queue of the policy per key; queues stay, as there are few keys."""

    def __init__(self, policy: PolicyFactory, times: VirtualTimes) -> None:
        super().__init__()
        self._policy = policy
        self._times = times
        self._queues: dict[Owner, ReadyQueue] = {}
        self._owners: dict[JobId, Owner] = {}
        self._slots: int | None = None

    def __repr__(self) -> str:
        return f"<FairQueue {len(self)} of {len(self._queues)} keys>"

    @property
    def entries(self) -> int:
        """The number of entries in the orders of all keys."""
        return super().entries + sum(queue.entries for queue in self._queues.values())

    @property
    def waiting(self) -> Mapping[Owner, tuple[TurnKey, ...]]:
        """The keys that wait, and the turns of each."""
        return {owner: tuple(queue) for owner, queue in self._queues.items() if queue}

    @property
    @override
    def has_front(self) -> bool:
        return bool(self._turns) and self._queues[self._next()].has_front

    def push(self, turn: ReadyTurn) -> None:
        """Add a turn to the queue of its key."""
        if turn.key in self._turns:
            raise RuntimeError(f"{turn.key} is ready already")
        self._enter(turn).push(turn)

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back that was taken and cannot start."""
        self._enter(turn).push_back(turn)

    @override
    def pop(self) -> ReadyTurn:
        if not self._turns:
            raise IndexError("no turn is ready")
        owner = self._next()
        turn = self._queues[owner].pop()
        del self._turns[turn.key]
        self._leave(owner)
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Remove a turn if it is there."""
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._queues[turn.owner].discard(key)
            self._leave(turn.owner)
        return turn

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next if nothing changed and each cost what is expected."""
        lines = {owner: queue.heads(count) for owner, queue in self._queues.items() if queue}
        times = {owner: self._times.time(owner) for owner in lines}
        found: list[ReadyTurn] = []
        places = dict.fromkeys(lines, 0)
        while times and len(found) < count:
            owner = min(times, key=lambda each: (times[each], each or ""))
            found.append(lines[owner][places[owner]])
            places[owner] += 1
            times[owner] += self._times.cost(owner, self._times.expected(owner))
            if places[owner] == len(lines[owner]):
                del times[owner]
        return found

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Pass the load to the queue of the job's key."""
        if load is not None:
            self._owners[job_id] = load.owner
            self._queue(load.owner).note_load(job_id, load)
        elif job_id in self._owners:
            self._queue(self._owners.pop(job_id)).note_load(job_id, None)

    def note_slots(self, slots: int) -> None:
        """Pass the slots to the queues of all keys."""
        self._slots = slots
        for queue in self._queues.values():
            queue.note_slots(slots)

    def note_begun(self, key: TurnKey) -> None:
        """Pass the turn to the queue of its key."""
        turn = self._turns.get(key)
        if turn is not None:
            self._queues[turn.owner].note_begun(key)

    def _next(self) -> Owner:
        """Return the waiting key with the least virtual time, the first by name among equals."""
        waiting = (owner for owner, queue in self._queues.items() if queue)
        return min(waiting, key=lambda owner: (self._times.time(owner), owner or ""))

    def _queue(self, owner: Owner) -> ReadyQueue:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = self._policy()
            if self._slots is not None:
                queue.note_slots(self._slots)
        return queue

    def _enter(self, turn: ReadyTurn) -> ReadyQueue:
        """Return the queue for a turn; its key waits from now on."""
        queue = self._queue(turn.owner)
        if not queue:
            self._times.arrive(turn.owner)
        self._turns[turn.key] = turn
        return queue

    def _leave(self, owner: Owner) -> None:
        """Take a key out of the virtual times once none of its turns waits in this queue."""
        if not self._queues[owner]:
            self._times.leave_queue(owner)

    def _insert(self, turn: ReadyTurn) -> None:
        self._enter(turn).push(turn)

    def _take(self) -> ReadyTurn:
        return self.pop()

    def _clear(self) -> None:
        self._queues.clear()

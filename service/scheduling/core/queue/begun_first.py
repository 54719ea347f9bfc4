"""Begun conversations go ahead of new ones while a KV cache has no room for more. Pure.

Otherwise each turn would find its prompt evicted by others and read it again. No slot is idle for that: if no turn of a
begun conversation is ready, a new one begins.

Source: specification, "Capacity in tokens".
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from typing_extensions import override

from service.conversations.job.job import JobId, TurnKey
from service.scheduling.core.queue.ready_queue import JobLoad, PolicyFactory, ReadyQueue, ReadyTurn

MOVED_AT_ONCE: Final = 1000  # turns of new conversations that one search moves; some 10 ms, and only once per turn


class BegunFirst(ReadyQueue):
    """Two queues of one policy: one for all turns and, under pressure, one for turns of new conversations.

    A turn of a job with a higher priority is not put behind others. Without pressure the queues take turns.
    """

    def __init__(
        self, policy: PolicyFactory, is_begun: Callable[[TurnKey], bool], is_pressed: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._all = policy()
        self._new = policy()
        self._is_begun = is_begun
        self._is_pressed = is_pressed
        self._priorities: Counter[int] = Counter()  # counts the turns in the queue of new conversations
        self._is_turn_of_new = False

    @override
    def __len__(self) -> int:
        return len(self._all) + len(self._new)

    def __repr__(self) -> str:
        return f"<BegunFirst {self._all!r} new={len(self._new)}>"

    @override
    def __iter__(self) -> Iterator[TurnKey]:
        yield from self._all
        yield from self._new

    @property
    def entries(self) -> int:
        """The number of entries in the orders of both queues."""
        return self._all.entries + self._new.entries

    @property
    @override
    def has_front(self) -> bool:
        return self._all.has_front

    @override
    def push(self, turn: ReadyTurn) -> None:
        self._all.push(turn)

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back that was taken and cannot start."""
        self._all.push_back(turn)

    @override
    def pop(self) -> ReadyTurn:
        if not self._new and not self._is_pressed():
            return self._all.pop()
        if not self._is_pressed():
            self._is_turn_of_new = not self._is_turn_of_new
            takes_new = self._new and (self._is_turn_of_new or not self._all) and not self._all.has_first
            return self._take_new() if takes_new else self._all.pop()
        turn = self._pop_begun()
        if turn is None:
            return self._take_new()
        if not self._is_first(turn) and turn.job_priority < max(self._priorities, default=turn.job_priority):
            self._all.push_back(turn)
            return self._take_new()
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Remove a turn if it is there."""
        found = self._new.discard(key)
        if found is None:
            return self._all.discard(key)
        self._count_out(found)
        return found

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next, with those of new conversations last."""
        first = self._all.heads(count)
        if self._is_pressed():
            first.sort(key=lambda turn: not (self._is_first(turn) or self._is_begun(turn.key)))
        return [*first, *self._new.heads(count - len(first))]

    def note_begun(self, key: TurnKey) -> None:
        """Move a turn whose conversation has begun to the queue of all turns."""
        turn = self._new.discard(key)
        if turn is not None:
            self._count_out(turn)
            self._all.push(turn)

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Pass the load to both queues."""
        self._all.note_load(job_id, load)
        self._new.note_load(job_id, load)

    def note_slots(self, slots: int) -> None:
        """Pass the slots to both queues."""
        self._all.note_slots(slots)
        self._new.note_slots(slots)

    def _pop_begun(self) -> ReadyTurn | None:
        for _ in range(MOVED_AT_ONCE):
            if not self._all:
                return None
            turn = self._all.pop()
            if self._is_first(turn) or self._is_begun(turn.key):
                return turn
            self._new.push(turn)
            self._priorities[turn.job_priority] += 1
        return None

    def _take_new(self) -> ReadyTurn:
        turn = self._new.pop()
        self._count_out(turn)
        return turn

    def _count_out(self, turn: ReadyTurn) -> None:
        self._priorities[turn.job_priority] -= 1
        if not self._priorities[turn.job_priority]:
            del self._priorities[turn.job_priority]

    @staticmethod
    def _is_first(turn: ReadyTurn) -> bool:
        return turn.is_front or turn.was_deferred

    def _insert(self, turn: ReadyTurn) -> None:
        self._all.push(turn)

    def _take(self) -> ReadyTurn:
        return self._all.pop()

    def _clear(self) -> None:
        """Do nothing: each queue clears itself with its last turn."""

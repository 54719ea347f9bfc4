"""Conversations that have begun go on before new ones begin, while a KV cache has no room for more of them. Pure.

Else every turn would find that its prompt has made room for others', and read it again. Nothing is left idle for it:
where no turn of a conversation that has begun is ready, a new one begins.

Source: specification, "Capacity in tokens".
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from typing_extensions import override

from service.conversations.job import JobId, TurnKey
from service.scheduling.core.queue.ready_queue import JobLoad, PolicyFactory, ReadyQueue, ReadyTurn

PARKED_AT_ONCE: Final = 1000  # turns of new conversations that are put aside in one search: some 10 ms, and once


class BegunFirst(ReadyQueue):
    """Two queues of one policy: the line, and aside of it, under pressure, turns of conversations that are to begin.

    A turn of a job with a higher priority is not put behind others. Without pressure those aside and those in the line
    go in turn.
    """

    def __init__(
        self, policy: PolicyFactory, is_begun: Callable[[TurnKey], bool], is_pressed: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._line = policy()
        self._aside = policy()
        self._is_begun = is_begun
        self._is_pressed = is_pressed
        self._priorities: Counter[int] = Counter()  # of those aside
        self._is_asides_turn = False

    @override
    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __repr__(self) -> str:
        return f"<BegunFirst {self._line!r} aside={len(self._aside)}>"

    @override
    def __iter__(self) -> Iterator[TurnKey]:
        yield from self._line
        yield from self._aside

    @property
    def entries(self) -> int:
        """The number of places that the orders of both queues keep."""
        return self._line.entries + self._aside.entries

    @property
    @override
    def has_front(self) -> bool:
        return self._line.has_front

    @override
    def push(self, turn: ReadyTurn) -> None:
        self._line.push(turn)

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back that was taken and cannot start."""
        self._line.push_back(turn)

    @override
    def pop(self) -> ReadyTurn:
        if not self._aside and not self._is_pressed():
            return self._line.pop()
        if not self._is_pressed():
            self._is_asides_turn = not self._is_asides_turn
            from_aside = self._aside and (self._is_asides_turn or not self._line) and not self._line.has_first
            return self._take_aside() if from_aside else self._line.pop()
        turn = self._pop_begun()
        if turn is None:
            return self._take_aside()
        if not self._is_first(turn) and turn.job_priority < max(self._priorities, default=turn.job_priority):
            self._line.push_back(turn)
            return self._take_aside()
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Take a turn out, if it is there."""
        found = self._aside.discard(key)
        if found is None:
            return self._line.discard(key)
        self._count_out(found)
        return found

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next, those that are put aside after the others."""
        first = self._line.heads(count)
        if self._is_pressed():
            first.sort(key=lambda turn: not (self._is_first(turn) or self._is_begun(turn.key)))
        return [*first, *self._aside.heads(count - len(first))]

    def note_begun(self, key: TurnKey) -> None:
        """Move a turn whose conversation has begun into the line."""
        turn = self._aside.discard(key)
        if turn is not None:
            self._count_out(turn)
            self._line.push(turn)

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Tell both queues."""
        self._line.note_load(job_id, load)
        self._aside.note_load(job_id, load)

    def note_slots(self, slots: int) -> None:
        """Tell both queues."""
        self._line.note_slots(slots)
        self._aside.note_slots(slots)

    def _pop_begun(self) -> ReadyTurn | None:
        for _ in range(PARKED_AT_ONCE):
            if not self._line:
                return None
            turn = self._line.pop()
            if self._is_first(turn) or self._is_begun(turn.key):
                return turn
            self._aside.push(turn)
            self._priorities[turn.job_priority] += 1
        return None

    def _take_aside(self) -> ReadyTurn:
        turn = self._aside.pop()
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
        self._line.push(turn)

    def _take(self) -> ReadyTurn:
        return self._line.pop()

    def _clear(self) -> None:
        """Do nothing: each queue clears itself with its last turn."""

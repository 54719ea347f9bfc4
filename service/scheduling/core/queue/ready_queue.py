"""The ready queue: the turns of one model that wait only for a slot, and their order.

A policy is a subclass of ``ReadyQueue`` that defines the order; see ``service.scheduling.core.policies``. Pure.
"""

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from service.conversations.job.job import JobId, TurnKey

Rank = tuple[float, ...]
SLACK: Final = 4  # heap entries per turn beyond which outdated ones are dropped
LEAST: Final = 64


class ReadyTurn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A ready turn with the values that a policy may use; smaller order numbers are older.

    ``path`` is the longest chain of turns that begins with it, in turns of average length. A turn with ``is_front`` was
    on a slot before, and others wait for it: it goes ahead of all turns without (specification, "Re-prompts"). A turn
    with ``was_deferred`` had its place in the order and waited for one worker in vain: it comes next.
    """

    key: TurnKey
    job_priority: int
    rounds_completed: int
    conversation_order: int
    agent_order: int
    ready_order: int
    path: float
    is_front: bool = False
    was_deferred: bool = False
    signature: str = ""  # the adapter and parameters of its request, for grouping
    owner: str | None = None  # the name of its job's key

    def after_deferral(self) -> "ReadyTurn":
        """Return the same turn as one that was deferred."""
        return msgspec.structs.replace(self, was_deferred=True)


class JobLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The remaining work of one job, in turns of average length: in total, for one model, and its longest chain."""

    priority: int
    work: float
    model_work: float
    path: float
    owner: str | None = None


class ReadyQueue(ABC):
    """The ready turns of one model; a turn is in it at most once."""

    def __init__(self) -> None:
        self._turns: dict[TurnKey, ReadyTurn] = {}
        self._front: deque[ReadyTurn] = deque()
        self._once_deferred: deque[ReadyTurn] = deque()  # turns whose deferral is over

    def __len__(self) -> int:
        """Count the turns."""
        return len(self._turns)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._turns)}>"

    def __iter__(self) -> Iterator[TurnKey]:
        """Iterate over the turns in no order."""
        return iter(self._turns)

    @property
    def entries(self) -> int:
        """The number of entries in its order; those of turns that have gone stay until they are dropped."""
        return len(self._front) + len(self._once_deferred)

    @property
    def has_front(self) -> bool:
        """Whether the turn that goes next was on a slot before."""
        while self._front and not self._is_waiting(self._front[0]):
            self._front.popleft()
        return bool(self._front)

    @property
    def has_first(self) -> bool:
        """Whether the next turn was on a slot before, or was deferred."""
        while self._once_deferred and not self._is_waiting(self._once_deferred[0]):
            self._once_deferred.popleft()
        return self.has_front or bool(self._once_deferred)

    def push(self, turn: ReadyTurn) -> None:
        """Add a turn."""
        if turn.key in self._turns:
            raise RuntimeError(f"{turn.key} is ready already")
        self._turns[turn.key] = turn
        if turn.is_front:
            self._front.append(turn)
        elif turn.was_deferred:
            self._once_deferred.append(turn)
        else:
            self._insert(turn)

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back that was taken and cannot start: ahead of turns of its kind."""
        self._turns[turn.key] = turn
        if turn.is_front:
            self._front.appendleft(turn)
        elif turn.was_deferred:
            self._once_deferred.appendleft(turn)
        else:
            self._insert(turn)

    def pop(self) -> ReadyTurn:
        """Take the next turn; IndexError if no turn waits."""
        if not self._turns:
            raise IndexError("no turn is ready")
        turn = next(self._take_first(), None) or self._take()
        self.discard(turn.key)
        return turn

    def discard(self, key: TurnKey) -> ReadyTurn | None:
        """Remove a turn if it is there; its entry in the order is dropped later."""
        turn = self._turns.pop(key, None)
        if not self._turns:
            self._front.clear()
            self._once_deferred.clear()
            self._clear()
        return turn

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next if nothing changed."""
        taken = [self.pop() for _ in range(min(count, len(self)))]
        self._front.extendleft(turn for turn in reversed(taken) if turn.is_front)
        self._once_deferred.extendleft(turn for turn in reversed(taken) if turn.was_deferred)
        for turn in taken:
            self._turns[turn.key] = turn
            if not (turn.is_front or turn.was_deferred):
                self._insert(turn)
        return taken

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:  # noqa: B027 - most orders ignore the load
        """Set the remaining load of a job with turns of this model; None if it has ended."""

    def note_slots(self, slots: int) -> None:  # noqa: B027
        """Set the model's number of slots."""

    def note_begun(self, key: TurnKey) -> None:  # noqa: B027
        """Record that the conversation of a turn has begun; the turn may wait elsewhere."""

    def _is_waiting(self, turn: ReadyTurn) -> bool:
        """Whether an entry of the order is valid: its turn still waits."""
        return self._turns.get(turn.key) is turn

    def _take_first(self) -> Iterator[ReadyTurn]:
        for line in (self._front, self._once_deferred):
            while line:
                turn = line.popleft()
                if self._is_waiting(turn):
                    yield turn

    @abstractmethod
    def _insert(self, turn: ReadyTurn) -> None:
        """Put a turn into the order."""

    @abstractmethod
    def _take(self) -> ReadyTurn:
        """Take the first turn of the order that ``_is_waiting``; called only if there is one."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all entries of the order; none is valid any more."""


PolicyFactory = Callable[[], ReadyQueue]  # called once for each model


class RankedQueue(ReadyQueue):
    """An order with one heap, for ranks that are final when a turn becomes ready."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Rank, int, ReadyTurn]] = []

    @property
    def entries(self) -> int:
        """The number of entries in its order."""
        return super().entries + len(self._heap)

    @abstractmethod
    def rank(self, turn: ReadyTurn) -> Rank:
        """Return the rank of a turn; the smallest goes first."""

    def _insert(self, turn: ReadyTurn) -> None:
        heapq.heappush(self._heap, (self.rank(turn), turn.ready_order, turn))
        if len(self._heap) > SLACK * len(self) + LEAST:
            self._heap = [entry for entry in self._heap if self._is_waiting(entry[2])]
            heapq.heapify(self._heap)

    def _take(self) -> ReadyTurn:
        while True:
            turn = heapq.heappop(self._heap)[2]
            if self._is_waiting(turn):
                return turn

    def _clear(self) -> None:
        self._heap.clear()

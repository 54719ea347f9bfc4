"""Longest path first within a job; among jobs the shortest first, unless one of them is urgent.

A job is urgent if its longest chain of turns takes nearly as long as all work that is left: the chain then decides when
everything ends. While no job is urgent, the one with the least work goes first, which ends jobs soonest on average.
Every sixteenth turn is the one that has waited longest. With n older turns waiting, a turn of the highest priority
starts at the latest as the 16 (n + 1)th from now; so does a turn of any other priority.
"""

import heapq
from typing import Final

from typing_extensions import override

from service.conversations.job.job import JobId
from service.scheduling.core.queue.ready_queue import LEAST, SLACK, JobLoad, Rank, ReadyQueue, ReadyTurn

# Least share of the time for all remaining work at which a chain is urgent (bench/studies/orders.py).
URGENT_SHARE: Final = 0.5
CHAIN_BOUND: Final = 1.25  # work per slot, in longest chains: below it the chains decide, and all are urgent
AGEING_TURNS: Final = 16


class _Lane:
    """The waiting turns of one job, the longest path first."""

    def __init__(self) -> None:
        self.heap: list[tuple[Rank, int, ReadyTurn]] = []
        self.version = 0  # the version of its valid entries in the heaps over all lanes


class CriticalPath(ReadyQueue):
    """A heap of turns for each job, and over them two heaps of jobs: by path and by work."""

    def __init__(self) -> None:
        super().__init__()
        self._slots = 0
        self._loads: dict[JobId, JobLoad] = {}
        self._model_work = 0.0
        self._lanes: dict[JobId, _Lane] = {}
        self._by_path: list[tuple[Rank, JobId, int]] = []
        self._by_work: list[tuple[Rank, JobId, int]] = []
        self._longest: list[tuple[float, JobId]] = []  # the path of every job, with or without ready turns
        self._oldest: list[tuple[int, ReadyTurn]] = []
        self._taken = 0
        self._versions = 0  # for all lanes, so that an entry of a lane that is gone is never valid for its successor

    @property
    def entries(self) -> int:
        """The number of entries for turns and jobs in its order."""
        of_turns = len(self._oldest) + sum(len(lane.heap) for lane in self._lanes.values())
        return super().entries + of_turns + len(self._by_path) + len(self._by_work)

    @override
    def note_slots(self, slots: int) -> None:
        self._slots = slots

    def note_load(self, job_id: JobId, load: JobLoad | None) -> None:
        """Set the remaining load of a job."""
        before = self._loads.pop(job_id, None)
        self._model_work += (load.model_work if load else 0.0) - (before.model_work if before else 0.0)
        if load is not None:
            self._loads[job_id] = load
            heapq.heappush(self._longest, (-load.path, job_id))
            if len(self._longest) > SLACK * len(self._loads) + LEAST:
                self._longest = [(-each.path, name) for name, each in self._loads.items()]
                heapq.heapify(self._longest)
            if job_id in self._lanes:
                self._rank_lane(job_id)

    def heads(self, count: int) -> list[ReadyTurn]:
        """Return the turns that would go next; looking does not count for ageing."""
        taken = self._taken
        try:
            return super().heads(count)
        finally:
            self._taken = taken

    def push_back(self, turn: ReadyTurn) -> None:
        """Put a turn back; only starts count for ageing."""
        self._taken -= not (turn.is_front or turn.was_deferred)
        super().push_back(turn)

    def _insert(self, turn: ReadyTurn) -> None:
        lane = self._lanes.setdefault(turn.key.job_id, _Lane())
        entry = ((-turn.path,), turn.ready_order, turn)
        heapq.heappush(lane.heap, entry)
        heapq.heappush(self._oldest, (turn.ready_order, turn))
        if len(self._oldest) > SLACK * len(self) + LEAST:
            self._oldest = sorted((each.ready_order, each) for each in self._turns.values() if not each.is_front)
        if lane.heap[0] is entry:
            self._rank_lane(turn.key.job_id)

    def _take(self) -> ReadyTurn:
        self._taken += 1
        if self._taken % AGEING_TURNS == 0:
            return self._take_oldest()
        job_id = self._next_job()
        lane = self._lanes[job_id]
        turn = heapq.heappop(lane.heap)[2]
        self._rank_lane(job_id)
        return turn

    def _take_oldest(self) -> ReadyTurn:
        while True:
            turn = heapq.heappop(self._oldest)[1]
            if self._is_waiting(turn):
                return turn

    def _next_job(self) -> JobId:
        urgent, longest = self._top(self._by_path)
        _, shortest = self._top(self._by_work)
        path, work = self._time_left()
        is_urgent = -urgent[1] >= URGENT_SHARE * max(path, work) or work < CHAIN_BOUND * path
        return longest if is_urgent else shortest

    def _time_left(self) -> tuple[float, float]:
        """Return the time of the longest chain, and of all work of the model spread over its slots."""
        while self._longest:
            path, job_id = self._longest[0]
            load = self._loads.get(job_id)
            if load is not None and load.path == -path:
                break
            heapq.heappop(self._longest)
        path = -self._longest[0][0] if self._longest else 0.0
        return path, self._model_work / max(1, self._slots)

    def _top(self, heap: list[tuple[Rank, JobId, int]]) -> tuple[Rank, JobId]:
        """Return the first lane of a heap that has a turn; drop outdated entries."""
        while True:
            rank, job_id, version = heap[0]
            lane = self._lanes.get(job_id)
            if lane is not None and lane.version == version:
                if self._is_waiting(lane.heap[0][2]):
                    return rank, job_id
                self._rank_lane(job_id)  # its first turn was discarded, or taken by age
            else:
                heapq.heappop(heap)

    def _rank_lane(self, job_id: JobId) -> None:
        """Move a lane to its present place in both heaps; drop a lane without turns."""
        lane = self._lanes[job_id]
        while lane.heap and not self._is_waiting(lane.heap[0][2]):
            heapq.heappop(lane.heap)
        if not lane.heap:
            del self._lanes[job_id]
            return
        self._versions += 1
        lane.version = self._versions
        self._push_lane(job_id, lane)
        if max(len(self._by_path), len(self._by_work)) > SLACK * len(self._lanes) + LEAST:
            self._by_path, self._by_work = [], []
            for name, each in self._lanes.items():
                self._push_lane(name, each)

    def _push_lane(self, job_id: JobId, lane: _Lane) -> None:
        first = lane.heap[0][2]
        load = self._loads.get(job_id)
        work = load.work if load else first.path
        heapq.heappush(self._by_path, ((-first.job_priority, -first.path, first.ready_order), job_id, lane.version))
        heapq.heappush(self._by_work, ((-first.job_priority, work, first.ready_order), job_id, lane.version))

    def _clear(self) -> None:
        self._lanes.clear()
        for heap in (self._by_path, self._by_work, self._oldest):
            heap.clear()

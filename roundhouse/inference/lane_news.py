"""News of lanes and agents, told from the states of workers, and their readers."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Final

from workers.states import WorkerState
from workers.supervised import SupervisedWorker

REMEMBERED: Final = 10_000  # events that a slow reader may be behind
News = dict[str, Any]  # ``event``, ``time`` in seconds since the epoch, and what the event is about


class LaneNews:
    """Knows the lanes that are in the dead pool: their engines failed, and are tried again with growing pauses.

    ``agents_on`` lists the agents that work on a lane with a model.
    """

    def __init__(self, agents_on: Callable[[str, str], Sequence[str]]) -> None:
        self._agents_on = agents_on
        self._dead: dict[tuple[str, str], float] = {}  # a lane and its model, and since when
        self._disconnected: dict[str, tuple[str, str]] = {}  # agents, and the lane and model that each waits for

    def __repr__(self) -> str:
        return f"<LaneNews dead={sorted(self._dead)}>"

    def news_of(self, worker: SupervisedWorker) -> Iterator[News]:
        """Yield the news in a worker's change of state."""
        place = (worker.spec.id, worker.spec.name)
        is_broken = worker.now.state in {WorkerState.BACKOFF, WorkerState.FAILED}
        if is_broken and place not in self._dead:
            self._dead[place] = time.time()
            yield self._news("lane_dead", worker)
            for agent in self._agents_on(*place):
                self._disconnected[agent] = place
                yield self._news("agent_disconnected", worker) | {"agent": agent}
        elif worker.now.state is WorkerState.READY:
            if place in self._dead:
                yield self._news("lane_back", worker) | {"after_s": time.time() - self._dead.pop(place)}
            for agent in [agent for agent, left in self._disconnected.items() if left == place]:
                del self._disconnected[agent]
                yield self._news("agent_back", worker) | {"agent": agent}
        elif worker.now.state is WorkerState.STOPPED:
            self._dead.pop(place, None)  # another model has its lane

    def moved(self, agent: str, left: str, worker: SupervisedWorker) -> News:
        """Return the event of a run that goes on elsewhere."""
        self._disconnected.pop(agent, None)
        return self._news("agent_moved", worker) | {"agent": agent, "left": left}

    def _news(self, event: str, worker: SupervisedWorker) -> News:
        lane = worker.spec.lane
        return {
            "event": event,
            "time": time.time(),
            "lane": worker.spec.id,
            "gpu": lane.device.uuid if lane is not None else None,
            "model": worker.spec.name,
            "because": worker.supervisor.because,
        }


class NewsReaders:
    """Those who follow events, each from its own beginning; one that lags loses the oldest."""

    def __init__(self) -> None:
        self._readers: set[_Reader] = set()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<NewsReaders {len(self._readers)}>"

    def tell(self, news: News) -> None:
        """Give an event to all."""
        for reader in self._readers:
            reader.behind.append(news)
            reader.more.set()

    def close(self) -> None:
        """End all, after what they have not read yet."""
        self._is_closed = True
        for reader in self._readers:
            reader.more.set()

    async def follow(self) -> AsyncIterator[News]:
        """Yield events from now on, until ``close``."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while not (self._is_closed and not reader.behind):
                while reader.behind:
                    yield reader.behind.popleft()
                if not self._is_closed:
                    reader.more.clear()
                    await reader.more.wait()
        finally:
            self._readers.discard(reader)


class _Reader:
    """One who follows."""

    def __init__(self) -> None:
        self.behind: deque[News] = deque(maxlen=REMEMBERED)
        self.more = asyncio.Event()

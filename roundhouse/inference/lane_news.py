"""News of lanes and agents, made from the states of workers, and their readers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from roundhouse.inference.lane_agents import LaneAgent
from workers.lanes.swap_log import Swap
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

REMEMBERED: Final = 10_000  # events that a slow reader may be behind
News = dict[str, Any]  # ``event``, ``time`` in seconds since the epoch, and what the event is about


class LaneNews:
    """Tells readers what happens to lanes and agents; each reader follows from its own beginning.

    A lane is in the dead pool from its engine's failure until it is ready again: it is tried with growing pauses. A
    reader that lags loses the oldest events.
    """

    def __init__(self, agents: Mapping[str, LaneAgent]) -> None:
        self._agents = agents
        self._dead: dict[tuple[str, str], float] = {}  # a lane and its model, and since when
        self._disconnected: dict[str, tuple[str, str]] = {}  # agents, and the lane and model that each waits for
        self._readers: set[asyncio.Queue[News | None]] = set()

    def __repr__(self) -> str:
        return f"<LaneNews dead={sorted(self._dead)} readers={len(self._readers)}>"

    def report(self, worker: SupervisedWorker) -> None:
        """Tell what a worker's change of state means to its lane and its agents."""
        for news in self._news_of(worker):
            self._tell(news)

    def report_move(self, agent: str, left: str, worker: SupervisedWorker) -> None:
        """Tell that a run continues on another lane."""
        self._disconnected.pop(agent, None)
        self._tell(_news("agent_moved", worker, agent=agent, left=left))

    def report_swap(self, swap: Swap) -> None:
        """Tell that a checkpoint was loaded."""
        fields = ("lane", "model", "left", "because", "seconds")
        self._tell({"event": "swap", "time": time.time(), **{name: getattr(swap, name) for name in fields}})

    async def follow(self) -> AsyncIterator[News]:
        """Yield events from now on, until ``close``."""
        queue: asyncio.Queue[News | None] = asyncio.Queue(REMEMBERED)
        self._readers.add(queue)
        try:
            while (news := await queue.get()) is not None:
                yield news
        finally:
            self._readers.discard(queue)

    def close(self) -> None:
        """End all readers, after what they have not read yet."""
        self._tell(None)

    def _tell(self, news: News | None) -> None:
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(news)

    def _news_of(self, worker: SupervisedWorker) -> Iterator[News]:
        place = (worker.spec.id, worker.spec.name)
        is_broken = worker.now.state in {WorkerState.BACKOFF, WorkerState.FAILED}
        if is_broken and place not in self._dead:
            self._dead[place] = time.time()
            yield _news("lane_dead", worker)
            for agent in self._agents.values():
                if (agent.last_lane or agent.served.lane, agent.served.model) == place:
                    self._disconnected[agent.id] = place
                    yield _news("agent_disconnected", worker, agent=agent.id)
        elif worker.now.state is WorkerState.READY:
            if place in self._dead:
                yield _news("lane_back", worker, after_s=time.time() - self._dead.pop(place))
            for name in [name for name, left in self._disconnected.items() if left == place]:
                del self._disconnected[name]
                yield _news("agent_back", worker, agent=name)
        elif worker.now.state is WorkerState.STOPPED:
            self._dead.pop(place, None)  # another model has its lane


def _news(event: str, worker: SupervisedWorker, **about: object) -> News:
    lane = worker.spec.lane
    return {
        "event": event,
        "time": time.time(),
        "lane": worker.spec.id,
        "gpu": lane.device.uuid if lane is not None else None,
        "model": worker.spec.name,
        "because": worker.supervisor.because,
        **about,
    }

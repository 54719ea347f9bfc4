"""The past hour of a node: a ring of points for charts, recorded whether a page is open or not."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from service.conversations.job.states import TurnState
from service.scheduling.scheduler import Scheduler
from workers.fleet import Fleet
from workers.spec import WorkerId
from workers.states import WorkerState

STEP_S: Final = 10.0
LOOKS: Final = 5  # samples per step
POINTS: Final = 360


class Point(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One step, which ends ``at``, in seconds since the epoch: tokens per second, and maxima of the rest."""

    at: float
    tokens_per_s: float
    in_flight: int
    ready: int
    slots: int


class PastHour:
    """The points of the past hour, the oldest first; ``run`` must be running."""

    def __init__(self, fleet: Fleet, scheduler: Scheduler) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._tokens: dict[WorkerId, int] = {}

    def __repr__(self) -> str:
        return f"<PastHour of {len(self._points)} points>"

    def after(self, at: float) -> Sequence[Point]:
        """Return the points after a time, in seconds since the epoch."""
        return [point for point in self._points if point.at > at]

    async def run(self) -> None:
        """Add a point each step, until cancelled."""
        looked_at = time.monotonic()
        while True:
            most_flying = most_ready = 0
            for _ in range(LOOKS):
                await anyio.sleep(STEP_S / LOOKS)
                pools = self._scheduler.view.of_all()
                most_flying = max(most_flying, pools[TurnState.IN_FLIGHT])
                most_ready = max(most_ready, pools[TurnState.READY])
            now = time.monotonic()
            self._add(now - looked_at, most_flying, most_ready)
            looked_at = now

    def _add(self, step_s: float, in_flight: int, ready: int) -> None:
        tokens = {worker.spec.id: worker.in_flight.tokens for worker in self._fleet}
        # A replaced worker counts from 0 again.
        written = sum(max(0, count - self._tokens.get(name, 0)) for name, count in tokens.items())
        self._tokens = tokens
        self._points.append(
            Point(
                at=round(time.time(), 1),
                tokens_per_s=round(written / step_s, 1),
                in_flight=in_flight,
                ready=ready,
                slots=sum(worker.slots.total for worker in self._fleet if worker.now.state is WorkerState.READY),
            )
        )

"""The newest loads of models on lanes."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec

from workers.lanes.lane_workers import LaneWorkers
from workers.log_context import line_about

REMEMBERED: Final = 100
logger = logging.getLogger(__name__)


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """A load of a model on a lane: the model that left for it, the reason, and the duration."""

    lane: str
    model: str
    left: str | None
    because: str
    seconds: float
    number: int  # from 1
    at: datetime  # time of the load


class SwapLog:
    """The newest swaps of all lanes; each is also passed to ``on_swap``."""

    def __init__(self, on_swap: Callable[[Swap], None]) -> None:
        self._on_swap = on_swap
        self._newest: deque[Swap] = deque(maxlen=REMEMBERED)

    def __repr__(self) -> str:
        return f"<SwapLog of {len(self._newest)}>"

    def __iter__(self) -> Iterator[Swap]:
        """Iterate over the swaps, the oldest first."""
        return iter(self._newest)

    def add(self, lane: LaneWorkers) -> None:
        """Add the load that has ended on a lane."""
        because, left = lane.reason or ("", None)
        model, seconds = lane.current.spec.name, lane.end_load()
        number = self._newest[-1].number + 1 if self._newest else 1
        id_, at = lane.lane.id, datetime.now(UTC)
        swap = Swap(lane=id_, model=model, left=left, because=because, seconds=seconds, number=number, at=at)
        self._newest.append(swap)
        line = line_about({"worker": id_})
        logger.info("%s: %s is loaded in %.1f s: %s", id_, model, seconds, because, extra=line)
        self._on_swap(swap)

"""When a worker's engines were started, ready, stopped and given up: its newest changes of state."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from workers.states import WorkerState

KEPT: Final = 1000  # of one worker, the newest: an engine that dies once a minute is seen over four hours


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMove:
    """A worker is in another state since ``at_utc``; ``model`` is the one that it serves."""

    at_utc: datetime
    model: str
    incarnation: int
    state: WorkerState
    because: str


class Moves:
    """The newest moves of one worker, in memory; its supervisors alone write them."""

    def __init__(self) -> None:
        self._kept: deque[WorkerMove] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<Moves {len(self._kept)}>"

    def __iter__(self) -> Iterator[WorkerMove]:
        """Iterate from the oldest to the newest."""
        return iter(tuple(self._kept))

    def note(self, model: str, incarnation: int, state: WorkerState, because: str) -> None:
        """Note that the worker is in another state now."""
        self._kept.append(
            WorkerMove(at_utc=datetime.now(UTC), model=model, incarnation=incarnation, state=state, because=because)
        )

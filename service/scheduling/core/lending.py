"""The slots lent to other turns while tools run, and their return. Pure.

A turn keeps its slot, and so its cache, for as long as reading its prompt again would take. If its tools have taken
longer than that so far, it lends the slot at once. At worst that costs twice the best choice (ski rental: Karlin et
al., "Competitive snoopy caching", 1988). A turn that lent its slot goes ahead of all turns that wait for its worker,
and the worker starts nothing else until it has room for that turn.

Source: specification, "While tools run".
"""

from collections.abc import Iterator, Sequence
from typing import Final

from service.conversations.job.job import TurnKey
from service.scheduling.core.events import (
    AnswerWhole,
    LendSlot,
    LendSlotLater,
    LoseSlot,
    SlotEvent,
    TakeBackSlot,
    ToolsBegan,
    ToolsEnded,
)
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.queue.affinity import SpeedEstimates
from service.scheduling.core.slots import WorkerSlots
from workers.policy.pace import Mean

UNKNOWN_READ_S: Final = 0.001  # time per prompt token until an engine of the model has shown it
MOST_TOOLS: Final = 1000  # tools with remembered times: callers choose the names


class SlotLending:
    """Follows the tools of turns in flight; it writes their loans in the in-flight pool."""

    def __init__(self, in_flight: InFlightPool, speeds: SpeedEstimates) -> None:
        self._in_flight = in_flight
        self._speeds = speeds
        self._running: dict[TurnKey, int] = {}  # turns whose tools run, each with the number of its timer
        self._wanted: dict[TurnKey, None] = {}  # turns whose tools have ended, the longest wait first
        self._took: dict[str, Mean] = {}  # seconds by tool
        self._owing: list[WorkerSlots] = []  # workers that start nothing until they have returned a slot
        self._numbers = 0

    def __repr__(self) -> str:
        return f"<SlotLending running={len(self._running)} wanted={len(self._wanted)}>"

    def apply_event(self, event: SlotEvent) -> Iterator[LendSlotLater | LendSlot]:
        """Apply an event of a turn's tools."""
        number = self._running.get(event.key)
        if event.key not in self._in_flight:
            self._running.pop(event.key, None)
        elif isinstance(event, ToolsBegan):
            yield from self._begin(event)
        elif isinstance(event, AnswerWhole):
            self._in_flight.lend(event.key)
        elif number is None:
            return
        elif isinstance(event, ToolsEnded):
            del self._running[event.key]
            self._learn(event.tools, event.seconds)
            if self._in_flight.has_lent(event.key):
                self._wanted[event.key] = None
        elif event.number == number and self._in_flight.lend(event.key):
            yield LendSlot(key=event.key)

    def forget(self, key: TurnKey) -> None:
        """Forget the tools of an ended attempt: its timer must not lend the slot of the next attempt."""
        self._running.pop(key, None)
        self._wanted.pop(key, None)

    def give_back(self) -> Iterator[TakeBackSlot | LoseSlot]:
        """Return slots to turns whose tools have ended, as far as there is room; other turns wait meanwhile."""
        for owing in self._owing:
            owing.owe(owes=False)
        self._owing.clear()
        for key in list(self._wanted):
            worker = self._in_flight.lender(key)
            if worker is None:
                del self._wanted[key]
                if key in self._in_flight:
                    yield LoseSlot(key=key)
            elif not worker.owes and self._in_flight.take_back(key):
                del self._wanted[key]
                yield TakeBackSlot(key=key, worker=worker.name)
            else:
                worker.owe(owes=True)
                self._owing.append(worker)

    def _begin(self, event: ToolsBegan) -> Iterator[LendSlotLater]:
        if not self._in_flight.may_lend(event.key):
            return
        self._numbers += 1
        self._running[event.key] = self._numbers
        again_s = event.context_tokens * (self._speeds.read_s(event.model) or UNKNOWN_READ_S)
        expected_s = max((self._took[name].value for name in event.tools if name in self._took), default=0.0)
        seconds = 0.0 if expected_s > again_s else again_s
        yield LendSlotLater(key=event.key, number=self._numbers, seconds=seconds)

    def _learn(self, tools: Sequence[str], seconds: float) -> None:
        """Learn the time of one message's calls; each of its tools gets it, since the slowest one is not known."""
        for name in tools:
            if name in self._took or len(self._took) < MOST_TOOLS:
                self._took.setdefault(name, Mean()).add(seconds)

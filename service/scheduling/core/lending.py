"""Whose slot is lent to others while its tools run, and who has it back. Pure.

A turn keeps its slot, and with it its cache, for as long as reading its prompt again would cost; one whose tools have
taken longer than that so far lends it at once. At worst that costs twice what the best choice would have (ski rental:
Karlin et al., "Competitive snoopy caching", 1988). A turn that has lent its slot goes before all that wait for its
worker, which starts nothing else while such a turn wants room.

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

UNKNOWN_READ_S: Final = 0.001  # a token of a prompt, until an engine of the model has shown it
MOST_TOOLS: Final = 1000  # whose times are remembered: their names are callers'


class SlotLending:
    """Follows the tools of turns in flight; it writes what they have taken of the in-flight pool."""

    def __init__(self, in_flight: InFlightPool, speeds: SpeedEstimates) -> None:
        self._in_flight = in_flight
        self._speeds = speeds
        self._running: dict[TurnKey, int] = {}  # turns whose tools run, each with the number of its hold
        self._wanted: dict[TurnKey, None] = {}  # by turns whose tools have ended, the longest wait first
        self._took: dict[str, Mean] = {}  # by tool, in seconds
        self._owing: list[WorkerSlots] = []  # workers that start nothing before they have given a slot back
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
        """Forget the tools of an attempt that has ended: its timer must not lend the slot of the next one."""
        self._running.pop(key, None)
        self._wanted.pop(key, None)

    def give_back(self) -> Iterator[TakeBackSlot | LoseSlot]:
        """Give slots back to those whose tools have ended, as far as there is room; others wait meanwhile."""
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
        """Take what the calls of one message took together: its slowest tool counts, and which that is, is not told."""
        for name in tools:
            if name in self._took or len(self._took) < MOST_TOOLS:
                self._took.setdefault(name, Mean()).add(seconds)

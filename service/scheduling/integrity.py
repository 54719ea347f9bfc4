"""The check of the scheduling core's tables while nothing happens: its faults are told, and end nothing."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.work import RunCounters

PIECE_S: Final = 0.001  # of the event loop, each second: a tenth of a percent of a core
STEPS: Final = 25  # between two looks at the clock
EVENT_CHARS: Final = 500
logger = logging.getLogger(__name__)


class IntegrityCheck:
    """One scheduler's; ``last`` are the newest events that its core has handled."""

    def __init__(self, counters: RunCounters) -> None:
        self.last: Sequence[events.Event] = ()
        self._counters = counters
        self._steps: Iterator[str | None] = iter(())
        self._handled = 0  # by the core that is being checked, or was found in order

    def __repr__(self) -> str:
        return f"<IntegrityCheck faults={self._counters.integrity_faults}>"

    def check_piece(self, core: SchedulingCore) -> None:
        """Go on with the check for a moment; it begins anew where anything was handled since the last piece."""
        if core.handled != self._handled:
            self._handled, self._steps = core.handled, core.check()
            return  # a core that is at work is left to it
        until = time.monotonic() + PIECE_S
        while time.monotonic() < until and (steps := list(islice(self._steps, STEPS))):
            for fault in filter(None, steps):
                self._counters.integrity_faults += 1
                logger.error("scheduling: %s, after %s", fault, str(self.last)[:EVENT_CHARS])

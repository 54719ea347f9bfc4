"""The check of the scheduling core's tables while it is idle; faults are counted and logged."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from service.scheduling.core import events
from service.scheduling.core.decide import SchedulingCore
from service.scheduling.work import RunCounters

PIECE_S: Final = 0.001  # seconds of the event loop in each second: a tenth of a percent of a core
STEPS: Final = 25  # steps between two looks at the clock
EVENT_CHARS: Final = 500
logger = logging.getLogger(__name__)


class IntegrityCheck:
    """Checks the core of one scheduler; ``last`` are the newest events that the core has handled."""

    def __init__(self, counters: RunCounters) -> None:
        self.last: Sequence[events.Event] = ()
        self._counters = counters
        self._steps: Iterator[str | None] = iter(())
        self._handled = 0  # calls to handle of the core at the start of this check

    def __repr__(self) -> str:
        return f"<IntegrityCheck faults={self._counters.integrity_faults}>"

    def check_piece(self, core: SchedulingCore) -> None:
        """Continue the check for a moment; start again if the core has handled anything since the last piece."""
        if core.handled != self._handled:
            self._handled, self._steps = core.handled, core.check()
            return  # a busy core is not checked
        until = time.monotonic() + PIECE_S
        while time.monotonic() < until and (steps := list(islice(self._steps, STEPS))):
            for fault in filter(None, steps):
                self._counters.integrity_faults += 1
                logger.error("scheduling: %s, after %s", fault, str(self.last)[:EVENT_CHARS])

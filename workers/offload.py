"""Runs what may take long in another process: a thread cannot be ended, and holds up the event loop all the same.

The function and its arguments are pickled, so both are plain. The processes are started when they are first needed,
kept for a while, and end with the event loop; one that is busy when we are killed ends by its own alarm.
"""

import math
import signal
from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

import anyio
import anyio.to_process
from anyio.lowlevel import RunVar

T = TypeVar("T")
Args = TypeVarTuple("Args")
AT_ONCE: Final = 2
START_LIMIT_S: Final = 20.0  # of a process, on a machine that is busy with everything else
_places: RunVar[anyio.CapacityLimiter] = RunVar("offload places")


async def offload(function: Callable[[*Args], T], *arguments: *Args, limit_s: float) -> T:
    """Return what ``function`` returns; whoever is ahead in the queue counts towards no limit.

    Raises:
        TimeoutError: it takes longer than ``limit_s``, and was ended.
    """
    try:
        places = _places.get()
    except LookupError:
        places = anyio.CapacityLimiter(AT_ONCE)
        _places.set(places)
    async with places:
        with anyio.fail_after(limit_s + START_LIMIT_S):
            return await anyio.to_process.run_sync(_bounded, function, limit_s, *arguments, cancellable=True)


def _bounded(function: Callable[[*Args], T], limit_s: float, *arguments: *Args) -> T:
    """Run in the other process: what it spends beyond the limit is an error there, and beyond another its end."""
    signal.signal(signal.SIGPROF, _outrun)
    signal.setitimer(signal.ITIMER_PROF, limit_s)  # of this process's own time: a pause of the machine is nobody's
    signal.alarm(math.ceil(limit_s + START_LIMIT_S))
    try:
        return function(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def _outrun(_number: int, _frame: object) -> None:
    raise TimeoutError("it takes too long")

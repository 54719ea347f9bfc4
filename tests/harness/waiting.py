"""Waiting for conditions under a limit, which replaces sleeps in tests."""

import threading
import time
from collections.abc import Callable

import anyio
import psutil

LIMIT_S = 20.0  # for anything that waits; a wait that needs a tenth of it on these machines is a defect
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.02
_NEVER = threading.Event()


def wait_for(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> float:
    """Return after how many seconds ``condition`` held; fail, naming ``what``, if it does not in time."""
    started_at, pause_s = time.monotonic(), FIRST_PAUSE_S
    looked_at = started_at
    while not condition():
        # A pause of this process between two looks is not the program's delay: only a timely look shows one.
        assert looked_at - started_at < limit_s, f"not within {limit_s:g} s: {what}"
        _NEVER.wait(pause_s)  # a look may cost a request, and the program needs the processor as well
        pause_s = min(LAST_PAUSE_S, pause_s * 1.1)
        looked_at = time.monotonic()
    return time.monotonic() - started_at


async def wait_until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Do the same without blocking the event loop."""
    await anyio.to_thread.run_sync(wait_for, condition, what, limit_s)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Children that an earlier program in this process has left, and nobody goes on with."""

import logging
import os
import signal
from collections.abc import Collection
from typing import Final

import anyio

from workers.process.identity import ProcessId, kill_exactly
from workers.process.orphans import own_children

TERM_S: Final = 5.0  # for a tether to end its tree, and a guardian whose lifeline is closed
KILL_S: Final = 5.0
POLL_S: Final = 0.005
logger = logging.getLogger(__name__)


def children_now() -> list[ProcessId]:
    """List our children of this moment."""
    return [child for child in map(ProcessId.of, own_children()) if child is not None]


async def end_children(children: Collection[ProcessId]) -> bool:
    """Have children of ours end, and collect them; whether all have.

    SIGTERM first: a tether ends its tree by that, and a guardian obeys its lifeline alone.
    """
    left = {child.pid: child for child in children if not _is_collected(child.pid)}
    for number, limit_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for child in left.values():
            if number == signal.SIGKILL:
                kill_exactly(child)
            else:
                os.kill(child.pid, number)  # our own uncollected child: the number is its own
        with anyio.move_on_after(limit_s):
            # The kernel wakes nobody for one child in particular.
            while left := {pid: child for pid, child in left.items() if not _is_collected(pid)}:  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
    if left:
        logger.error("processes that an earlier program of this process has left do not die: %s", sorted(left))
    return not left


def _is_collected(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True

"""Descendants of an engine whose guardian was killed: the second ring.

We are a subreaper, so the kernel makes them our children. A child of ours that carries our mark has lost its guardian,
since guardians themselves carry none; no other process that this one started is ever touched.
"""

import logging
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import anyio
import psutil

from workers.process import guardian
from workers.process.identity import CannotLook, ProcessId, kill_exactly, looking, mark_of, session_of
from workers.process.registry import run_id

LIMIT_S: Final = 5.0  # SIGKILL takes milliseconds; beyond it a process hangs in the kernel
PATROL_S: Final = 10.0  # a tool server's tether may be killed too, and only the patrol finds its orphans
_POLL_S: Final = 0.005
TERM_S: Final = 5.0  # for a tether to end its tree, and a guardian whose lifeline is closed
KILL_S: Final = 5.0
POLL_S: Final = 0.005
logger = logging.getLogger(__name__)


async def end_orphans(session: int | None = None) -> bool:
    """Kill and collect orphans until there are none; return False if one does not die, or they cannot be listed.

    ``session`` is that of an engine whose guardian is dead and collected: its members are orphans even without a mark,
    mainly zombies, which have lost theirs.
    """
    guardian.become_subreaper()
    deadline = time.monotonic() + LIMIT_S
    uncollected: set[int] = set()
    while (orphans := _orphans_now(session)) or uncollected or orphans is None:
        if time.monotonic() > deadline:
            return False
        for orphan in orphans or ():
            kill_exactly(orphan)
            uncollected.add(orphan.pid)
        uncollected = {pid for pid in uncollected if not _collect(pid)}
        if uncollected or orphans is None:
            await anyio.sleep(_POLL_S)
    return True


async def patrol() -> None:
    """Be a subreaper, and end orphans every ``PATROL_S``, until cancelled."""
    guardian.become_subreaper()
    while True:
        if not await end_orphans():
            left = _orphans_now(None)
            if left is None:
                logger.error("no descriptor or no memory is left to look for processes that lost their guardian")
            else:
                logger.error("processes that lost their guardian cannot be killed: %s", left)
        await anyio.sleep(PATROL_S)


def _orphans_now(session: int | None) -> list[ProcessId] | None:
    """Return the present orphans; None if that is impossible to tell."""
    try:
        return _orphans(session) or _orphans(session, is_thorough=session is not None)
    except CannotLook:
        return None


def _orphans(session: int | None, *, is_thorough: bool = False) -> list[ProcessId]:
    own = run_id()
    found = (
        ProcessId.of(pid)
        for pid in (_all_children() if is_thorough else own_children())
        if mark_of(pid) == own or (session is not None and session_of(pid) == session)
    )
    return [orphan for orphan in found if orphan is not None]


def _all_children() -> list[int]:
    # The kernel's list of children may omit some while others end; a scan of all processes omits none.
    with looking():
        return [child.pid for child in psutil.Process().children()]


def own_children() -> list[int]:
    """List the children that the kernel reports at once.

    Raises:
        CannotLook: it is impossible to tell now.
    """
    pids: list[int] = []
    with looking():
        listings = [Path(thread.path, "children") for thread in os.scandir("/proc/self/task")]
        for listing in listings:
            try:
                pids += map(int, listing.read_text(encoding="ascii").split())
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread has ended
    return pids


def _collect(pid: int) -> bool:
    """Whether the child is collected, by us or by any caller."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def children_now() -> list[ProcessId]:
    """List our present children; none if that is impossible to tell, and the patrol finds those without a guardian."""
    try:
        return [child for child in map(ProcessId.of, own_children()) if child is not None]
    except CannotLook:
        return []


async def end_children(children: Collection[ProcessId]) -> bool:
    """End children of ours and collect them; return whether all have ended.

    SIGTERM first: it makes a tether end its tree; a guardian obeys only its lifeline.
    """
    left = {child.pid: child for child in children if not _is_collected(child.pid)}
    for number, limit_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        for child in left.values():
            if number == signal.SIGKILL:
                kill_exactly(child)
            else:
                os.kill(child.pid, number)  # our own uncollected child: the number is its own
        with anyio.move_on_after(limit_s):
            # The kernel gives no signal for one particular child.
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

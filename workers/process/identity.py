"""Processes by proven identity: a signal reaches only the intended process, even if its pid is reused."""

import errno
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from workers.process import guardian

NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
logger = logging.getLogger(__name__)


class CannotLook(OSError):
    """No descriptor or no memory is left to look at a process; its state stays unknown."""


@contextmanager
def looking() -> Iterator[None]:
    """Distinguish a look that found nothing from one that was impossible.

    Raises:
        CannotLook: no descriptor or no memory is left.
    """
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise CannotLook(error.errno, error.strerror) from error
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """One process of one boot: a pid may be reused, a pid with its start time (in clock ticks) is unique."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """Return the identity of a living process; None if it does not live.

        Raises:
            CannotLook: it is impossible to tell now.
        """
        try:
            return cls(pid=pid, started=_stat(pid).started)
        except CannotLook:
            raise
        except (OSError, ValueError, IndexError):
            return None

    @property
    def is_alive(self) -> bool:
        """Whether it still is that process, and no zombie; True while that is impossible to tell."""
        try:
            now = _stat(self.pid)
        except CannotLook:
            return True
        except (OSError, ValueError, IndexError):
            return False
        return now.started == self.started and now.state not in "ZX"


def kill_exactly(process: ProcessId) -> None:
    """Send SIGKILL to exactly that process: the descriptor stays with it, even if its number is reused."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if ProcessId.of(process.pid) == process:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        logger.exception("process %d is ours and cannot be killed", process.pid)
    finally:
        os.close(descriptor)


def mark_of(pid: int) -> str:
    """Return the run of Roundhouse whose guardian a process descends from, '' without one.

    Raises:
        CannotLook: it is impossible to tell now.
    """
    try:
        with looking():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
    except CannotLook:
        raise
    except OSError:
        return ""  # another user's, or gone
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == guardian.MARK.encode():
            return value.decode("ascii", "replace")
    return ""


def session_of(pid: int) -> int | None:
    """Return a process's session, also for a zombie; None without such a process.

    Raises:
        CannotLook: it is impossible to tell now.
    """
    try:
        return _stat(pid).session
    except CannotLook:
        raise
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stat:
    state: str
    session: int
    started: int


def _stat(pid: int) -> _Stat:
    """Return fields 3, 6 and 22 of /proc/PID/stat; the second, its name, may hold anything."""
    with looking():
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    fields = stat.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), started=int(fields[19]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """Why the guardian of a span's member ended it: which member ended first, and how.

    ``is_outside`` says that no engine caused it.
    """

    member: int
    because: str
    is_outside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit:
    """The end of an engine's main process: a status, or a signal, or neither if it is unknown.

    ``parted`` is there if it ended with its span, and not by itself.

    ``max_rss_bytes`` and ``cpu_s`` are the kernel's account of it and of the children that it had waited for.
    """

    status: int | None = None
    signal: int | None = None
    max_rss_bytes: int | None = field(default=None, compare=False)
    cpu_s: float | None = field(default=None, compare=False)
    parted: Parted | None = None

    def __str__(self) -> str:
        """Describe it in words."""
        if self.signal is not None:
            known = {number.value: number.name for number in signal.Signals}
            return f"killed by {known.get(self.signal, f'signal {self.signal}')}"
        return "ended in an unknown way" if self.status is None else f"exited with status {self.status}"

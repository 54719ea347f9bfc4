"""The stage of an upgrade, from the kernel and the service's log: the service itself is not asked."""

import threading
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

from tests.harness.service import Service
from tests.harness.waiting import LIMIT_S

STAGE_LIMIT_S: Final = 3 * LIMIT_S  # for a start, and for a stage to come: several services share the machine
COARSE_S, FINE_S = 0.001, 0.0001  # between two looks; the second where the exec is near
PROC: Final = Path("/proc")
_NEVER = threading.Event()


class Stage(StrEnum):
    """A stage of an upgrade, as the kernel and the log show it."""

    ASKED = "asked"  # the signal is sent
    CHECK = "check"  # the child with the new code is there
    DRAIN = "drain"  # nothing more is admitted; turns end, clients are answered
    EXEC = "exec"  # the document is written, and the old program runs still
    IMPORT = "import"  # the new program runs, and has not taken the document
    ADOPT = "adopt"  # it has, and does not serve yet
    SERVE = "serve"  # it serves


ORDER: Final = list(Stage)


class UpgradeWatch:
    """A service from here to the end of its next upgrade; used by one thread."""

    def __init__(self, service: Service) -> None:
        assert service.process is not None
        self._service = service
        self._pid = service.process.pid
        self._log = service.folder / "serve.log"
        self._log_at = self._log.stat().st_size
        self._first = _program_of(self._pid)

    def follow(self, until: Stage) -> dict[Stage, float]:
        """Return when a stage has begun, with the monotonic times at which it and those before it were first seen."""
        seen: dict[Stage, float] = {Stage.ASKED: time.monotonic()}
        while (now := self.stage()) is not Stage.SERVE and ORDER.index(now) < ORDER.index(until):
            seen.setdefault(now, time.monotonic())
            assert time.monotonic() - seen[Stage.ASKED] < STAGE_LIMIT_S, f"it stays at {now}: {self._service.log()}"
            assert self._service.process is not None
            assert self._service.process.poll() is None, self._service.log()
            _NEVER.wait(FINE_S if until in (Stage.EXEC, Stage.IMPORT) and now is Stage.DRAIN else COARSE_S)
        seen.setdefault(now, time.monotonic())
        return seen

    def stage(self) -> Stage:
        """Return the present stage."""
        is_after = _program_of(self._pid) not in (self._first, b"")
        if _has_document(self._pid):
            return Stage.IMPORT if is_after else Stage.EXEC
        told = self._told()
        if is_after:
            return Stage.SERVE if "upgraded in place from" in told else Stage.ADOPT
        if "upgrading in place to" in told:
            return Stage.DRAIN
        return Stage.CHECK if _has_check(self._pid) else Stage.ASKED

    def _told(self) -> str:
        with self._log.open("rb") as log:
            log.seek(self._log_at)
            return log.read().decode(errors="replace")


def environment_of(pid: int) -> bytes:
    """Return a process's initial environment; nothing for a process that is gone, or a zombie."""
    try:
        return b"\0" + (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def _program_of(pid: int) -> bytes:
    """Return where the kernel has mapped a process's program: each exec has another place."""
    try:
        return (PROC / str(pid) / "auxv").read_bytes()
    except OSError:
        return b""


def _has_document(pid: int) -> bool:
    """Return whether the process has the file open that carries one program's state to the next."""
    with suppress(OSError):
        return any("roundhouse-handover" in _target(link) for link in (PROC / str(pid) / "fd").iterdir())
    return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed by now
        return ""


def _has_check(pid: int) -> bool:
    """Return whether a child of the process is checking that it could take over."""
    with suppress(OSError):
        children = [
            int(child) for task in (PROC / str(pid) / "task").glob("*/children") for child in task.read_text().split()
        ]
        return any(b"--upgrade-check" in (PROC / str(child) / "cmdline").read_bytes() for child in children)
    return False

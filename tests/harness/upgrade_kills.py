"""A service that is killed at chosen moments of its upgrades, life after life on one state.

The moments are swept: kill N of a run aims at one of the stages in turn, and at a fraction of it that fills the whole
stage more and more densely. What was really met is read from ``/proc`` right before the signal. Every process that a
life has started carries that life's mark in its environment, so what is left is found whatever became its parent.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

from tests.harness.audit import Load, audit
from tests.harness.service import Document, Service, debate
from tests.harness.waiting import LIMIT_S, wait_for

MARK: Final = "SOAK_LIFE"
GONE_S: Final = 2.0  # for the whole tree of a life that was killed
STAGE_LIMIT_S: Final = 3 * LIMIT_S  # for a start, and for a stage to come: several services share the machine
COARSE_S, FINE_S = 0.001, 0.0001  # between two looks; the second where the exec is near
ASKED_S, EXEC_S, SERVED_S = 0.02, 0.002, 0.3  # how much of the stages without an end of their own is swept
DRAIN_S: Final = 0.2
_NEVER = threading.Event()
PROC: Final = Path("/proc")


class Stage(StrEnum):
    """What an upgrade does, as the kernel and the log tell it."""

    ASKED = "asked"  # the signal is sent
    CHECK = "check"  # the child with the new code is there
    DRAIN = "drain"  # nothing more is admitted; turns end, clients are answered
    EXEC = "exec"  # the document is written, and the old program runs still
    IMPORT = "import"  # the new program runs, and has not taken the document
    ADOPT = "adopt"  # it has, and does not serve yet
    SERVE = "serve"  # it serves


ORDER: Final = list(Stage)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: where it was aimed, what it met, and for how long anything was left."""

    number: int
    aim: str
    met: str
    gone_s: float


@dataclass(kw_only=True)
class Spans:
    """How long each stage takes here and now, in seconds; the newest whole upgrade or the stages seen since."""

    seconds: dict[Stage, float] = field(
        default_factory=lambda: {Stage.ASKED: ASKED_S, Stage.EXEC: EXEC_S, Stage.SERVE: SERVED_S}
    )

    def note(self, seen: dict[Stage, float]) -> None:
        """Take over the stages that were seen from their beginning to that of the next."""
        for stage, following in pairwise(stage for stage in ORDER if stage in seen):
            if stage not in (Stage.ASKED, Stage.EXEC):
                self.seconds[stage] = seen[following] - seen[stage]

    @property
    def whole(self) -> float:
        """All of it."""
        return sum(self.seconds.values())


def aim_of(number: int) -> tuple[Stage | None, float]:
    """Return the stage that a kill aims at and the fraction of it; no stage is any moment of the whole.

    Eight kills go round once; the fractions of one stage are a van der Corput sequence: 1/2, 1/4, 3/4, 1/8 ...
    """
    turn, place = divmod(number, len(ORDER) + 1)
    if place == len(ORDER):
        return None, Random(number).random()  # noqa: S311
    fraction, step, rest = 0.0, 0.5, turn + 1
    while rest:
        fraction, step, rest = fraction + step * (rest & 1), step / 2, rest >> 1
    return ORDER[place], fraction


class KilledService:
    """One state, on which one service after another is started, upgraded and killed; used by one thread."""

    def __init__(self, folder: Path, port: int, models: Document, seed: int) -> None:
        self.service = Service(folder, port, models, {"drain_s": DRAIN_S})
        self.spans = Spans()
        self._load = Load([self.service.url], seed)
        self._lives = 0
        self._log_at = 0

    def measure(self) -> None:
        """Live through one whole upgrade, so that it is known how long each stage takes."""
        self._begin()
        self._ask()
        self._follow(Stage.SERVE)
        self.end()

    def kill_once(self, number: int) -> Kill:
        """Start a life, have it upgraded with turns under way, kill it at the moment of ``number``."""
        self._begin()
        job = debate()
        self._load.acknowledged[self.service.post_job(job)] = job
        stage, fraction = aim_of(number)
        self._ask()
        if stage is None:
            self._rest(fraction * self.spans.whole)
        else:
            self._follow(stage)
            self._rest(fraction * self.spans.seconds.get(stage, EXEC_S))
        met = self._stage()
        gone_s = self.end()
        return Kill(number=number, aim=stage or "any", met=met, gone_s=gone_s)

    def end(self) -> float:
        """Kill the life; return how many seconds after the signal nothing of it was left."""
        killed_at = time.monotonic()
        self.service.kill()
        wait_for(lambda: not self._left(), f"nothing of life {self._mark} is left", GONE_S)
        return time.monotonic() - killed_at

    def audit(self) -> Counter[str]:
        """Start once more, and fail unless all that was acknowledged has been done once; return what was counted."""
        self._begin()
        counts = audit(self._load, self.service.url)
        self.end()
        self._load.acknowledged.clear()
        return counts

    def close(self) -> None:
        """Leave nothing."""
        self.service.http.close()
        if self.service.process is not None and self.service.process.poll() is None:
            self.service.kill()

    @property
    def _mark(self) -> str:
        return f"{self.service.folder}#{self._lives}"

    @property
    def _pid(self) -> int:
        assert self.service.process is not None
        return self.service.process.pid

    def _begin(self) -> None:
        self._lives += 1
        self.service.environment = {MARK: self._mark}
        log = self.service.folder / "serve.log"
        self._log_at = log.stat().st_size if log.exists() else 0
        self.service.start(limit_s=STAGE_LIMIT_S)
        engines = {each["pid"] for each in self.service.get("/v1/workers")["workers"]}
        # What cannot be seen alive would be missed afterwards as well.
        assert engines | {self._pid} <= set(self._left()), f"the mark of life {self._mark} is not everywhere"

    def _left(self) -> list[int]:
        mark = f"{MARK}={self._mark}".encode()
        pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in _environment(pid)]

    def _ask(self) -> None:
        os.kill(self._pid, signal.SIGUSR2)

    def _follow(self, until: Stage) -> None:
        """Return when a stage has begun; what was seen on the way is the measure of the next kill."""
        seen: dict[Stage, float] = {Stage.ASKED: time.monotonic()}
        while (now := self._stage()) is not Stage.SERVE and ORDER.index(now) < ORDER.index(until):
            seen.setdefault(now, time.monotonic())
            assert time.monotonic() - seen[Stage.ASKED] < STAGE_LIMIT_S, f"stays at {now}; see {self.service.folder}"
            assert self.service.process is not None
            assert self.service.process.poll() is None, self.service.log()
            _NEVER.wait(FINE_S if until in (Stage.EXEC, Stage.IMPORT) and now is Stage.DRAIN else COARSE_S)
        seen.setdefault(now, time.monotonic())
        self.spans.note(seen)

    def _stage(self) -> Stage:
        is_after = b"\0ROUNDHOUSE_HANDOVER=" in _environment(self._pid)
        if _has_document(self._pid):
            return Stage.IMPORT if is_after else Stage.EXEC
        told = self._told()
        if is_after:
            return Stage.SERVE if "upgraded in place from" in told else Stage.ADOPT
        if "upgrading in place to" in told:
            return Stage.DRAIN
        return Stage.CHECK if _has_check(self._pid) else Stage.ASKED

    def _told(self) -> str:
        with (self.service.folder / "serve.log").open("rb") as log:
            log.seek(self._log_at)
            return log.read().decode(errors="replace")

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (rest := until - time.monotonic()) > 0.0:
            _NEVER.wait(rest)


class KillRun:
    """Kills on several services side by side, each in a thread of its own; the first finding ends all of them."""

    def __init__(self, numbers: Iterable[int], note: Callable[[Kill], None], audit_every: int) -> None:
        self._waiting = iter(numbers)
        self._note = note
        self._audit_every = audit_every
        self._lock = threading.Lock()
        self._faults: list[BaseException] = []
        self.counts = Counter[str]()  # of the audits

    def perform(self, services: Sequence[KilledService]) -> None:
        """Do all of it.

        Raises:
            AssertionError: the first finding; the other services end after the kill that they are at.
        """
        threads = [threading.Thread(target=self._run_guarded, args=(service,)) for service in services]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def _run_guarded(self, service: KilledService) -> None:
        try:
            self._run(service)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            self._faults.append(error)
        finally:
            service.close()

    def _run(self, service: KilledService) -> None:
        service.measure()
        done = 0
        while (number := self._next()) is not None:
            kill = service.kill_once(number)
            done += 1
            with self._lock:
                self._note(kill)
            if done % self._audit_every == 0:
                self._audit(service)
        if done % self._audit_every and not self._faults:
            self._audit(service)

    def _next(self) -> int | None:
        with self._lock:
            return None if self._faults else next(self._waiting, None)

    def _audit(self, service: KilledService) -> None:
        counts = service.audit()
        with self._lock:
            self.counts.update(counts)


def _environment(pid: int) -> bytes:
    """Return what a process was started with; nothing of one that is gone, or a zombie."""
    try:
        return b"\0" + (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def _has_document(pid: int) -> bool:
    """Whether a process has the file open by which one program tells the next what it leaves."""
    with suppress(OSError):
        return any("roundhouse-handover" in _target(link) for link in (PROC / str(pid) / "fd").iterdir())
    return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed by now
        return ""


def _has_check(pid: int) -> bool:
    """Whether a child of a process is asked if it could take over."""
    with suppress(OSError):
        children = [
            int(child) for task in (PROC / str(pid) / "task").glob("*/children") for child in task.read_text().split()
        ]
        return any(b"--upgrade-check" in (PROC / str(child) / "cmdline").read_bytes() for child in children)
    return False

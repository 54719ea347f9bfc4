"""A service that is killed at chosen moments of its upgrades, again and again on one state.

The moments are swept: kill N of a run aims at one of the stages in turn, and at a fraction of it that fills the whole
stage more and more densely. The stage that was really hit is read from ``/proc`` right before the signal. Every process
carries a mark in its environment, so leftovers are found whatever became their parent.
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

from tests.harness.audit import Load, audit
from tests.harness.service import Document, Service, debate
from tests.harness.upgrade_stages import ORDER, PROC, STAGE_LIMIT_S, Stage, UpgradeWatch, environment_of
from tests.harness.waiting import wait_for

MARK: Final = "SOAK_LIFE"
GONE_S: Final = 2.0  # time for the whole tree of a killed service
ASKED_S, EXEC_S, SERVED_S = 0.02, 0.002, 0.3  # how much of the stages without an end of their own is swept
DRAIN_S: Final = 0.2
_NEVER = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: its aim, what it hit, and for how long any process was left."""

    number: int
    aim: str
    met: str
    gone_s: float


@dataclass(kw_only=True)
class Spans:
    """The length of each stage on this machine in seconds, from the newest whole upgrade or the stages seen since."""

    seconds: dict[Stage, float] = field(
        default_factory=lambda: {Stage.ASKED: ASKED_S, Stage.EXEC: EXEC_S, Stage.SERVE: SERVED_S}
    )

    def note(self, seen: dict[Stage, float]) -> None:
        """Record the stages that were seen from their beginning to that of the next."""
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

    def measure(self) -> None:
        """Run one whole upgrade to measure each stage."""
        self._begin()
        self.spans.note(self._ask().follow(Stage.SERVE))
        self.end()

    def kill_once(self, number: int) -> Kill:
        """Start a service, upgrade it with running turns, and kill it at the moment of ``number``."""
        self._begin()
        job = debate()
        self._load.acknowledged[self.service.post_job(job)] = job
        stage, fraction = aim_of(number)
        watch = self._ask()
        if stage is None:
            self._rest(fraction * self.spans.whole)
        else:
            self.spans.note(watch.follow(stage))
            self._rest(fraction * self.spans.seconds.get(stage, EXEC_S))
        met = watch.stage()
        gone_s = self.end()
        return Kill(number=number, aim=stage or "any", met=met, gone_s=gone_s)

    def end(self) -> float:
        """Kill the service; return after how many seconds no process of it was left."""
        killed_at = time.monotonic()
        self.service.kill()
        wait_for(lambda: not self._left(), f"nothing of life {self._mark} is left", GONE_S)
        return time.monotonic() - killed_at

    def audit(self) -> Counter[str]:
        """Start once more, and check that all acknowledged work was done once; return the counts."""
        self._begin()
        counts = audit(self._load, self.service.url)
        self.end()
        self._load.acknowledged.clear()
        return counts

    def close(self) -> None:
        """Leave no process."""
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
        self.service.start(limit_s=STAGE_LIMIT_S)
        # One worker is enough for its model to be ready.
        wait_for(lambda: all(each["state"] == "ready" for each in self._workers()), "all workers are ready")
        engines = {each["pid"] for each in self._workers()}
        # What cannot be seen alive would be missed afterwards as well.
        assert engines | {self._pid} <= set(self._left()), f"the mark of life {self._mark} is not everywhere"

    def _workers(self) -> list[Document]:
        workers: list[Document] = self.service.get("/v1/workers")["workers"]
        return workers

    def _left(self) -> list[int]:
        mark = f"\0{MARK}={self._mark}\0".encode()
        pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if mark in environment_of(pid)]

    def _ask(self) -> UpgradeWatch:
        watch = UpgradeWatch(self.service)
        os.kill(self._pid, signal.SIGUSR2)
        return watch

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
        self.counts = Counter[str]()  # counts of the audits

    def perform(self, services: Sequence[KilledService]) -> None:
        """Run all kills.

        Raises:
            AssertionError: the first finding; the other services end after their current kill.
        """
        threads = [threading.Thread(target=self._run_guarded, args=(service,)) for service in services]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as error:
            self._faults.append(error)
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

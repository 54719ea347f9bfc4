"""Makes an incident of a worker's broken incarnation: the scene when it was found broken, and its end."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Self
from urllib.parse import quote

import msgspec

from workers.devices.device import DeviceMemory
from workers.devices.device_health import DeviceHealth
from workers.engine.incarnation import Incarnation
from workers.engine.log_ring import LogRing
from workers.engine.supervisor import Moves, Supervisor
from workers.health.incident import TAIL_CHARS, TAIL_LINES, Incident, Incidents, RequestView
from workers.health.probes import KernelView
from workers.health.watch import HealthWatch
from workers.log_context import line_about, of_worker
from workers.outcome import FailureReason
from workers.policy.liveness import Verdict
from workers.process.identity import EngineExit
from workers.spec import WorkerId, WorkerSpec

logger = logging.getLogger(__name__)


class Diary(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a worker's id; the models that use a lane one after the other share it."""

    log: LogRing
    moves: Moves
    incidents: Incidents

    @classmethod
    def of_worker(cls, spec: WorkerSpec) -> Self:
        """Return a worker's diary, with the incidents of our earlier lives if a folder keeps them."""
        file = spec.state_dir / "incidents" / _file_name(spec.id) if spec.state_dir else None
        return cls(log=LogRing(), moves=Moves(), incidents=Incidents(file))


def _file_name(worker_id: WorkerId) -> str:
    return f"{quote(worker_id, safe='')}.jsonl"


class _Scene(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    reason: str
    verdict: Verdict | None
    kernel: KernelView
    in_flight: tuple[RequestView, ...]
    pools: Mapping[str, int] | None


class IncidentRecorder:
    """Records the scene before an engine is killed and its requests are ended, and keeps it with the end."""

    def __init__(
        self,
        spec: WorkerSpec,
        supervisor: Supervisor,
        watch: HealthWatch,
        count_pools: Callable[[], Mapping[str, int] | None],
        incidents: Incidents,
        health: DeviceHealth | None,
    ) -> None:
        self._id = spec.id
        self._model = spec.name
        self._devices = [device.uuid for device in spec.accelerators or ([spec.lane.device] if spec.lane else [])]
        self._health = health
        self._supervisor = supervisor
        self._watch = watch
        self._count_pools = count_pools
        self._scene: _Scene | None = None
        self.incidents = incidents
        self.counts: Counter[str] = Counter()  # incidents of this run, by reason

    def __repr__(self) -> str:
        return f"<IncidentRecorder {self._id} {self.incidents!r}>"

    @property
    def has_viewed(self) -> bool:
        """Whether the present incarnation was already found broken: the first reason stands."""
        return self._scene is not None and self._scene.incarnation == self._supervisor.now.incarnation

    def reason_of(self, incarnation: int) -> str | None:
        """Return why an incarnation is gone, if it was the last that broke."""
        return self._scene.reason if self._scene is not None and self._scene.incarnation == incarnation else None

    def view(self, reason: FailureReason) -> None:
        """Record the present scene."""
        self._scene = self._look(reason)

    def _look(self, reason: str) -> _Scene:
        views = self._watch.views()
        running = self._supervisor.running
        if running is not None and not running.is_gone:
            self._watch.observations.poll_kernel_nowait()
        return _Scene(
            incarnation=self._supervisor.now.incarnation,
            reason=reason,
            verdict=_verdict(reason) if views else None,
            kernel=self._watch.observations.kernel,
            in_flight=views,
            pools=self._count_pools(),
        )

    def keep(self, incarnation: Incarnation, because: str) -> None:
        """Keep an incident of an incarnation that has ended."""
        if not self.has_viewed:
            self.view(FailureReason.ENGINE_DIED)
        scene = self._scene
        assert scene is not None  # noqa: S101 - just viewed
        self._add(scene, because, incarnation.exit)

    def note_failure(self, reason: str, because: str) -> None:
        """Keep an incident of the present incarnation, which lives on."""
        self._add(self._look(reason), because, None)

    def _add(self, scene: _Scene, because: str, ended: EngineExit | None) -> None:
        stdout_tail, stderr_tail = map(_fitting, self._supervisor.log.tails(TAIL_LINES, incarnation=scene.incarnation))
        device, memory = self._fullest_device()
        incident = Incident(
            worker=self._id,
            model=self._model,
            device=device,
            device_memory=memory,
            incarnation=scene.incarnation,
            at=datetime.now(UTC),
            reason=scene.reason,
            because=because,
            verdict=scene.verdict,
            exit=ended,
            stdout_tail=stdout_tail,
            stderr_tail=stderr_tail,
            kernel=scene.kernel,
            in_flight=scene.in_flight,
            pools=scene.pools,
        )
        self.counts[scene.reason] += 1
        try:
            self.incidents.add(incident)
        except (OSError, ValueError):
            logger.exception("worker %s: an incident could not be written", self._id)

    def _fullest_device(self) -> tuple[str | None, DeviceMemory | None]:
        """Return the engine's device with the least memory left at the last look, and its memory."""
        known = [(uuid, self._health.memory.get(uuid) if self._health else None) for uuid in self._devices]
        return min(
            known,
            key=lambda each: math.inf if each[1] is None else each[1].total_mib - each[1].used_mib,
            default=(None, None),
        )

    def note_finding(self, incarnation: int, finding: str) -> None:
        """Add a later finding to the incident of an incarnation."""
        line = line_about(of_worker(self._id, incarnation))
        logger.warning("worker %s: engine %d: %s", self._id, incarnation, finding, extra=line)
        try:
            self.incidents.note_finding(incarnation, finding)
        except (OSError, ValueError):
            logger.exception("worker %s: an incident could not be written", self._id)


def _verdict(reason: str) -> Verdict | None:
    """Return the verdict of a breakdown on the engine's requests; None if it condemns none."""
    if reason in {FailureReason.STALLED_PREFILL, FailureReason.STALLED_DECODE}:
        return Verdict.STALLED
    return Verdict.DEAD if reason == FailureReason.ENGINE_DIED else None


def _fitting(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the newest lines that fit; at least the end of the very last."""
    left, kept = TAIL_CHARS, []
    for line in reversed(lines):
        if left <= 0:
            break
        kept.append(line[-left:])
        left -= len(line)
    return tuple(reversed(kept))

"""One lane with the workers of all models that may use it: at most one of them has an engine.

Source: ``workers.policy.lane_life``.
"""

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from workers.devices.device_health import DeviceHealth
from workers.devices.layout import Lane
from workers.policy.lane_life import LaneEngine, LanePhase
from workers.policy.placement import LaneView
from workers.states import PASSING, Hold
from workers.supervised import SupervisedWorker


class LaneWorkers:
    """The state of one lane; written only by its pool. ``workers`` are by model."""

    def __init__(self, first: SupervisedWorker, health: DeviceHealth | None) -> None:
        self._health = health
        self.workers = {first.spec.name: first}
        self.current = first  # the worker whose engine is there, or was last
        self.next: str | None = None  # the model that the lane is kept for
        self.reason: tuple[str, str | None] | None = None  # why it comes, and the model that leaves for it
        self._in_use = 0  # slots at the last look
        self.used_at = 0.0  # start of the last turn, in monotonic seconds
        self.idle_since = 0.0  # end of the last turn
        self.loading_since = 0.0
        self.last_load = (0.0, 0.0)  # its begin and end
        self.swaps = 0
        self.turning: SupervisedWorker | None = None  # the worker whose engine is falling asleep or waking
        self.loads_s: dict[str, float] = {}  # duration of each model's last load
        self.barred: dict[str, float] = {}  # models that gave up there, and until when

    def __repr__(self) -> str:
        return f"<LaneWorkers {self.lane.id} {self.resident or 'empty'} next={self.next}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the workers of all models."""
        return iter(self.workers.values())

    @property
    def lane(self) -> Lane:
        """Its lane."""
        lane = self.current.spec.lane
        assert lane is not None  # noqa: S101 - the pool has no other workers
        return lane

    @property
    def mark(self) -> str | None:
        """Why its device gets no engines; None if it does."""
        mark = self._health.mark_of(self.lane.device) if self._health is not None else None
        return None if mark is None else f"{self.lane.device.uuid} is left alone: {mark.because}"

    @property
    def next_at(self) -> datetime | None:
        """When it is tried again automatically: its engine, or a model that gave up on it."""
        now = time.monotonic()
        ends = [until for until in self.barred.values() if now < until < math.inf]
        barred_at = datetime.now(UTC) + timedelta(seconds=min(ends) - now) if ends else None
        return min((at for at in (self.current.next_at, barred_at) if at is not None), default=None)

    @property
    def engine(self) -> LaneEngine:
        """Its engine, in the form that decisions about its life use."""
        worker = self.current
        return LaneEngine(
            state=worker.now.state,
            holds=worker.now.holds,
            is_coming=worker.now.is_coming,
            is_turning=self.is_turning,
            in_flight=worker.slots.in_use,
        )

    @property
    def phase(self) -> LanePhase:
        """The phase of its engine."""
        return self.engine.phase

    @property
    def is_changing(self) -> bool:
        """Whether a model is coming or leaving."""
        return self.next is not None or self.is_turning or self.phase in {LanePhase.LOADING, LanePhase.LEAVING}

    def adopt(self, worker: SupervisedWorker) -> None:
        """Adopt a worker whose engine already runs."""
        self.current = worker
        self.used_at = self.idle_since = time.monotonic()

    def note_use(self) -> bool:
        """Look at the slots in use; return whether their number has changed since the last look."""
        before, self._in_use = self._in_use, self.current.slots.in_use
        if before and not self._in_use:
            self.idle_since = time.monotonic()
        return before != self._in_use

    def end_load(self) -> float:
        """Record the end of its model's load; return the duration in seconds."""
        ended_at = time.monotonic()
        self.last_load = self.loading_since, ended_at
        self.loading_since, self.used_at, self.idle_since, self.reason = 0.0, ended_at, ended_at, None
        seconds = self.loads_s[self.current.spec.name] = self.last_load[1] - self.last_load[0]
        self.swaps += 1
        return seconds

    @property
    def is_turning(self) -> bool:
        """Whether its engine is falling asleep or waking."""
        return self.turning is self.current

    def end_turning(self, worker: SupervisedWorker) -> None:
        """End a worker's falling asleep or waking, successful or not; another worker may have the lane by now."""
        if self.turning is worker:
            self.turning = None

    @property
    def resident(self) -> str | None:
        """The model whose engine holds its memory."""
        return None if self.phase is LanePhase.EMPTY else self.current.spec.name

    @property
    def left_because(self) -> str:
        """Why its engine leaves."""
        return f"{self.next} wants its place" if self.next else "its lane is left"

    def stays_with(self, model: str) -> bool:
        """Whether a model is on the lane and stays, or comes next."""
        return self.next == model or (self.resident == model and self.phase is not LanePhase.LEAVING)

    def is_kept_from(self, model: str) -> bool:
        """Whether another model is pinned there, so that this one never gets it."""
        return self.current.spec.pin and self.current.spec.name != model and self.stays_with(self.current.spec.name)

    def view(self, now: float, *, is_changed: bool) -> LaneView:
        """Return it in the form that placement decisions use."""
        return LaneView(
            id=self.lane.id,
            device=self.lane.device.uuid,
            memory_mib=self.lane.memory_mib,
            phase=self.phase,
            resident=self.resident,
            next=self.next,
            in_flight=self.current.slots.in_use,
            slots=self.current.slots.total,
            used_at=self.used_at,
            barred=self.barred_now(now),
            idle_since=self.idle_since,
            is_held=Hold.OPERATOR in self.current.now.holds or self.mark is not None,
            is_changed=is_changed or not self.current.now.holds.isdisjoint(PASSING),
        )

    def barred_now(self, now: float | None = None) -> frozenset[str]:
        """Return the models that gave up here and are not tried again yet."""
        at = time.monotonic() if now is None else now
        return frozenset(model for model, until in self.barred.items() if until > at)

    def may_hold(self, model: str) -> bool:
        """Whether a model fits here when nothing else is on the device."""
        room = self.lane.device.room_mib
        need = self.workers[model].spec.need_mib if model in self.workers else None
        return model in self.workers and (room is None or need is None or need <= room)

    def is_open_to(self, model: str) -> bool:
        """Whether a model may be loaded here now or after the present one, which is not pinned."""
        if not self.may_hold(model) or self.is_kept_from(model):
            return False
        return self.barred.get(model, 0.0) <= time.monotonic() and self.mark is None

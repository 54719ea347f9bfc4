"""Acts out what the placement decides: loads models on lanes when turns want them, and has others leave."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import anyio
from anyio.abc import TaskStatus

from workers.lanes.lane_workers import LaneWorkers
from workers.notifier import Notifier
from workers.policy.heat import Heat
from workers.policy.placement import (
    AssignLane,
    LanePhase,
    LeaveLane,
    LoadModel,
    ModelDemand,
    Placement,
    PlacementAction,
    SwapRule,
    Waiting,
)
from workers.spec import WorkerSpec
from workers.states import PASSING, Hold, WorkerState
from workers.supervised import SupervisedWorker

FOR_EVER: Final = float("inf")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """A model that was loaded on a lane, the one that left for it, why, and how long that took."""

    lane: str
    model: str
    left: str | None
    because: str
    seconds: float


class LanePool:
    """The lanes of a machine; the only one that starts and ends engines on them. ``run`` must be running.

    ``is_changed`` tells of an engine that it is needed though no turn is on it: its weights are being kept, say.
    """

    def __init__(
        self,
        rule: SwapRule = SwapRule.FAIR,
        on_swap: Callable[[Swap], None] = lambda _swap: None,
        is_changed: Callable[[SupervisedWorker], bool] = lambda _worker: False,
    ) -> None:
        self._is_changed = is_changed
        self._lanes: dict[str, LaneWorkers] = {}
        self.hints: dict[str, str] = {}  # of models: the lane that they are loaded on first
        self._specs: dict[str, WorkerSpec] = {}
        self._rooms: dict[str, int | None] = {}
        self._placement = Placement(self._rooms, rule)
        self._waiting: dict[str, Waiting] = {}
        self._in_use: list[int] = []
        self._unserved_since: dict[str, float] = {}
        self._reasons: dict[str, tuple[str, str | None]] = {}  # of a lane: why a model comes, and who leaves for it
        self._heat = Heat()
        self._on_swap = on_swap
        self._changed = Notifier()
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<LanePool {list(self.lanes)}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the workers that are on the lanes, or were last."""
        return (lane.current for lane in self.lanes)

    def add(self, workers: Iterable[SupervisedWorker]) -> None:
        """Take the workers of a model, one for each lane that it may come to; their ``run`` is their owner's."""
        for worker in workers:
            lane = self._lanes.setdefault(worker.spec.id, LaneWorkers(worker))
            lane.workers[worker.spec.name] = worker
            self._specs[worker.spec.name] = worker.spec
        self._rooms |= {lane.lane.device.uuid: lane.lane.device.room_mib for lane in self.lanes}
        self._changed.notify()

    @property
    def lanes(self) -> Collection[LaneWorkers]:
        """All lanes, device by device."""
        return self._lanes.values()

    @property
    def models(self) -> Collection[str]:
        """The models that come to lanes."""
        return self._specs.keys()

    def find(self, worker_id: str) -> LaneWorkers | None:
        """Return the lane of a worker's id."""
        return self._lanes.get(worker_id)

    def slots_of(self, model: str) -> int:
        """Count the slots of a model on one lane."""
        return self._specs[model].slots

    def is_lost(self, model: str) -> bool:
        """Whether a model has given up for good on every lane that could hold it."""
        able = [lane for lane in self.lanes if lane.may_hold(model)]
        return all(lane.barred.get(model) == FOR_EVER for lane in able)

    def has_room(self, model: str) -> bool:
        """Whether a lane could hold a model."""
        now = time.monotonic()
        return any(lane.may_hold(model) and lane.barred.get(model, 0.0) <= now for lane in self.lanes)

    def trouble_of(self, model: str) -> str:
        """Return what the turns of a model wait for that is not loaded."""
        if not self.has_room(model):
            failed = [lane.workers[model] for lane in self.lanes if model in lane.barred]
            causes = "; ".join(f"{worker.spec.id}: {worker.because}" for worker in failed)
            return f"{model} has failed on every lane that could hold it: {causes}"
        coming = [lane for lane in self.lanes if model in {lane.next, lane.resident}]
        if coming:
            lane = coming[0]
            if lane.next == model:
                return f"{lane.lane.id} is kept for it: {lane.resident or 'nothing'} leaves first"
            return f"{lane.lane.id} is {lane.current.state}: {lane.current.because}"
        residents = ", ".join(f"{lane.lane.id} has {lane.resident or 'none'}" for lane in self.lanes)
        return f"a lane: {residents}"

    # What happens

    def note_waiting(self, waiting: Mapping[str, Waiting]) -> None:
        """Take what waits for each model of the lanes, after every start and end of a turn."""
        in_use = [lane.current.slots_in_use for lane in self.lanes]
        if (waiting, in_use) == (self._waiting, self._in_use):
            return
        for lane, before, now in zip(self.lanes, self._in_use, in_use, strict=False):  # lanes may have come
            if before and not now:
                lane.idle_since = time.monotonic()
        self._waiting, self._in_use = dict(waiting), in_use
        self._changed.notify()

    def note_start(self, worker_id: str, model: str) -> None:
        """Note that a turn of a model starts on a lane."""
        lane = self.find(worker_id)
        if lane is not None:
            lane.used_at = time.monotonic()
            self._heat.note(model)

    def take_change(self, worker: SupervisedWorker) -> None:
        """Note that a worker of a lane has changed."""
        lane = self.find(worker.spec.id)
        if lane is None or lane.current is not worker:
            return
        if worker.state is WorkerState.READY:
            lane.barred.pop(worker.spec.name, None)
            if lane.loading_since:
                self._tell_swap(lane)
        if worker.state is WorkerState.FAILED:
            retry_s = worker.spec.restart.retry_s
            until = FOR_EVER if retry_s is None else time.monotonic() + retry_s
            lane.barred[worker.spec.name] = until
        self._changed.notify()

    def _tell_swap(self, lane: LaneWorkers) -> None:
        model = lane.current.spec.name
        seconds = time.monotonic() - lane.loading_since
        lane.loading_since, lane.used_at = 0.0, time.monotonic()
        lane.idle_since = lane.used_at
        lane.loads_s[model] = seconds
        lane.swaps += 1
        because, left = self._reasons.pop(lane.lane.id, ("", None))
        swap = Swap(lane=lane.lane.id, model=model, left=left, because=because, seconds=seconds)
        logger.info("%s: %s is loaded in %.1f s: %s", swap.lane, model, seconds, because)
        self._on_swap(swap)

    # Acting

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Place models until cancelled."""
        task_status.started()
        while not self._is_closing:
            changed = self._changed.next  # what follows changes states itself
            look = self._place()
            with anyio.move_on_after(None if look is None else max(0.0, look - time.monotonic())):
                await changed.wait()

    def close(self) -> None:
        """Load nothing more."""
        self._is_closing = True
        self._changed.notify()

    def _place(self) -> float | None:
        """Do what is to be done; return when to look again though nothing happens."""
        now = time.monotonic()
        models = self._demand(now)
        views = [lane.view(now, is_changed=self._is_changed(lane.current)) for lane in self.lanes]
        for action in self._placement.decide(views, models, now):
            self._act(action)
        for lane in self.lanes:
            self._go_on(lane)
        views = [lane.view(now, is_changed=self._is_changed(lane.current)) for lane in self.lanes]
        looks = [self._placement.next_look(views, models, now)]
        looks += [min((until for lane in self.lanes for until in lane.barred.values() if until > now), default=None)]
        known = [look for look in looks if look is not None and look != FOR_EVER]
        return min(known, default=None)

    def _demand(self, now: float) -> list[ModelDemand]:
        there = {lane.next or lane.resident for lane in self.lanes}
        demands = []
        for name, spec in self._specs.items():
            waiting = self._waiting.get(name, Waiting())
            if not waiting.count or name in there:
                self._unserved_since.pop(name, None)
            else:
                self._unserved_since.setdefault(name, now)
            demands.append(
                ModelDemand(
                    name=name,
                    need_mib=spec.need_mib,
                    is_pinned=spec.pin,
                    keep_s=spec.keep_s,
                    waiting=waiting.count,
                    first=waiting.first,
                    waits_since=self._unserved_since.get(name),
                    heat=self._heat.of(name),
                    hint=self.hints.get(name),
                )
            )
        return demands

    def _act(self, action: PlacementAction) -> None:
        lane = self._lanes[action.lane]
        match action:
            case AssignLane():
                lane.next = action.model
                self._reasons[action.lane] = action.because, lane.resident
                for leaving in action.leaving:
                    self._lanes[leaving].current.drain_nowait(f"{action.model} wants its place", Hold.SWAP)
            case LeaveLane():
                lane.current.drain_nowait(action.because, Hold.SWAP)
            case LoadModel():
                self._load(lane, action.model)

    def _load(self, lane: LaneWorkers, model: str) -> None:
        after = lane.current.incarnation
        lane.current, lane.next = lane.workers[model], None
        lane.loading_since = time.monotonic()
        because, left = self._reasons.get(lane.lane.id, ("a turn of it waits", None))
        logger.info("%s: loading %s%s: %s", lane.lane.id, model, f" in place of {left}" if left else "", because)
        lane.current.start_nowait(f"{model}: {because}", after=after)

    def _go_on(self, lane: LaneWorkers) -> None:
        """End the engine of a lane that is being left, once no turn is on it."""
        worker = lane.current
        if lane.phase is LanePhase.READY and lane.next is not None:  # an operator has started it again meanwhile
            worker.drain_nowait(f"{lane.next} wants its place", Hold.SWAP)
        is_draining = worker.state is WorkerState.DRAINING and Hold.SWAP in worker.holds
        is_left = is_draining and not worker.slots_in_use and worker.holds.isdisjoint(PASSING)  # else it is worked on
        has_given_up = worker.state is WorkerState.FAILED
        if has_given_up:
            worker.stop_nowait(worker.because)  # the cause is what its turns are told
        elif is_left or (lane.phase is LanePhase.BROKEN and lane.next is not None):
            worker.stop_nowait(f"{lane.next} wants its place" if lane.next else "its lane is left")

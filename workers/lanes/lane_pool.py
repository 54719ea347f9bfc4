"""Carries out the placement: loads models on lanes when turns want them, and makes others leave."""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import anyio
from anyio.abc import TaskStatus

from workers.devices.device_health import LOOK_S, DeviceHealth
from workers.engine.start_gate import StartGate
from workers.lanes.lane_workers import LaneWorkers
from workers.lanes.memory_use import MemoryUse
from workers.lanes.sleep import Sleep, can_sleep, is_as_wanted
from workers.lanes.swap_log import Swap, SwapLog
from workers.log_context import line_about
from workers.notifier import Notifier
from workers.policy.lane_life import LanePhase, LaneStep, load_step, next_step
from workers.policy.placement import (
    AssignLane,
    Heat,
    LaneView,
    LeaveLane,
    LoadModel,
    ModelDemand,
    Placement,
    PlacementAction,
    SwapRule,
    Waiting,
)
from workers.spec import WorkerSpec
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

logger = logging.getLogger(__name__)


class LaneSet:
    """All lanes of a machine, and the models that may use them; ``health`` watches the devices that can be watched."""

    def __init__(self, health: DeviceHealth | None = None) -> None:
        self.health = health
        self._lanes: dict[str, LaneWorkers] = {}
        self.specs: dict[str, WorkerSpec] = {}  # by model
        self.rooms: dict[str, int | None] = {}  # MiB that the lanes of each device may fill together

    def __repr__(self) -> str:
        return f"<LaneSet {list(self)}>"

    def __iter__(self) -> Iterator[LaneWorkers]:
        """Iterate over the lanes, device by device."""
        return iter(self._lanes.values())

    def __getitem__(self, lane_id: str) -> LaneWorkers:
        return self._lanes[lane_id]

    def get(self, lane_id: str) -> LaneWorkers | None:
        """Return the lane of that id, which is also its workers', if there is one."""
        return self._lanes.get(lane_id)

    def add(self, workers: Iterable[SupervisedWorker]) -> None:
        """Add the workers of a model, one for each lane that it may use; their owner runs them."""
        for worker in workers:
            lane = self._lanes.setdefault(worker.spec.id, LaneWorkers(worker, self.health))
            lane.workers[worker.spec.name] = worker
            self.specs[worker.spec.name] = worker.spec
            self.rooms[lane.lane.device.uuid] = lane.lane.device.room_mib

    def forgive(self, lane_id: str) -> None:
        """Use the marked device of a lane again: an operator has dealt with it."""
        lane = self.get(lane_id)
        if lane is not None and self.health is not None:
            self.health.forgive(lane.lane.device)

    @property
    def models(self) -> Collection[str]:
        """The models that use lanes."""
        return self.specs.keys()

    def has_room(self, model: str) -> bool:
        """Whether a lane could hold a model now."""
        return any(lane.is_open_to(model) for lane in self)

    def slots_on_demand(self, model: str) -> int:
        """Count the slots that a model would have if it were loaded now."""
        return self.specs[model].slots if model in self.specs and self.has_room(model) else 0

    def is_lost(self, model: str) -> bool:
        """Whether a model has given up for good on every lane that could hold it."""
        able = [lane for lane in self if lane.may_hold(model)]
        # If all are pinned to other models it has failed nowhere: it waits, and is not lost.
        free = [lane for lane in able if not lane.is_kept_from(model)] or able
        return all(lane.barred.get(model) == math.inf for lane in free)

    def trouble_of(self, model: str) -> str:
        """Return why turns of an unloaded model wait."""
        if not self.has_room(model):
            failed = [lane for lane in self if model in lane.barred or lane.mark is not None]
            causes = "; ".join(
                f"{lane.lane.id}: {lane.mark or lane.workers[model].supervisor.because}"
                for lane in failed
                if model in lane.workers
            )
            return f"{model} has failed on every lane that could hold it: {causes}"
        coming = [lane for lane in self if model in {lane.next, lane.resident}]
        if coming:
            lane = coming[0]
            if lane.next == model:
                return f"{lane.lane.id} is kept for it: {lane.resident or 'nothing'} leaves first"
            return f"{lane.lane.id} is {lane.current.now.state}: {lane.current.supervisor.because}"
        residents = ", ".join(f"{lane.lane.id} has {lane.resident or 'none'}" for lane in self)
        return f"a lane: {residents}"

    def unsettled(self) -> str | None:
        """Return which lane is changing its model, None if none is."""
        return next((f"{each.lane.id} is changing its model" for each in self if each.is_changing), None)


class LaneDemand:
    """The demand for each model of the lanes: its waiting turns, operators' requests, and its use until now."""

    def __init__(self) -> None:
        self.hints: dict[str, str] = {}  # model to the lane that it is loaded on first
        self.waiting: Mapping[str, Waiting] = {}
        self.asked: set[str] = set()  # models that an operator wants loaded
        self.heat = Heat()
        self._unserved_since: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<LaneDemand {dict(self.waiting)} asked={self.asked}>"

    def of_models(self, lanes: LaneSet, need_mib: Callable[[WorkerSpec], int | None], now: float) -> list[ModelDemand]:
        """Return it in the form that placement decisions use; a request of an operator ends when the model comes."""
        there = {lane.next or lane.resident for lane in lanes}
        self.asked -= {name for name in self.asked if any(lane.stays_with(name) for lane in lanes)}
        demands = []
        for name, spec in lanes.specs.items():
            waiting = self.waiting.get(name, Waiting())
            if name in self.asked and not waiting.count:
                waiting = Waiting(count=1, is_asked=True)
            if not waiting.count or name in there:
                self._unserved_since.pop(name, None)
            else:
                self._unserved_since.setdefault(name, now)
            demands.append(
                ModelDemand(
                    name=name,
                    need_mib=need_mib(spec),
                    is_pinned=spec.pin,
                    keep_s=spec.keep_s,
                    waiting=waiting.count,
                    first=waiting.first,
                    is_full=waiting.is_full,
                    is_asked=waiting.is_asked,
                    waits_since=self._unserved_since.get(name),
                    heat=self.heat.of_model(name),
                    hint=self.hints.get(name),
                )
            )
        return demands


class LanePool:
    """Loads models on the lanes of a machine; nothing else starts or ends engines there. ``run`` must be running.

    ``is_changed`` says that an engine is needed though it has no turn, for example while its weights are written.
    """

    def __init__(
        self,
        lanes: LaneSet,
        rule: SwapRule = SwapRule.FAIR,
        on_swap: Callable[[Swap], None] = lambda _swap: None,
        is_changed: Callable[[SupervisedWorker], bool] = lambda _worker: False,
    ) -> None:
        self.lanes = lanes
        self.memory_use = MemoryUse(lanes.health) if lanes.health is not None else None
        self.demand = LaneDemand()
        self.swaps = SwapLog(on_swap)
        self._is_changed = is_changed
        self._placement = Placement(lanes.rooms, rule)
        self._sleep: Sleep | None = None  # while it runs
        self._adopted: list[SupervisedWorker] = []
        self._changed = Notifier()
        self._is_closing = False
        if lanes.health is not None:
            lanes.health.on_mark = self._changed.notify

    def __repr__(self) -> str:
        return f"<LanePool {self.lanes}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the present or last worker of each lane."""
        return (lane.current for lane in self.lanes)

    def add(self, workers: Iterable[SupervisedWorker]) -> None:
        """Add the workers of a model to the lanes."""
        self.lanes.add(workers)
        self._changed.notify()

    def follow(self, rule: SwapRule) -> None:
        """Use another placement rule from now on."""
        self._placement.rule = rule
        self._changed.notify()

    def adopt(self, worker: SupervisedWorker) -> None:
        """Adopt a worker whose engine already runs on its lane; ``run`` starts it."""
        self.lanes[worker.spec.id].adopt(worker)
        self._adopted.append(worker)

    # Requests of operators

    def load(self, model: str) -> None:
        """Load a model as if a turn waited for it, after models with waiting turns."""
        self.demand.asked.add(model)
        self._changed.notify()

    def unload(self, model: str, because: str) -> None:
        """Make a model leave its lanes after its turns; waiting turns load it again."""
        self.demand.asked.discard(model)
        for lane in self.lanes:
            if lane.resident == model:
                lane.current.drain_nowait(because, Hold.SWAP)
        self._changed.notify()

    # Events

    def note_waiting(self, waiting: Mapping[str, Waiting]) -> None:
        """Update the waiting turns of each model of the lanes, after every start and end of a turn."""
        uses = [lane.note_use() for lane in self.lanes]
        if any(uses) or waiting != self.demand.waiting:
            self.demand.waiting = dict(waiting)
            self._changed.notify()

    def note_start(self, worker_id: str, model: str) -> None:
        """Record the start of a model's turn on a lane."""
        lane = self.lanes.get(worker_id)
        if lane is not None:
            lane.used_at = time.monotonic()
            self.demand.heat.note(model)

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a change of state of a lane's worker."""
        lane = self.lanes.get(worker.spec.id)
        has_ended = worker.now.is_coming or worker.now.state is WorkerState.FAILED
        if lane is not None and Hold.ASLEEP in worker.now.holds and has_ended:
            worker.stop_nowait("its engine has ended while it slept")  # it is loaded when turns want it
            return
        if lane is None or lane.current is not worker:
            return
        if worker.now.state is WorkerState.READY:
            lane.barred.pop(worker.spec.name, None)
            if lane.loading_since:
                self.swaps.add(lane)
        if worker.now.state is WorkerState.FAILED:
            retry_s = worker.spec.restart.retry_s
            lane.barred[worker.spec.name] = math.inf if retry_s is None else time.monotonic() + retry_s
        self._changed.notify()

    # Acting

    async def run(
        self, gate: StartGate | None = None, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Place models until cancelled; workers start through ``gate``."""
        for worker in self._adopted:
            worker.start_nowait("its engine is there already")
        async with anyio.create_task_group() as tasks:
            self._sleep = Sleep(tasks, gate or StartGate(), os.environ, self.lanes.health, self._changed.notify)
            task_status.started()
            while not self._is_closing:
                changed = self._changed.next  # the steps below change states themselves
                look = self._place()
                with anyio.move_on_after(None if look is None else max(0.0, look - time.monotonic())):
                    await changed.wait()
            tasks.cancel_scope.cancel()

    async def look_after_devices(self) -> None:
        """Watch the devices, and the memory that engines use, until cancelled."""
        if self.lanes.health is None or self.memory_use is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.lanes.health.run)
            while True:
                await self.memory_use.refresh(self.lanes)
                await anyio.sleep(LOOK_S)

    async def wait_change(self) -> None:
        """Return after the next change of a lane or of the demand for one."""
        await self._changed.wait()

    def close(self) -> None:
        """Load no more models."""
        self._is_closing = True
        self._changed.notify()

    def _place(self) -> float | None:
        """Carry out the due actions; return when to look again if nothing happens."""
        now = time.monotonic()
        models = self.demand.of_models(self.lanes, self._need_mib, now)
        for action in self._placement.decide(self._views(now), models, now):
            self._act(action)
        for lane in self.lanes:
            self._go_on(lane)
        looks = [self._placement.next_look(self._views(now), models, now)]
        looks += [until for lane in self.lanes for until in lane.barred.values() if now < until < math.inf]
        return min((look for look in looks if look is not None), default=None)

    def _views(self, now: float) -> list[LaneView]:
        return [lane.view(now, is_changed=self._is_changed(lane.current)) for lane in self.lanes]

    def _need_mib(self, spec: WorkerSpec) -> int | None:
        return spec.need_mib if self.memory_use is None else self.memory_use.need_mib(spec)

    def _act(self, action: PlacementAction) -> None:
        lane = self.lanes[action.lane]
        match action:
            case AssignLane():
                lane.next = action.model
                lane.reason = action.because, lane.resident
                for leaving in action.leaving:
                    self.lanes[leaving].current.drain_nowait(f"{action.model} wants its place", Hold.SWAP)
            case LeaveLane():
                lane.current.drain_nowait(action.because, Hold.SWAP)
            case LoadModel():
                self._load(lane, action.model)

    def _load(self, lane: LaneWorkers, model: str) -> None:
        after = max(worker.now.incarnation for worker in lane)  # a sleeping engine has kept its number
        lane.current, lane.next = lane.workers[model], None
        lane.loading_since = time.monotonic()
        because, left = lane.reason or ("a turn of it waits", None)
        loading = f"{model} in place of {left}" if left else model
        line = line_about({"worker": lane.lane.id})
        logger.info("%s: loading %s: %s", lane.lane.id, loading, because, extra=line)
        match load_step(lane.engine, is_as_wanted=is_as_wanted(lane.current)):
            case LaneStep.WAKE:
                assert self._sleep is not None  # noqa: S101 - the pool runs
                self._sleep.wake_nowait(lane)
            case LaneStep.RESTART:  # its weights or adapters are no longer the model's
                lane.current.stop_nowait(f"{model} was changed while it slept")
                lane.current.start_nowait(f"{model}: {because}", after=after)
            case _:
                lane.current.start_nowait(f"{model}: {because}", after=after)

    def _go_on(self, lane: LaneWorkers) -> None:
        """Take the next step with the engine of a lane."""
        worker, because = lane.current, lane.left_because
        step = _next_step(lane)
        if step is LaneStep.DRAIN:
            worker.drain_nowait(because, Hold.SWAP)
            step = _next_step(lane)
        if step is LaneStep.SLEEP:
            assert self._sleep is not None  # noqa: S101 - the pool runs
            self._sleep.lull_nowait(lane)
        elif step is LaneStep.END and worker.now.state is WorkerState.FAILED:
            worker.stop_nowait(worker.supervisor.because)  # its turns get the cause
        elif step is LaneStep.END:
            is_broken = lane.phase is LanePhase.BROKEN
            worker.stop_nowait(lane.mark if lane.mark is not None and is_broken else because)


def _next_step(lane: LaneWorkers) -> LaneStep | None:
    return next_step(
        lane.engine,
        is_wanted=lane.next is not None,
        is_left_alone=lane.mark is not None,
        can_sleep=lambda: can_sleep(lane.current.spec),
    )

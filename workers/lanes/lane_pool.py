"""Carries out the placement: loads models on lanes when turns want them, and makes others leave."""

import logging
import os
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus
from msgspec.structs import replace

from workers.devices.device_health import LOOK_S, DeviceHealth
from workers.engine.start_gate import StartGate
from workers.lanes.lane_workers import LaneWorkers
from workers.lanes.memory_use import MemoryUse
from workers.lanes.sleep import Sleep, can_sleep, is_as_wanted, is_asleep
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

FOR_EVER: Final = float("inf")
logger = logging.getLogger(__name__)


class LanePool:
    """The lanes of a machine; nothing else starts or ends engines on them. ``run`` must be running.

    ``is_changed`` says that an engine is needed though it has no turn, for example while its weights are written.
    ``health`` watches the devices that can be watched.
    """

    def __init__(
        self,
        rule: SwapRule = SwapRule.FAIR,
        on_swap: Callable[[Swap], None] = lambda _swap: None,
        is_changed: Callable[[SupervisedWorker], bool] = lambda _worker: False,
        health: DeviceHealth | None = None,
    ) -> None:
        self.health = health
        if health is not None:
            health.on_mark = lambda: self._changed.notify()  # noqa: PLW0108 - it does not exist yet
        self.memory_use = MemoryUse(health) if health is not None else None
        self._is_changed = is_changed
        self._lanes: dict[str, LaneWorkers] = {}
        self.hints: dict[str, str] = {}  # model to the lane that it is loaded on first
        self._specs: dict[str, WorkerSpec] = {}
        self._rooms: dict[str, int | None] = {}
        self._placement = Placement(self._rooms, rule)
        self._waiting: dict[str, Waiting] = {}
        self._asked: set[str] = set()  # models that an operator wants loaded
        self._in_use: list[int] = []
        self._unserved_since: dict[str, float] = {}
        self._reasons: dict[str, tuple[str, str | None]] = {}  # per lane: why a model comes, and which leaves for it
        self._heat = Heat()
        self._sleep: Sleep | None = None  # while it runs
        self._tasks: TaskGroup | None = None
        self._adopted: list[SupervisedWorker] = []
        self.swaps = SwapLog(on_swap)
        self._changed = Notifier()
        self._is_closing = False

    def __repr__(self) -> str:
        return f"<LanePool {list(self.lanes)}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the present or last worker of each lane."""
        return (lane.current for lane in self.lanes)

    def add(self, workers: Iterable[SupervisedWorker]) -> None:
        """Add the workers of a model, one for each lane that it may use; their owner runs them."""
        for worker in workers:
            lane = self._lanes.setdefault(worker.spec.id, LaneWorkers(worker))
            lane.workers[worker.spec.name] = worker
            self._specs[worker.spec.name] = worker.spec
        self._rooms |= {lane.lane.device.uuid: lane.lane.device.room_mib for lane in self.lanes}
        self._changed.notify()

    def follow(self, rule: SwapRule) -> None:
        """Use another placement rule from now on."""
        self._placement.rule = rule
        self._changed.notify()

    @property
    def lanes(self) -> Collection[LaneWorkers]:
        """All lanes, device by device."""
        return self._lanes.values()

    @property
    def models(self) -> Collection[str]:
        """The models that use lanes."""
        return self._specs.keys()

    def find(self, worker_id: str) -> LaneWorkers | None:
        """Return the lane with a worker's id."""
        return self._lanes.get(worker_id)

    def slots_of(self, model: str) -> int:
        """Count the slots of a model on one lane."""
        return self._specs[model].slots

    def is_lost(self, model: str) -> bool:
        """Whether a model has given up for good on every lane that could hold it."""
        able = [lane for lane in self.lanes if lane.may_hold(model)]
        # If all are pinned to other models it has failed nowhere: it waits, and is not lost.
        free = [lane for lane in able if not lane.is_kept_from(model)] or able
        return all(lane.barred.get(model) == FOR_EVER for lane in free)

    def has_room(self, model: str) -> bool:
        """Whether a lane could hold a model now."""
        now = time.monotonic()
        free = [lane for lane in self.lanes if lane.may_hold(model) and not lane.is_kept_from(model)]
        return any(lane.barred.get(model, 0.0) <= now and self.mark_of(lane) is None for lane in free)

    def mark_of(self, lane: LaneWorkers) -> str | None:
        """Return why the device of a lane gets no engines; None if it does."""
        mark = self.health.mark_of(lane.lane.device) if self.health is not None else None
        return None if mark is None else f"{lane.lane.device.uuid} is left alone: {mark.because}"

    def forgive(self, worker_id: str) -> None:
        """Use the marked device of a lane again: an operator has dealt with it."""
        lane = self.find(worker_id)
        if lane is not None and self.health is not None:
            self.health.forgive(lane.lane.device)

    def trouble_of(self, model: str) -> str:
        """Return why turns of an unloaded model wait."""
        if not self.has_room(model):
            failed = [lane for lane in self.lanes if model in lane.barred or self.mark_of(lane) is not None]
            causes = "; ".join(
                f"{lane.lane.id}: {self.mark_of(lane) or lane.workers[model].supervisor.because}"
                for lane in failed
                if model in lane.workers
            )
            return f"{model} has failed on every lane that could hold it: {causes}"
        coming = [lane for lane in self.lanes if model in {lane.next, lane.resident}]
        if coming:
            lane = coming[0]
            if lane.next == model:
                return f"{lane.lane.id} is kept for it: {lane.resident or 'nothing'} leaves first"
            return f"{lane.lane.id} is {lane.current.now.state}: {lane.current.supervisor.because}"
        residents = ", ".join(f"{lane.lane.id} has {lane.resident or 'none'}" for lane in self.lanes)
        return f"a lane: {residents}"

    def adopt(self, worker: SupervisedWorker) -> None:
        """Adopt a worker whose engine already runs on its lane."""
        self._lanes[worker.spec.id].adopt(worker)
        self._adopted.append(worker)

    def start_adopted_nowait(self) -> None:
        """Start the workers with adopted engines; once."""
        for worker in self._adopted:
            worker.start_nowait("its engine is there already")

    def unsettled(self) -> str | None:
        """Return which lane is changing its model, None if none is."""
        return next((f"{each.lane.id} is changing its model" for each in self.lanes if each.is_changing), None)

    # Requests of operators

    def load(self, model: str) -> None:
        """Load a model as if a turn waited for it, after models with waiting turns."""
        self._asked.add(model)
        self._changed.notify()

    def unload(self, model: str, because: str) -> None:
        """Make a model leave its lanes after its turns; waiting turns load it again."""
        self._asked.discard(model)
        for lane in self.lanes:
            if lane.resident == model:
                lane.current.drain_nowait(because, Hold.SWAP)
        self._changed.notify()

    # Events

    def note_waiting(self, waiting: Mapping[str, Waiting]) -> None:
        """Update the waiting turns of each model of the lanes, after every start and end of a turn."""
        in_use = [lane.current.slots.in_use for lane in self.lanes]
        if (waiting, in_use) == (self._waiting, self._in_use):
            return
        for lane, before, now in zip(self.lanes, self._in_use, in_use, strict=False):  # lanes may have been added
            if before and not now:
                lane.idle_since = time.monotonic()
        self._waiting, self._in_use = dict(waiting), in_use
        self._changed.notify()

    def note_start(self, worker_id: str, model: str) -> None:
        """Record the start of a model's turn on a lane."""
        lane = self.find(worker_id)
        if lane is not None:
            lane.used_at = time.monotonic()
            self._heat.note(model)

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a change of state of a lane's worker."""
        lane = self.find(worker.spec.id)
        has_ended = worker.now.is_coming or worker.now.state is WorkerState.FAILED
        if lane is not None and Hold.ASLEEP in worker.now.holds and has_ended:
            worker.stop_nowait("its engine has ended while it slept")  # it is loaded when turns want it
            return
        if lane is None or lane.current is not worker:
            return
        if worker.now.state is WorkerState.READY:
            lane.barred.pop(worker.spec.name, None)
            if lane.loading_since:
                because, left = self._reasons.pop(lane.lane.id, ("", None))
                self.swaps.add(lane, because, left)
        if worker.now.state is WorkerState.FAILED:
            retry_s = worker.spec.restart.retry_s
            until = FOR_EVER if retry_s is None else time.monotonic() + retry_s
            lane.barred[worker.spec.name] = until
        self._changed.notify()

    # Acting

    async def run(
        self, gate: StartGate | None = None, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Place models until cancelled; workers start through ``gate``."""
        self._sleep = Sleep(gate or StartGate(), os.environ, self.health)
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            while not self._is_closing:
                changed = self._changed.next  # the steps below change states themselves
                look = self._place()
                with anyio.move_on_after(None if look is None else max(0.0, look - time.monotonic())):
                    await changed.wait()
            self._tasks.cancel_scope.cancel()

    async def look_after_devices(self) -> None:
        """Watch the devices, and the memory that engines use, until cancelled."""
        if self.health is None or self.memory_use is None:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.health.run)
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
        models = self._demand(now)
        views = [self._view(lane, now) for lane in self.lanes]
        for action in self._placement.decide(views, models, now):
            self._act(action)
        for lane in self.lanes:
            self._go_on(lane)
        views = [self._view(lane, now) for lane in self.lanes]
        looks = [self._placement.next_look(views, models, now)]
        looks += [min((until for lane in self.lanes for until in lane.barred.values() if until > now), default=None)]
        known = [look for look in looks if look is not None and look != FOR_EVER]
        return min(known, default=None)

    def _view(self, lane: LaneWorkers, now: float) -> LaneView:
        view = lane.view(now, is_changed=self._is_changed(lane.current))
        return view if self.mark_of(lane) is None else replace(view, is_held=True)

    def _demand(self, now: float) -> list[ModelDemand]:
        there = {lane.next or lane.resident for lane in self.lanes}
        demands = []
        for name, spec in self._specs.items():
            waiting = self._waiting.get(name, Waiting())
            if any(
                lane.next == name or (lane.resident == name and lane.phase is not LanePhase.LEAVING)
                for lane in self.lanes
            ):
                self._asked.discard(name)
            elif name in self._asked and not waiting.count:
                waiting = Waiting(count=1, is_asked=True)
            if not waiting.count or name in there:
                self._unserved_since.pop(name, None)
            else:
                self._unserved_since.setdefault(name, now)
            demands.append(
                ModelDemand(
                    name=name,
                    need_mib=spec.need_mib if self.memory_use is None else self.memory_use.need_mib(spec),
                    is_pinned=spec.pin,
                    keep_s=spec.keep_s,
                    waiting=waiting.count,
                    first=waiting.first,
                    is_full=waiting.is_full,
                    is_asked=waiting.is_asked,
                    waits_since=self._unserved_since.get(name),
                    heat=self._heat.of_model(name),
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
        after = max(worker.now.incarnation for worker in lane)  # a sleeping engine has kept its number
        lane.current, lane.next = lane.workers[model], None
        lane.loading_since = time.monotonic()
        because, left = self._reasons.get(lane.lane.id, ("a turn of it waits", None))
        loading = f"{model} in place of {left}" if left else model
        line = line_about({"worker": lane.lane.id})
        logger.info("%s: loading %s: %s", lane.lane.id, loading, because, extra=line)
        match load_step(lane.engine, is_as_wanted=is_as_wanted(lane.current)):
            case LaneStep.WAKE:
                self._turn(lane, self._wake)
            case LaneStep.RESTART:  # its weights or adapters are no longer the model's
                lane.current.stop_nowait(f"{model} was changed while it slept")
                lane.current.start_nowait(f"{model}: {because}", after=after)
            case _:
                lane.current.start_nowait(f"{model}: {because}", after=after)

    def _turn(
        self, lane: LaneWorkers, how: Callable[[LaneWorkers, SupervisedWorker], Coroutine[object, object, None]]
    ) -> None:
        """Put the engine of a lane to sleep, or wake it."""
        assert self._tasks is not None  # noqa: S101 - the pool runs
        lane.turning = lane.current
        self._tasks.start_soon(how, lane, lane.current)

    async def _wake(self, lane: LaneWorkers, worker: SupervisedWorker) -> None:
        assert self._sleep is not None  # noqa: S101 - the pool runs
        is_awake = await self._sleep.wake(worker)
        lane.end_turning(worker)
        if is_awake and is_as_wanted(worker):
            worker.resume_nowait(f"{worker.spec.name} has woken", Hold.ASLEEP)
        elif is_asleep(worker):  # it is started again if its turns still wait
            worker.stop_nowait(f"{worker.spec.name} {'was changed while it woke' if is_awake else 'did not wake'}")
        self._changed.notify()

    async def _lull(self, lane: LaneWorkers, worker: SupervisedWorker) -> None:
        assert self._sleep is not None  # noqa: S101 - the pool runs
        because = f"{lane.next} wants its place" if lane.next else "its lane is left"
        worker.drain_nowait(because, Hold.ASLEEP)  # from here on no other request reaches it
        is_sleeping = await self._sleep.put(worker)
        lane.end_turning(worker)
        if is_sleeping:  # else its lane continues with its end
            worker.resume_nowait(because, Hold.SWAP)
        self._changed.notify()

    def _go_on(self, lane: LaneWorkers) -> None:
        """Take the next step with the engine of a lane."""
        worker, mark = lane.current, self.mark_of(lane)
        because = f"{lane.next} wants its place" if lane.next else "its lane is left"
        step = self._next_step(lane, mark)
        if step is LaneStep.DRAIN:
            worker.drain_nowait(because, Hold.SWAP)
            step = self._next_step(lane, mark)
        if step is LaneStep.SLEEP:
            self._turn(lane, self._lull)
        elif step is LaneStep.END and worker.now.state is WorkerState.FAILED:
            worker.stop_nowait(worker.supervisor.because)  # its turns get the cause
        elif step is LaneStep.END:
            worker.stop_nowait(mark if mark is not None and lane.phase is LanePhase.BROKEN else because)

    @staticmethod
    def _next_step(lane: LaneWorkers, mark: str | None) -> LaneStep | None:
        return next_step(
            lane.engine,
            is_wanted=lane.next is not None,
            is_left_alone=mark is not None,
            can_sleep=lambda: can_sleep(lane.current.spec),
        )

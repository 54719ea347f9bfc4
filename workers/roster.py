"""The workers of fixed models: the present ones, the wanted ones, and the steps between."""

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import anyio
from anyio.abc import TaskGroup, TaskStatus

from workers.engine.start_gate import StartGate
from workers.members import RosterMember, WantedReplicas, families, first_members, is_in_excess, on_devices
from workers.notifier import Notifier
from workers.policy.roll import (
    REPLACED,
    REPLACED_S,
    Join,
    Leave,
    LeaveReason,
    Replacements,
    ReplicaView,
    decide,
    steps_left,
)
from workers.process.registry import ProcessRegistry
from workers.spare_engines import SpareEngines
from workers.spec import WorkerId, WorkerSpec
from workers.states import HELD, Hold
from workers.supervised import SupervisedWorker
from workers.upkeep import ModelUpkeep

Supervise = Callable[..., Coroutine[object, object, None]]
STUCK_S: Final = 10.0  # between two tries to end processes that do not die
LEFT_ALONE: Final = (
    f"replaced {REPLACED} times within {REPLACED_S:g} s though its settings are the same, which is a defect of"
    " Roundhouse; it is left alone until they change or it is restarted by hand"
)
UNLOADED: Final = "unloaded by an operator"
logger = logging.getLogger(__name__)


class Roster:
    """Owns the workers of fixed models and their tasks, not those on lanes; nothing happens unless ``run`` is running.

    ``make`` returns a worker for a specification, ``look_after`` the shared upkeep of a model's engines. ``others_on``
    counts the engines per device, by UUID, that are not the roster's.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        make: Callable[[WorkerSpec], SupervisedWorker],
        look_after: Callable[[Sequence[SupervisedWorker]], ModelUpkeep],
        others_on: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._make = make
        self._others_on = others_on
        self._look_after = look_after
        self.wanted = WantedReplicas(specs)
        self.upkeep: dict[str, ModelUpkeep] = {}  # only wanted models
        self._members = first_members(self.wanted, make, look_after, others_on, self.upkeep)
        self._last_engine: dict[WorkerId, int] = {}  # last engine numbers of workers that have left
        self._drained: dict[WorkerId, str] = {}  # drained by an operator before they were replaced
        # With their models: an operator unloaded them, and no engine is started until an operator asks for it.
        self.unloaded: dict[WorkerId, str] = {}
        self._tasks: TaskGroup | None = None  # while it runs
        self._replacements = Replacements()
        self._changed = Notifier()
        self._is_closed = False

        self._spares = SpareEngines(
            lambda: families(self.wanted, self._members.values(), self.unloaded),
            self._start,
            self._changed,
            has_lanes=bool(others_on),
        )

    def __repr__(self) -> str:
        return f"<Roster {list(self._members)} of {self.wanted!r}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the workers in the configuration's order; those of removed models come last."""
        places = {model: place for place, model in enumerate(self.wanted.by_model)}
        order = sorted(self._members.values(), key=lambda each: (places.get(each.spec.name, len(places)), each.number))
        return iter([member.worker for member in order])

    def get(self, worker_id: str) -> SupervisedWorker | None:
        """Return the worker of that id, if there is one."""
        member = self._members.get(WorkerId(worker_id))
        return None if member is None else member.worker

    def workers_of(self, model: str) -> list[SupervisedWorker]:
        """Return the workers of a model that are not leaving."""
        return [each.worker for each in self._members.values() if each.worker.spec.name == model and not each.leaves]

    def want(self, specs: Sequence[WorkerSpec]) -> None:
        """Set the wanted workers; they come and leave one at a time, after their turns in flight end.

        Workers differ only by model, so the emptiest leaves first.
        """
        self.wanted = WantedReplicas(specs)
        self.unloaded = {worker: model for worker, model in self.unloaded.items() if model in self.wanted.by_model}
        self._changed.notify()

    def keep_unloaded(self, worker_ids: Collection[str]) -> None:
        """Leave workers without an engine that were unloaded when an earlier program of this process ended."""
        self.unloaded |= {worker.spec.id: worker.spec.name for worker in self if worker.spec.id in worker_ids}

    def forgive(self, worker_id: str) -> bool:
        """Let a worker that was left alone be replaced again, for an operator; return whether it was unloaded."""
        member = self._members.get(WorkerId(worker_id))
        if member is None:
            return False
        self._drained.pop(member.spec.id, None)  # its replacement is not drained either
        self._replacements.forgive(member.spec.id)
        member.worker.supervisor.remark = None
        self._changed.notify()
        return self.unloaded.pop(member.spec.id, None) is not None

    def start_again(self, model: str) -> None:
        """Start a model's engines again, also those of workers that come later."""
        self.unloaded = {worker: name for worker, name in self.unloaded.items() if name != model}
        for member in [each for each in self._members.values() if each.worker.spec.name == model]:
            self.forgive(member.spec.id)
            if member.leaves is None:  # else its replacement is started; spares follow the others
                member.worker.resume_nowait("an operator asked to load it", starts=not member.is_spare)

    @property
    def unloaded_models(self) -> frozenset[str]:
        """The models whose workers all wait for an operator before they get an engine."""
        kept = {each.worker.spec.name for each in self._members.values() if each.spec.id not in self.unloaded}
        return frozenset(self.unloaded.values()) - kept

    def unload(self, model: str, because: str) -> None:
        """End a model's engines, each after its requests; none is started again until an operator asks."""
        for member in self._members.values():
            if member.worker.spec.name == model and member.spec.id not in self.unloaded:
                self.unloaded[member.spec.id] = model
                member.worker.drain_nowait(because)
                assert self._tasks is not None  # noqa: S101 - it runs
                self._tasks.start_soon(self._end_unloaded, member, because)

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a worker's change of state, without waiting."""
        member = self._members.get(worker.spec.id)
        if member is not None and member.worker is worker:
            member.upkeep.note_change(worker)
            self._changed.notify()

    @property
    def under_way(self) -> list[str]:
        """The steps left until the workers are the wanted ones, in words."""
        leaving = [f"{name} leaves: {each.leaves}" for name, each in self._members.items() if each.leaves]
        return [*leaving, *steps_left(self._views(), self.wanted.counts())]

    @property
    def is_leaving(self) -> bool:
        """Whether a worker is leaving."""
        return any(each.leaves is not None for each in self._members.values())

    async def wait_gone(self, model: str) -> None:
        """Return when every worker of a model that is not wanted has left."""

        def is_gone() -> bool:
            of_model = [each for each in self._members.values() if each.worker.spec.name == model]
            return not any(each.leaves or model not in self.wanted.by_model for each in of_model)

        await self._changed.wait_until(is_gone)

    # Acting

    async def run(
        self,
        registry: ProcessRegistry,
        gate: StartGate,
        *,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Start every worker, and keep the workers the wanted ones, until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            supervise = partial(RosterMember.supervise, registry=registry, gate=gate)
            for upkeep in self.upkeep.values():
                await tasks.start(upkeep.run)
            for member in self._members.values():
                await tasks.start(supervise, member)
            for member in self._members.values():
                if not member.is_spare or member.worker.now.is_adopting:
                    self._start(member.worker, "asked to start")
                member.is_there.set()
            task_status.started()
            tasks.start_soon(self._spares.run)
            while not self._is_closed:
                changed = self._changed.next  # the steps below change states themselves
                self._spares.assign()  # first: a spare that starts is waited for
                for step in decide(self._views(), self.wanted.counts()):
                    self._act(step, tasks, supervise)
                await changed.wait()

    def close(self) -> None:
        """Let no worker join or leave any more."""
        self._is_closed = True
        self._changed.notify()

    def _views(self) -> list[ReplicaView]:
        def view(each: RosterMember) -> ReplicaView:
            is_left_alone = self._replacements.leaves_alone(each.spec.id, each.spec)
            return each.view(self.wanted.spec(each.worker.spec.name, each.number), is_left_alone=is_left_alone)

        return [view(each) for each in self._members.values()]

    def _act(self, step: Leave | Join, tasks: TaskGroup, supervise: Supervise) -> None:
        match step:
            case Leave():
                those = (each for each in self._members.values() if each.spec.name == step.model)
                member = next(each for each in those if each.number == step.number)
                member.leaves = step.because
                if step.because is LeaveReason.CHANGED and member.spec == self.wanted.spec(step.model, step.number):
                    self._replacements.note(member.spec.id, member.spec, time.monotonic())
                tasks.start_soon(self._see_off, member)
            case Join():
                spec = self.wanted.spec(step.model, step.number)
                assert spec is not None  # noqa: S101 - it was decided on the same wanted workers
                if step.model in self.unloaded_models:  # new replicas of an unloaded model are unloaded too
                    self.unloaded[spec.id] = step.model
                worker = self._make(on_devices(spec, self, self._others_on))
                known = self.upkeep.get(step.model)
                is_new = known is None or not known.fits(spec)
                upkeep = self._look_after([worker]) if known is None or is_new else known
                self.upkeep[step.model] = upkeep
                member = RosterMember(worker, spec, step.number, upkeep)
                self._members[spec.id] = member
                if self._replacements.leaves_alone(spec.id, spec):
                    worker.supervisor.remark = LEFT_ALONE
                    logger.error("worker %s: %s", spec.id, LEFT_ALONE)
                tasks.start_soon(self._bring, member, is_new, tasks, supervise)

    async def _bring(self, member: RosterMember, is_new: bool, tasks: TaskGroup, supervise: Supervise) -> None:
        worker, upkeep = member.worker, member.upkeep
        logger.info("worker %s joins", worker.spec.id)
        if is_new:
            await tasks.start(upkeep.run)
        else:
            async with upkeep.lock:
                upkeep.add(worker)
        await tasks.start(supervise, member)
        if is_in_excess(member, self.wanted, self._members.values()):
            worker.drain_nowait(HELD[Hold.SPARE], Hold.SPARE)
        else:
            self._start(worker, "it is in the configuration")
        if worker.spec.id in self._drained:
            worker.drain_nowait(self._drained.pop(worker.spec.id))
        member.is_there.set()
        self._changed.notify()  # a spare may start now

    def _start(self, worker: SupervisedWorker, because: str) -> None:
        if worker.spec.id in self.unloaded:
            worker.drain_nowait(UNLOADED)
            worker.supervisor.remark = UNLOADED
            self._changed.notify()  # its state is the same, and the next step may follow
        else:
            # A caller that names an engine by number must not take this one for an earlier worker's.
            worker.start_nowait(because, after=self._last_engine.get(worker.spec.id, 0))

    async def _end_unloaded(self, member: RosterMember, because: str) -> None:
        worker = member.worker
        await member.wait_idle()
        if member.spec.id in self.unloaded:  # no operator has asked for it since
            worker.stop_nowait(because)

    async def _see_off(self, member: RosterMember) -> None:
        """Let a worker finish its turns, then end it."""
        worker, upkeep = member.worker, member.upkeep
        await member.is_there.wait()
        logger.info("worker %s leaves: %s", worker.spec.id, member.leaves)
        if Hold.OPERATOR in worker.now.holds and member.leaves == LeaveReason.CHANGED:
            self._drained[worker.spec.id] = worker.supervisor.because
        worker.drain_nowait(str(member.leaves), Hold.LEAVING)
        await member.wait_idle()
        async with upkeep.lock:
            await member.end_engine()
            self._last_engine[worker.spec.id] = worker.now.incarnation
            del self._members[worker.spec.id]
            upkeep.remove(worker)
        if member.scope is not None:
            member.scope.cancel()
        if upkeep.is_empty:
            upkeep.end()
            if self.upkeep.get(worker.spec.name) is upkeep:
                del self.upkeep[worker.spec.name]
        self._changed.notify()

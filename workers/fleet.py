"""All workers of one Roundhouse, by model."""

import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from workers.adapters.model_adapters import ModelAdapters
from workers.devices.device_health import DeviceHealth
from workers.engine.start_gate import StartGate
from workers.errors import StopTimedOut
from workers.handover import adopt, hold, launch_of, launch_of_held
from workers.health.recorder import Diary
from workers.lanes.lane_pool import LanePool, LaneSet
from workers.log_context import line_about, of_worker
from workers.policy.adoption import Adoption, plan_adoption
from workers.policy.placement import SwapRule
from workers.process.handed_over import HeldFleet
from workers.process.identity import ProcessId
from workers.process.orphans import end_children, end_orphans, patrol
from workers.process.registry import open_registry, run_id
from workers.roster import UNLOADED, Roster
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.states import WorkerState
from workers.supervised import SupervisedWorker
from workers.upkeep import ModelUpkeep
from workers.weights.model_weights import ModelWeights
from workers.weights.update_run import Observe

logger = logging.getLogger(__name__)


class Fleet:
    """The workers of a configuration, in its order."""

    def __init__(  # noqa: PLR0913 - what its workers are made with
        self,
        specs: Sequence[WorkerSpec],
        environment: Mapping[str, str],
        state_dir: Path | None = None,
        observe: Observe = lambda *_: None,
        *,
        tries_suspects: bool = False,
        count_pools: Callable[[], Mapping[str, int] | None] = lambda: None,
        swap_rule: SwapRule = SwapRule.FAIR,
        health: DeviceHealth | None = None,
    ) -> None:
        self._diaries: dict[WorkerId, Diary] = {}  # shared by all models of a lane, and by all workers of an id
        self._make = partial(
            SupervisedWorker,
            environment=environment,
            on_change=self._tell,
            tries_suspects=tries_suspects,
            count_pools=count_pools,
            health=health,
        )
        self._look_after = partial(ModelUpkeep, state_dir=state_dir, observe=observe)
        self._state_dir = state_dir
        lanes = {spec.lane.id: spec.lane.device.uuid for spec in specs if spec.lane is not None}
        fixed = [spec for spec in specs if spec.lane is None]
        self._roster = Roster(fixed, self._worker_of, self._look_after, Counter(lanes.values()))
        self._on_lanes = [self._worker_of(spec) for spec in specs if spec.lane is not None]
        self.lanes = LaneSet(health)
        self.lane_pool = LanePool(self.lanes, swap_rule, is_changed=self._is_changed)
        self.lane_pool.add(self._on_lanes)
        of_lanes: dict[str, list[SupervisedWorker]] = {}
        for worker in self._on_lanes:
            of_lanes.setdefault(worker.spec.name, []).append(worker)
        self._upkeep_of_lanes = {name: self._look_after(workers) for name, workers in of_lanes.items()}
        self._subscribers: list[Callable[[SupervisedWorker], None]] = []
        self._environment = environment

    def _worker_of(self, spec: WorkerSpec) -> SupervisedWorker:
        if spec.id not in self._diaries:
            self._diaries[spec.id] = Diary.of_worker(spec)
        return self._make(spec, diary=self._diaries[spec.id])

    def __repr__(self) -> str:
        return f"<Fleet {[(worker.spec.id, str(worker.now.state)) for worker in self]}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the workers of fixed models in the configuration's order, then over those on the lanes."""
        yield from self._roster
        yield from self.lane_pool

    @property
    def _all(self) -> list[SupervisedWorker]:
        return [*self._roster, *self._on_lanes]

    @property
    def _upkeep(self) -> Mapping[str, ModelUpkeep]:
        return {**self._roster.upkeep, **self._upkeep_of_lanes}

    @property
    def weights(self) -> Mapping[str, ModelWeights]:
        """The weights of each model whose weights can change."""
        return {name: each.weights for name, each in self._upkeep.items() if each.weights is not None}

    @property
    def adapters(self) -> Mapping[str, ModelAdapters]:
        """The adapters of each model that takes adapters here."""
        return {name: each.adapters for name, each in self._upkeep.items() if each.adapters is not None}

    def want(self, specs: Sequence[WorkerSpec]) -> None:
        """Set the wanted workers of fixed models; those on lanes stay.

        Workers come and leave one at a time, after their turns in flight end: ``under_way`` lists the steps left.
        """
        self._roster.want([spec for spec in specs if spec.lane is None])

    def forgive(self, worker_id: str) -> bool:
        """Let a worker that was left alone be replaced again, and its lane's device be used, on an operator's request.

        Returns whether it was unloaded.
        """
        self.lanes.forgive(worker_id)
        return self._roster.forgive(worker_id)

    def load(self, model: str) -> None:
        """Start a model's engines, or load it on a lane, on an operator's request."""
        if model in self.lanes.models:
            self.lane_pool.load(model)
        else:
            self._roster.start_again(model)

    @property
    def unloaded(self) -> frozenset[str]:
        """The fixed models that an operator has unloaded."""
        return self._roster.unloaded_models

    def unload(self, model: str) -> None:
        """End a model's engines, each after its requests.

        A fixed model stays unloaded until an operator asks for it; one on lanes comes back for the next turn that wants
        it.
        """
        if model in self.lanes.models:
            self.lane_pool.unload(model, UNLOADED)
        else:
            self._roster.unload(model, UNLOADED)

    async def wait_gone(self, model: str) -> None:
        """Return when every worker of a fixed model that is leaving has left."""
        await self._roster.wait_gone(model)

    @property
    def under_way(self) -> list[str]:
        """The steps left until the workers are the wanted ones, in words."""
        return self._roster.under_way

    def subscribe(self, on_change: Callable[[SupervisedWorker], None]) -> None:
        """Register ``on_change``, called in the event loop after every change of a worker's state."""
        self._subscribers.append(on_change)

    def get(self, worker_id: str) -> SupervisedWorker | None:
        """Return the worker of that id, if there is one."""
        lane = self.lanes.get(worker_id)
        return lane.current if lane is not None else self._roster.get(worker_id)

    def refusal_s(self, worker_id: str) -> float | None:
        """Return how long a worker may refuse a turn; None is for ever."""
        worker = self.get(worker_id)
        return worker.spec.timeouts.refusal_s if worker is not None else None

    def models_without_ready_worker(self) -> list[str]:
        """Return the models that cannot be served now, in the configuration's order."""
        ready = {worker.spec.name for worker in self._roster if worker.now.is_available}
        on_demand = {model for model in self.lanes.models if self.lanes.has_room(model)}
        return [model for model in self.models() if model not in ready | on_demand]

    def models(self) -> list[str]:
        """List the models of the configuration, ready or not: fixed ones in its order, then those of the lanes."""
        return list(dict.fromkeys([*self._roster.models, *(worker.spec.name for worker in self._on_lanes)]))

    def workers_of(self, model: str) -> list[SupervisedWorker]:
        """Return the workers of a model, including those of lanes that have it loaded."""
        return [worker for worker in self if worker.spec.name == model]

    def served_names(self) -> list[str]:
        """List the names that requests may ask for: models that are not lost, and their adapters."""
        models = [model for model in self.models() if not self.is_lost(model)]
        return models + [name for model in models if model in self.adapters for name in self.adapters[model].names]

    def is_lost(self, model: str) -> bool:
        """Whether no worker of a model will be ready again without an operator."""
        if model in self.lanes.models:
            return self.lanes.is_lost(model)
        workers = self._roster.workers_of(model)
        return bool(workers) and all(worker.has_given_up for worker in workers)

    def trouble_of(self, model: str) -> str:
        """Return why no worker of a model is ready."""
        if model in self.lanes.models:
            return self.lanes.trouble_of(model)
        states = [
            f"{worker.spec.id} is {worker.now.state}: {worker.supervisor.because}"
            for worker in self
            if worker.spec.name == model
        ]
        return "; ".join(states) or f"no worker serves {model}"

    def check_models(self) -> None:
        """Check that every model has a worker that is ready or may become ready.

        Raises:
            StartFailed: all workers of a model have given up.
        """
        hopeful = {worker.spec.name for worker in self._roster if worker.now.state is not WorkerState.FAILED}
        hopeful |= {model for model in self.lanes.models if self.lanes.has_room(model)}
        for worker in self._all:
            if worker.spec.name not in hopeful:
                raise worker.supervisor.failure()

    # Handover to the next program of this process

    def hand_over_engines(self) -> HeldFleet:
        """Return the engines for the next program of this process."""
        found = (hold(worker, self._environment) for worker in self)
        scratch = {name: str(weights.scratch) for name, weights in self.weights.items() if weights.scratch is not None}
        return HeldFleet(
            run=run_id(),
            workers=[worker for worker in found if worker is not None],
            scratch=scratch,
            unloaded=sorted(self._roster.unloaded),
        )

    def unsettled(self) -> str | None:
        """Name the work that the next program could not continue; None if there is none."""
        for worker in self:
            if worker.now.state is WorkerState.STOPPING:
                return f"{worker.spec.id} is stopping its engine"
            if (
                worker.now.state is WorkerState.STARTING
                and worker.supervisor.hand_over_engine() is None
                and worker.owns_engine
            ):
                return f"{worker.spec.id} is about to start its engine"
        for name, weights in self.weights.items():
            if weights.running is not None or weights.is_keeping:
                return f"the weights of {name} are being changed"
        for name, adapters in self.adapters.items():
            if adapters.changing is not None:
                return f"model {name}: {adapters.changing} is under way"
        return next(iter(self._roster.under_way), None) if self._roster.is_leaving else self.lanes.unsettled()

    async def inherit(self, held: HeldFleet, children: Sequence[ProcessId]) -> Adoption:
        """Let workers take over running engines, and end engines that no worker takes; call it before ``running``.

        ``children`` are all child processes that existed when the program began.
        """
        workers = {
            (worker.spec.id, worker.spec.name): worker
            for worker in [*self._roster, *self._on_lanes]
            if worker.owns_engine
        }
        wanted = [
            launch_of(worker.spec, self._environment, worker.adapters.wanted)
            for worker in workers.values()
            if worker.spec.id not in held.unloaded
        ]
        plan = plan_adoption([launch_of_held(each) for each in held.workers], wanted)
        kept = [each for each in held.workers if each.id in plan.kept and each.engine.process.is_as_told]
        for each in kept:
            worker = workers[WorkerId(each.id), each.model]
            adopt(worker, each)
            if worker.spec.lane is not None:
                self.lane_pool.adopt(worker)
        self._roster.unloaded |= {
            worker.spec.id: worker.spec.name for worker in self._roster if worker.spec.id in held.unloaded
        }
        for name, folder in held.scratch.items():
            if name in self.weights:
                self.weights[name].scratch = Path(folder)
        for each in held.workers:
            if each not in kept:
                logger.info("worker %s: its engine is ended: %s", each.id, plan.ended.get(each.id, "it has changed"))
                for fd in each.engine.process.guardian.descriptors:
                    os.close(fd)
        guardians = HeldFleet(run=held.run, workers=kept).guardians
        await end_children([child for child in children if child not in guardians])
        await end_orphans()
        return plan

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start every worker; on leaving the block, for whatever reason, none of their processes is left."""
        gate = StartGate()
        for worker in self._roster:
            if worker.spec.devices:
                names = ", ".join(f"{device.name} ({device.uuid})" for device in worker.spec.devices)
                logger.info("worker %s: its engine computes on %s", worker.spec.id, names)
        async with open_registry(self._state_dir) as registry, anyio.create_task_group() as tasks:
            tasks.start_soon(patrol)
            for upkeep in self._upkeep_of_lanes.values():
                await tasks.start(upkeep.run)
            for worker in self._on_lanes:
                await tasks.start(worker.run, registry, gate)
            await tasks.start(self._roster.run, registry, gate)
            await tasks.start(self.lane_pool.run, gate)
            tasks.start_soon(self.lane_pool.look_after_devices)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when every worker of a fixed model is ready; lanes load models when turns want them.

        With ``first_try_only`` attached servers are not waited for: they have no first start.

        Raises:
            StartFailed: a worker will not become ready.
        """
        for worker in self._roster:
            if first_try_only and worker.spec.engine is EngineKind.ATTACHED:
                continue
            await worker.supervisor.wait_ready(first_try_only=first_try_only)

    def drain_nowait(self, because: str) -> None:
        """Let no worker admit new requests, and load no model."""
        self._close()
        for worker in self._all:
            worker.drain_nowait(because)

    async def wait_kept(self) -> None:
        """Return when no engine still writes weights for its next life."""
        for weights in self.weights.values():
            await weights.wait_kept()

    async def stop(self, because: str, *, at_once: bool = False) -> None:
        """Stop all workers at the same time; one that cannot be stopped does not delay the others."""
        self._close()
        async with anyio.create_task_group() as tasks:
            for worker in self._all:
                tasks.start_soon(_stop, worker, because, at_once)

    def _close(self) -> None:
        self.lane_pool.close()
        self._roster.close()

    def _is_changed(self, worker: SupervisedWorker) -> bool:
        """Whether new weights are reaching a model's engines, or being written for later ones."""
        weights = self.weights.get(worker.spec.name)
        return weights is not None and (weights.running is not None or weights.is_keeping)

    def _tell(self, worker: SupervisedWorker) -> None:
        # First, so that a worker with old weights is not taken for ready.
        if worker.spec.lane is None:
            self._roster.note_change(worker)
        else:
            self._upkeep_of_lanes[worker.spec.name].note_change(worker)
        self.lane_pool.note_change(worker)
        if self.get(worker.spec.id) is not worker:  # it sleeps while another model has its lane
            return
        for subscriber in self._subscribers:
            subscriber(worker)


async def _stop(worker: SupervisedWorker, because: str, at_once: bool) -> None:
    try:
        await worker.end_engine(because, at_once=at_once)
    except StopTimedOut:
        line = line_about(of_worker(worker.spec.id, worker.now.incarnation))
        logger.exception("worker %s could not be stopped", worker.spec.id, extra=line)

"""All workers of one Roundhouse, by model."""

import logging
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
from workers.health.recorder import Diary
from workers.lanes.lane_pool import LanePool, LaneSet
from workers.log_context import line_about, of_worker
from workers.policy.placement import SwapRule
from workers.process.orphans import patrol
from workers.process.registry import open_registry
from workers.roster import UNLOADED, Roster
from workers.span_board import SpanBoard
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.states import Hold, WorkerState
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
        spans: SpanBoard | None = None,
    ) -> None:
        self.spans = spans
        self._diaries: dict[WorkerId, Diary] = {}  # shared by all models of a lane, and by all workers of an id
        self._make = partial(
            SupervisedWorker,
            environment=environment,
            on_change=self._tell,
            tries_suspects=tries_suspects,
            count_pools=count_pools,
            health=health,
            spans=spans,
        )
        self._look_after = partial(ModelUpkeep, state_dir=state_dir, observe=observe)
        self._state_dir = state_dir
        lanes = {spec.lane.id: spec.lane.device.uuid for spec in specs if spec.lane is not None}
        self.roster = Roster(specs, self._worker_of, self._look_after, Counter(lanes.values()))
        self._on_lanes = [self._worker_of(spec) for spec in specs if spec.lane is not None]
        self.lanes = LaneSet(health)
        self.lane_pool = LanePool(self.lanes, swap_rule, is_changed=self._is_changed)
        self.lane_pool.add(self._on_lanes)
        of_lanes: dict[str, list[SupervisedWorker]] = {}
        for worker in self._on_lanes:
            of_lanes.setdefault(worker.spec.name, []).append(worker)
        self._upkeep_of_lanes = {name: self._look_after(workers) for name, workers in of_lanes.items()}
        self._subscribers: list[Callable[[SupervisedWorker], None]] = []
        self.environment = environment

    def _worker_of(self, spec: WorkerSpec) -> SupervisedWorker:
        if spec.id not in self._diaries:
            self._diaries[spec.id] = Diary.of_worker(spec)
        return self._make(spec, diary=self._diaries[spec.id])

    def __repr__(self) -> str:
        return f"<Fleet {[(worker.spec.id, str(worker.now.state)) for worker in self]}>"

    def __iter__(self) -> Iterator[SupervisedWorker]:
        """Iterate over the workers of fixed models in the configuration's order, then over those on the lanes."""
        yield from self.roster
        yield from self.lane_pool

    @property
    def every(self) -> list[SupervisedWorker]:
        """All workers, those on lanes for each model that may come there."""
        return [*self.roster, *self._on_lanes]

    @property
    def weights(self) -> Mapping[str, ModelWeights]:
        """The weights of each model whose weights can change."""
        upkeep = self.roster.upkeep | self._upkeep_of_lanes
        return {name: each.weights for name, each in upkeep.items() if each.weights is not None}

    @property
    def adapters(self) -> Mapping[str, ModelAdapters]:
        """The adapters of each model, if it can have any here."""
        upkeep = self.roster.upkeep | self._upkeep_of_lanes
        return {name: each.adapters for name, each in upkeep.items() if each.adapters is not None}

    def forgive(self, worker_id: str) -> bool:
        """Let a worker that was left alone be replaced again, and its lane's device be used, on an operator's request.

        Returns whether it was unloaded.
        """
        self.lanes.forgive(worker_id)
        return self.roster.forgive(worker_id)

    def load(self, model: str) -> None:
        """Start a model's engines, or load it on a lane, on an operator's request."""
        if model in self.lanes.models:
            self.lane_pool.load(model)
        else:
            self.roster.start_again(model)

    def unload(self, model: str) -> None:
        """End a model's engines, each after its requests.

        A fixed model stays unloaded until an operator asks for it; one on lanes comes back for the next turn that wants
        it.
        """
        if model in self.lanes.models:
            self.lane_pool.unload(model, UNLOADED)
        else:
            self.roster.unload(model, UNLOADED)

    def subscribe(self, on_change: Callable[[SupervisedWorker], None]) -> None:
        """Register ``on_change``, called in the event loop after every change of a worker's state."""
        self._subscribers.append(on_change)

    def get(self, worker_id: str) -> SupervisedWorker | None:
        """Return the worker of that id, if there is one."""
        lane = self.lanes.get(worker_id)
        return lane.current if lane is not None else self.roster.get(worker_id)

    def refusal_s(self, worker_id: str) -> float | None:
        """Return how long a worker may refuse a turn; None is for ever."""
        worker = self.get(worker_id)
        return worker.spec.timeouts.refusal_s if worker is not None else None

    def models_without_ready_worker(self) -> list[str]:
        """Return the models that cannot be served now, in the configuration's order."""
        ready = {worker.spec.name for worker in self.roster if worker.now.is_available or _is_led(worker, self.spans)}
        on_demand = {model for model in self.lanes.models if self.lanes.has_room(model)}
        return [model for model in self.models() if model not in ready | on_demand]

    def models(self) -> list[str]:
        """List the models of the configuration, ready or not: fixed ones in its order, then those of the lanes."""
        return list(dict.fromkeys([*self.roster.wanted.by_model, *(worker.spec.name for worker in self._on_lanes)]))

    def workers_of(self, model: str) -> list[SupervisedWorker]:
        """Return the workers of a model, including those of lanes that have it loaded."""
        return [worker for worker in self if worker.spec.name == model]

    def is_lost(self, model: str) -> bool:
        """Whether no worker of a model will be ready again without an operator."""
        if model in self.lanes.models:
            return self.lanes.is_lost(model)
        workers = self.roster.workers_of(model)
        return bool(workers) and all(_is_idle_spare(each) or _has_given_up(each) for each in workers)

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
        hopeful = {worker.spec.name for worker in self.roster if not (_is_idle_spare(worker) or _has_failed(worker))}
        hopeful |= {model for model in self.lanes.models if self.lanes.has_room(model)}
        for worker in self.every:
            if worker.spec.name not in hopeful:
                raise worker.supervisor.failure()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start every worker; on leaving the block, for whatever reason, none of their processes is left."""
        gate = StartGate()
        for worker in self.roster:
            if worker.spec.devices:
                names = ", ".join(f"{device.name} ({device.uuid})" for device in worker.spec.devices)
                logger.info("worker %s: its engine computes on %s", worker.spec.id, names)
        async with open_registry(self._state_dir) as registry, anyio.create_task_group() as tasks:
            tasks.start_soon(patrol)
            if self.spans is not None:
                tasks.start_soon(self.spans.run)
            for upkeep in self._upkeep_of_lanes.values():
                await tasks.start(upkeep.run)
            for worker in self._on_lanes:
                await tasks.start(worker.run, registry, gate)
            await tasks.start(self.roster.run, registry, gate)
            await tasks.start(self.lane_pool.run, gate)
            tasks.start_soon(self.lane_pool.look_after_devices)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def wait_ready(self, *, first_try_only: bool = False) -> None:
        """Return when every worker of a fixed model but its spares is ready; lanes load models when turns want them.

        Spans are not waited for: their other nodes may come at any time.
        With ``first_try_only`` attached servers are not waited for: they have no first start.

        Raises:
            StartFailed: a worker will not become ready.
        """
        for worker in self.roster:
            is_waited_for = not first_try_only or worker.spec.engine is not EngineKind.ATTACHED
            if is_waited_for and Hold.SPARE not in worker.now.holds and worker.spec.nodes == 1:
                await worker.supervisor.wait_ready(first_try_only=first_try_only)

    def drain_nowait(self, because: str) -> None:
        """Let no worker admit new requests, and load no model."""
        self.lane_pool.close()
        self.roster.close()
        for worker in self.every:
            worker.drain_nowait(because)

    async def stop(self, because: str, *, at_once: bool = False) -> None:
        """Stop all workers at the same time; one that cannot be stopped does not delay the others."""
        self.lane_pool.close()
        self.roster.close()
        async with anyio.create_task_group() as tasks:
            for worker in self.every:
                tasks.start_soon(_stop, worker, because, at_once)

    def _is_changed(self, worker: SupervisedWorker) -> bool:
        """Whether new weights are reaching a model's engines, or being written for later ones."""
        weights = self.weights.get(worker.spec.name)
        return weights is not None and weights.is_changing

    def _tell(self, worker: SupervisedWorker) -> None:
        # First, so that a worker with old weights is not taken for ready.
        if worker.spec.lane is None:
            self.roster.note_change(worker)
        else:
            self._upkeep_of_lanes[worker.spec.name].note_change(worker)
        self.lane_pool.note_change(worker)
        if self.get(worker.spec.id) is not worker:  # it sleeps while another model has its lane
            return
        for subscriber in self._subscribers:
            subscriber(worker)


def served_models(fleet: Fleet) -> list[str]:
    """List the models of the configuration without those that other nodes serve over a span."""
    spans = fleet.spans
    if spans is None:
        return fleet.models()
    kept = {each.spec.name for each in fleet.every if each.spec.nodes == 1 or spans.leads(each.spec.id)}
    return [model for model in fleet.models() if model in kept]


def _is_led(worker: SupervisedWorker, spans: SpanBoard | None) -> bool:
    """Whether another node serves a worker's model over a span."""
    return spans is not None and stands_by(worker) and spans.is_running(worker.spec.id)


def stands_by(worker: SupervisedWorker) -> bool:
    """Whether another node leads a worker's span, or none does yet: its engine serves nothing here."""
    part = worker.supervisor.part
    return worker.spec.nodes > 1 and (part is None or not part.leads)


def _has_failed(worker: SupervisedWorker) -> bool:
    return worker.now.state is WorkerState.FAILED


def _is_idle_spare(worker: SupervisedWorker) -> bool:
    """Whether a worker waits without an engine until its model has room for a spare."""
    return Hold.SPARE in worker.now.holds and not worker.now.is_wanted


def _has_given_up(worker: SupervisedWorker) -> bool:
    """Whether a worker has failed for good: only an operator starts it again."""
    is_over = _has_failed(worker) and not worker.now.has_process
    return is_over and worker.spec.restart.retry_s is None


async def _stop(worker: SupervisedWorker, because: str, at_once: bool) -> None:
    try:
        await worker.end_engine(because, at_once=at_once)
    except StopTimedOut:
        line = line_about(of_worker(worker.spec.id, worker.now.incarnation))
        logger.exception("worker %s could not be stopped", worker.spec.id, extra=line)

"""The workers that one program of this process hands to the next, which keeps their engines running."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from workers.engine.launch import command_for
from workers.engine.launch.devices import placed
from workers.fleet import Fleet, stands_by
from workers.loaded import LAUNCHED
from workers.members import WantedReplicas
from workers.policy.adoption import Adoption, Launch, plan_adoption
from workers.process.handed_over import HeldFleet, HeldWorker
from workers.process.identity import ProcessId
from workers.process.orphans import end_children, end_orphans
from workers.process.registry import run_id
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

logger = logging.getLogger(__name__)


def hand_over_engines(fleet: Fleet) -> HeldFleet:
    """Return the engines for the next program of this process."""
    found = (_hold(worker, fleet.environment) for worker in fleet)
    scratch = {name: str(weights.scratch) for name, weights in fleet.weights.items() if weights.scratch is not None}
    return HeldFleet(
        run=run_id(),
        workers=[worker for worker in found if worker is not None],
        scratch=scratch,
        unloaded=sorted(fleet.roster.unloaded),
        seat=fleet.spans.seat if fleet.spans is not None else None,
    )


def unsettled(fleet: Fleet) -> str | None:
    """Name the work that the next program could not continue; None if there is none."""
    for worker in fleet:
        state = worker.now.state
        if state is WorkerState.STOPPING:
            return f"{worker.spec.id} is stopping its engine"
        is_about_to = state is WorkerState.STARTING and worker.owns_engine and not stands_by(worker)
        if is_about_to and worker.supervisor.hand_over_engine() is None:
            return f"{worker.spec.id} is about to start its engine"
    for name, weights in fleet.weights.items():
        if weights.is_changing:
            return f"the weights of {name} are being changed"
    for name, adapters in fleet.adapters.items():
        if adapters.changing is not None:
            return f"model {name}: {adapters.changing} is under way"
    return next(iter(fleet.roster.under_way), None) if fleet.roster.is_leaving else fleet.lanes.unsettled()


async def inherit(fleet: Fleet, held: HeldFleet, children: Sequence[ProcessId]) -> Adoption:
    """Let a fleet's workers take over running engines, and end engines that no worker takes, before it runs.

    ``children`` are all child processes that existed when the program began.
    """
    workers = {(each.spec.id, each.spec.name): each for each in fleet.every if each.owns_engine}
    wanted = [
        launch_of(worker.spec, fleet.environment, worker.adapters.wanted)
        for worker in workers.values()
        if worker.spec.id not in held.unloaded
    ]
    plan = plan_adoption([launch_of_held(each) for each in held.workers], wanted)
    kept = [each for each in held.workers if each.id in plan.kept and each.engine.process.is_as_told]
    for each in kept:
        _adopt(fleet, workers[WorkerId(each.id), each.model], each)
    if fleet.spans is not None:
        fleet.spans.inherited &= {each.id for each in kept}
    fleet.roster.keep_unloaded(held.unloaded)
    for name in held.scratch.keys() & fleet.weights.keys():
        fleet.weights[name].scratch = Path(held.scratch[name])
    _let_go((each for each in held.workers if each not in kept), plan)
    guardians = HeldFleet(run=held.run, workers=kept).guardians
    await end_children([child for child in children if child not in guardians])
    await end_orphans()
    return plan


def _let_go(ended: Iterable[HeldWorker], plan: Adoption) -> None:
    for each in ended:
        logger.info("worker %s: its engine is ended: %s", each.id, plan.ended.get(each.id, "it has changed"))
        for fd in each.engine.process.guardian.descriptors:
            os.close(fd)


def launch_of(spec: WorkerSpec, environment: Mapping[str, str], adapters: Mapping[str, str] | None = None) -> Launch:
    """Return the launch of a worker's engine; ``adapters`` replace the specification's own.

    Raises:
        InvalidSpec: it cannot be started.
    """
    spec = replace(placed(spec, environment), devices=(), threads=None)  # assigned devices make no other launch
    command = command_for(replace(spec, adapters={}) if spec.engine is not EngineKind.VLLM else spec, {})
    at = [spec.endpoint.host, spec.endpoint.port, str(spec.endpoint.uds)]
    text = json.dumps([spec.engine, list(command.argv), sorted(command.env.items()), at])
    return Launch(
        worker=spec.id,
        model=spec.name,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        adapters=dict(spec.adapters if adapters is None else adapters),
        may_have_more=spec.engine is EngineKind.VLLM,
    )


def launches_of(specs: Sequence[WorkerSpec], environment: Mapping[str, str]) -> list[Launch]:
    """Return the launches of all workers that have an engine of ours, and of the spares that may have one."""
    fixed = WantedReplicas(specs)
    of_models = [spec for model in fixed.by_model for spec in fixed.of_model(model)]
    on_lanes = [spec for spec in specs if spec.lane is not None]
    return [launch_of(spec, environment) for spec in (*of_models, *on_lanes) if spec.owns_engine]


def launch_of_held(held: HeldWorker) -> Launch:
    """Return the launch of a running engine, with its present adapters."""
    return Launch(
        worker=held.id, model=held.model, digest=held.launch, adapters=dict(held.adapters), may_have_more=False
    )


def _hold(worker: SupervisedWorker, environment: Mapping[str, str]) -> HeldWorker | None:
    """Return a worker and its engine for the next program to adopt; None without an engine to keep."""
    engine = (
        worker.supervisor.hand_over_engine() if worker.owns_engine and Hold.ASLEEP not in worker.now.holds else None
    )
    if engine is None:
        return None
    return HeldWorker(
        id=worker.spec.id,
        model=worker.spec.name,
        launch=launch_of(worker.spec, environment).digest,
        engine=engine,
        pace=worker.requests.latency.hand_over_pace(),
        adapters=dict(worker.adapters.loaded),
        numbers=dict(worker.adapters.numbers),
        weights=worker.weights.version if worker.weights is not None else None,
    )


def _adopt(fleet: Fleet, worker: SupervisedWorker, held: HeldWorker) -> None:
    """Let a worker that was never started take over a running engine when it starts."""
    worker.supervisor.adopt(held.engine)
    worker.requests.latency.restore(held.pace)
    worker.adapters.adopt(held.adapters, held.numbers)
    if worker.weights is not None:
        version = LAUNCHED if held.weights is None else held.weights
        worker.weights.change(version, held.engine.incarnation)
    if worker.spec.lane is not None:
        fleet.lane_pool.adopt(worker)

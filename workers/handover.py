"""The workers that one program of this process hands to the next, which keeps their engines running."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from workers.engine.launch import command_for
from workers.engine.launch.devices import placed
from workers.loaded import LAUNCHED
from workers.policy.adoption import Launch
from workers.process.handed_over import HeldWorker
from workers.spec import EngineKind, WorkerSpec
from workers.states import Hold
from workers.supervised import SupervisedWorker


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
    """Return the launches of all workers that have an engine of ours."""
    return [launch_of(spec, environment) for spec in specs if spec.owns_engine]


def launch_of_held(held: HeldWorker) -> Launch:
    """Return the launch of a running engine, with its present adapters."""
    return Launch(
        worker=held.id, model=held.model, digest=held.launch, adapters=dict(held.adapters), may_have_more=False
    )


def hold(worker: SupervisedWorker, environment: Mapping[str, str]) -> HeldWorker | None:
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


def adopt(worker: SupervisedWorker, held: HeldWorker) -> None:
    """Let a worker that was never started take over a running engine when it starts."""
    worker.supervisor.adopt(held.engine)
    worker.requests.latency.restore(held.pace)
    worker.adapters.adopt(held.adapters, held.numbers)
    if worker.weights is not None:
        version = LAUNCHED if held.weights is None else held.weights
        worker.weights.change(version, held.engine.incarnation)

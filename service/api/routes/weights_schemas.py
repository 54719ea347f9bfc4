"""What is answered about weights, for the description in /openapi.json."""

from service.api.schemas import Body
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.group import Group
from workers.weights.model_weights import ModelWeights
from workers.weights.update import WeightUpdate, WorkerProgress


class MemberOut(Body):
    """One worker's place in a trainer's group: its engine has ``size`` ranks from ``first_rank``."""

    worker: str
    incarnation: int
    first_rank: int
    size: int


class GroupOut(Body):
    """A trainer's group: it is rank 0 of ``world_size``, and all come together in its store under ``key``."""

    number: int
    backend: str
    state: str
    error: str | None
    key: str
    world_size: int
    members: list[MemberOut]


class ShareOut(Body):
    """One worker's part in an update: what it does, for how long, and how much it has received."""

    worker: str
    incarnation: int
    stage: str
    elapsed_s: float
    received: int
    total: int
    paused_s: float
    error: str | None


class UpdateOut(Body):
    """An update; ``phase`` is where it is or ended, ``phase_s`` how long each took, in seconds."""

    number: int
    version: int
    previous: int
    mode: str
    checkpoint: str | None
    tensors: int
    state: str
    phase: str
    error: str | None
    phase_s: dict[str, float]
    workers: list[ShareOut]


class WorkerWeightsOut(Body):
    """Which weights a worker has, and what it waits for where they are not the model's."""

    worker: str
    state: str
    incarnation: int
    version: int
    in_rotation: bool
    waits_for: str | None


class WeightsOut(Body):
    """A model's weights; ``update`` is the one under way, or the last."""

    model: str
    version: int
    checkpoint: str | None
    group: GroupOut | None
    update: UpdateOut | None
    updates: list[UpdateOut]
    workers: list[WorkerWeightsOut]


def weights_document(weights: ModelWeights) -> WeightsOut:
    """Return a model's weights as they are shown."""
    updates = [update_document(update) for update in weights.updates]
    return WeightsOut(
        model=weights.name,
        version=weights.current.version,
        checkpoint=weights.current.checkpoint,
        group=_group(weights.group) if weights.group else None,
        update=updates[-1] if updates else None,
        updates=updates,
        workers=[_worker(weights, worker) for worker in weights.workers.values()],
    )


def update_document(update: WeightUpdate) -> UpdateOut:
    """Return an update as it is shown."""
    return UpdateOut(
        number=update.number,
        version=update.version,
        previous=update.previous,
        mode=update.request.mode,
        checkpoint=update.request.checkpoint,
        tensors=len(update.request.tensors),
        state=update.state,
        phase=update.phase,
        error=update.error,
        phase_s={phase: round(seconds, 4) for phase, seconds in update.phase_s.items()},
        workers=[_share(update, share) for share in update.shares.values()],
    )


def _group(group: Group) -> GroupOut:
    return GroupOut(
        number=group.number,
        backend=group.request.backend,
        state=group.state,
        error=group.error,
        key=group.key,
        world_size=group.world_size,
        members=[
            MemberOut(worker=name, incarnation=each.incarnation, first_rank=each.first_rank, size=each.size)
            for name, each in group.members.items()
        ],
    )


def _share(update: WeightUpdate, share: WorkerProgress) -> ShareOut:
    return ShareOut(
        worker=share.worker,
        incarnation=share.incarnation,
        stage=share.stage,
        elapsed_s=round(update.clock() - share.since, 3),
        received=share.received,
        total=share.total,
        paused_s=round(share.paused_s, 4),
        error=share.error,
    )


def _worker(weights: ModelWeights, worker: SupervisedWorker) -> WorkerWeightsOut:
    is_behind = Hold.STALE_WEIGHTS in worker.holds
    return WorkerWeightsOut(
        worker=worker.spec.id,
        state=worker.state,
        incarnation=worker.incarnation,
        version=worker.weights.version if worker.weights else 0,
        in_rotation=worker.is_available,
        waits_for=weights.waits_for(worker) if is_behind else None,
    )

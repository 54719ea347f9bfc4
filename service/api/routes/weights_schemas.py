"""What is answered about weights, for the description in /openapi.json."""

from roundhouse_client.values import models
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.group import Group
from workers.weights.model_weights import ModelWeights
from workers.weights.update import WeightUpdate, WorkerProgress


def weights_document(weights: ModelWeights) -> models.Weights:
    """Return a model's weights as they are shown."""
    updates = tuple(update_document(update) for update in weights.updates)
    return models.Weights(
        model=weights.name,
        version=weights.current.version,
        checkpoint=weights.current.checkpoint,
        group=_group(weights.group) if weights.group else None,
        update=updates[-1] if updates else None,
        updates=updates,
        workers=tuple(_worker(weights, worker) for worker in weights.workers.values()),
    )


def update_document(update: WeightUpdate) -> models.WeightUpdate:
    """Return an update as it is shown."""
    return models.WeightUpdate(
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
        workers=tuple(_share(update, progress) for progress in update.shares.values()),
    )


def _group(group: Group) -> models.TrainerGroup:
    return models.TrainerGroup(
        number=group.number,
        backend=group.request.backend,
        state=group.state,
        error=group.error,
        key=group.key,
        world_size=group.world_size,
        members=tuple(
            models.GroupMember(worker=name, incarnation=each.incarnation, first_rank=each.first_rank, size=each.size)
            for name, each in group.members.items()
        ),
    )


def _share(update: WeightUpdate, progress: WorkerProgress) -> models.UpdateShare:
    return models.UpdateShare(
        worker=progress.worker,
        incarnation=progress.incarnation,
        stage=progress.stage,
        elapsed_s=round(update.clock() - progress.since, 3),
        received=progress.received,
        total=progress.total,
        paused_s=round(progress.paused_s, 4),
        error=progress.error,
    )


def _worker(weights: ModelWeights, worker: SupervisedWorker) -> models.WorkerWeights:
    is_behind = Hold.STALE_WEIGHTS in worker.holds
    return models.WorkerWeights(
        worker=worker.spec.id,
        state=worker.state,
        incarnation=worker.incarnation,
        version=worker.weights.version if worker.weights else 0,
        in_rotation=worker.is_available,
        waits_for=weights.waits_for(worker) if is_behind else None,
    )

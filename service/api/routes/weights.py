"""The HTTP API of weights: a trainer makes a group with a model's engines, and updates them while they work."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, ValidationError

from roundhouse_client.values import models
from service.api.body import body_of, read_document
from service.api.errors.problems import refused
from service.config.source import outside_with_files
from service.conversations.document.limits import Limits
from service.errors import Fault, ModelNotFound, UpdateInvalid, UpdateNotFound, WeightsFailed
from service.formats.faults import Rules, StrictModel, faults_of, rules
from workers.fleet import Fleet
from workers.policy.weight_update import UpdateState
from workers.policy.weights import Backend, UpdateMode
from workers.states import Hold
from workers.supervised import SupervisedWorker
from workers.weights.group import Group, GroupRequest
from workers.weights.model_weights import ModelWeights
from workers.weights.update import Tensor, UpdateRequest, WeightUpdate, WorkerProgress

MOST_VERSION: Final = 2**53 - 1  # largest integer of every JSON reader; versions only rise
MOST_WAIT_S: Final = 60.0
Spec = TypeVar("Spec", bound=StrictModel)


def shown_weights(weights: ModelWeights) -> models.Weights:
    """Return a model's weights as the API shows them."""
    updates = tuple(shown_update(update) for update in weights.updates)
    return models.Weights(
        model=weights.name,
        version=weights.current.version,
        checkpoint=weights.current.checkpoint,
        group=_group(weights.group) if weights.group else None,
        update=updates[-1] if updates else None,
        updates=updates,
        workers=tuple(_worker(weights, worker) for worker in weights.workers.values()),
    )


def shown_update(update: WeightUpdate) -> models.WeightUpdate:
    """Return an update as the API shows it."""
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
    is_behind = Hold.STALE_WEIGHTS in worker.now.holds
    return models.WorkerWeights(
        worker=worker.spec.id,
        state=worker.now.state,
        incarnation=worker.now.incarnation,
        version=worker.weights.version if worker.weights else 0,
        in_rotation=worker.now.is_available,
        waits_for=weights.catch_up.waits_for(worker) if is_behind else None,
    )


class InitSpec(StrictModel):
    """The address of a trainer's store (torch's words); the trainer is rank 0."""

    backend: Backend = Backend.GLOO
    master_address: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    master_port: Annotated[int, Field(ge=1, le=65535)]
    timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = None


class TensorSpec(StrictModel):
    """One tensor that will be broadcast; ``dtype`` in torch's words."""

    name: Annotated[str, Field(min_length=1)]
    dtype: Annotated[str, Field(pattern=r"^(torch\.)?[a-z0-9_]+$")]
    shape: list[Annotated[int, Field(ge=0)]]


class UpdateSpec(StrictModel):
    """New weights: a checkpoint that the engines can read, or tensors that a trainer broadcasts in their order."""

    version: Annotated[int, Field(ge=1, le=MOST_VERSION)] | None = None
    mode: UpdateMode = UpdateMode.KEEP
    clear_cache: bool = True
    checkpoint: Annotated[str, Field(min_length=1)] | None = None
    tensors: Annotated[list[TensorSpec], Field(min_length=1)] | None = None
    bucket_bytes: Annotated[int, Field(ge=0)] = 0
    group: Annotated[int, Field(ge=1)] | None = None
    wait: bool = True

    @rules
    def _is_one_of_both(self) -> Rules:
        is_one = (self.checkpoint is None) is not (self.tensors is None)
        yield not is_one, "give either checkpoint (a folder) or tensors (what will be broadcast)"


WEIGHTS_BODIES: Final[tuple[type[StrictModel], ...]] = (InitSpec, UpdateSpec)


def weights_router(fleet: Fleet, limits: Limits, roots: Sequence[Path]) -> APIRouter:
    """Return the routes of weights."""
    router = APIRouter(prefix="/v1/models/{model:path}/weights", tags=["weights"])

    def find(model: str) -> ModelWeights:
        weights = fleet.weights.get(model)
        if weights is None:
            raise ModelNotFound(model, fleet.models(), list(fleet.weights), "whose weights can change")
        return weights

    @router.post(
        "/init",
        status_code=202,
        summary="Make every engine of a model join a trainer's group",
        responses=refused(400, 401, 404, 409, 413, 422, 502, 503),
        openapi_extra=body_of(InitSpec),
    )
    async def init(model: str, request: Request) -> models.Weights:
        weights = find(model)
        spec = _parse(InitSpec, await read_document(request, limits))
        asked = GroupRequest(
            backend=spec.backend,
            address=spec.master_address,
            port=spec.master_port,
            timeout_s=spec.timeout_s or weights.policy.init_s,
        )
        await weights.init(asked)
        return shown_weights(weights)

    @router.post(
        "/update",
        summary="Give all engines of a model new weights",
        description="202 when every engine is told to receive the trainer's broadcast; a checkpoint is waited for.",
        responses={202: {"model": models.WeightUpdate}, **refused(400, 401, 404, 409, 413, 422, 502, 503)},
        openapi_extra=body_of(UpdateSpec),
    )
    async def update(model: str, request: Request, response: Response) -> models.WeightUpdate:
        weights = find(model)
        spec = _parse(UpdateSpec, await read_document(request, limits))
        _check_place(spec, roots)
        begun = await weights.update(_request(spec))
        if spec.checkpoint is not None and spec.wait:
            await weights.wait_over(begun.number, float("inf"))
        if begun.state is UpdateState.FAILED:
            raise WeightsFailed(f"weights {begun.version} of {model}: {begun.error}")
        response.status_code = 202 if begun.state is UpdateState.RUNNING else 200
        return shown_update(begun)

    @router.get("", summary="Read the state of a model's weights", responses=refused(400, 401, 404))
    async def look(
        model: str,
        update: Annotated[int | None, Query(description="wait for the end of this update")] = None,
        wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S)] = 0.0,
    ) -> models.Weights:
        weights = find(model)
        if update is not None:
            if all(each.number != update for each in weights.updates):
                raise UpdateNotFound(f"model {model}: update {update} is unknown, or no longer kept")
            await weights.wait_over(update, wait_s)
        return shown_weights(weights)

    return router


def _check_place(spec: UpdateSpec, roots: Sequence[Path]) -> None:
    fault = outside_with_files(roots, Path(spec.checkpoint)) if spec.checkpoint is not None else None
    if fault is not None:
        raise UpdateInvalid([Fault(path="checkpoint", message=fault)])


def _request(spec: UpdateSpec) -> UpdateRequest:
    tensors = (Tensor(name=each.name, dtype=each.dtype, shape=tuple(each.shape)) for each in spec.tensors or ())
    return UpdateRequest(
        version=spec.version,
        mode=spec.mode,
        clear_cache=spec.clear_cache,
        checkpoint=spec.checkpoint,
        tensors=tuple(tensors),
        bucket_bytes=spec.bucket_bytes,
        group=spec.group,
    )


def _parse(kind: type[Spec], document: object) -> Spec:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise UpdateInvalid(faults_of(error, kind)) from error

"""The HTTP API that loads and unloads models: their engines start, or end after their requests."""

from fastapi import APIRouter

from roundhouse_client.values import workers as values
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.routes.workers import shown_worker
from service.errors import ModelNotFound, ModelPinned, NotOurEngine
from service.node.node import Node


def loading_router(node: Node) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/models/{model:path}", tags=["workers"])
    fleet = node.fleet

    def shown(model: str, caller: CallerNow) -> values.Workers:
        view = node.scheduler.view
        those = fleet.workers_of(model)
        return values.Workers(
            workers=tuple(shown_worker(lambda: view, worker, is_named=caller.sees_all) for worker in those)
        )

    def check(model: str) -> None:
        if model not in fleet.models():
            raise ModelNotFound(model, fleet.models(), fleet.models(), "of this node")
        if not all(worker.owns_engine for worker in fleet.workers_of(model)):
            raise NotOurEngine(model)

    @router.post("/load", summary="Start a model's engines", status_code=202, responses=refused(401, 404, 409))
    async def load(model: str, caller: CallerNow) -> values.Workers:
        check(model)
        fleet.load(model)
        return shown(model, caller)

    @router.post(
        "/unload",
        summary="Stop a model's engines after their requests",
        status_code=202,
        responses=refused(401, 404, 409),
    )
    async def unload(model: str, caller: CallerNow) -> values.Workers:
        check(model)
        if model in fleet.lanes.models and node.live.config.models[model].pin:
            raise ModelPinned(model)
        fleet.unload(model)
        return shown(model, caller)

    return router

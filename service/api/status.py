"""GET /v1/status: one snapshot for live displays."""

import msgspec
from fastapi import APIRouter

from service.api import schemas
from service.api.problems import refused
from service.api.workers import worker_document
from service.scheduling.scheduler import Scheduler
from service.status import status_of
from workers.fleet import Fleet


def status_router(scheduler: Scheduler, fleet: Fleet) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/status", summary="See what runs, what waits, and for what", responses=refused(401))
    async def status() -> schemas.StatusOut:
        return status_document(scheduler, fleet)

    return router


def status_document(scheduler: Scheduler, fleet: Fleet) -> schemas.StatusOut:
    """Return a snapshot as it is shown."""
    now = status_of(scheduler, fleet)
    told = msgspec.to_builtins(now)
    return schemas.StatusOut(
        jobs=now.jobs,
        conversations=schemas.ConversationCountsOut.model_validate(told["conversations"]),
        pools=schemas.PoolsOut.model_validate(told["pools"]),
        prefix_tokens=schemas.PrefixTokensOut.model_validate(told["prefix_tokens"]),
        heads=schemas.HeadsOut(pending=told["pending"], ready=told["ready"]),
        workers=[worker_document(worker) for worker in fleet],
    )

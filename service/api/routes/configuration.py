"""POST /v1/config/reload, and what the status tells of the configuration in force."""

from fastapi import APIRouter

from roundhouse_client.values import node as values
from service.api.errors.problems import refused
from service.node.node import Node
from service.node.reloader import Reloader


def configuration_router(reloader: Reloader) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/config", tags=["configuration"])

    @router.post("/reload", summary="Read the configuration anew", responses=refused(401, 409, 422, 503))
    async def reload() -> values.Reload:
        plan = await reloader.reload()
        return values.Reload(
            changed=plan.changed,
            added=plan.added,
            removed=plan.removed,
            resized=plan.resized,
            restarted=plan.restarted,
            unchanged=plan.unchanged,
            refused=(),  # where anything is, the answer is 409 and nothing has changed
        )

    return router


def configuration_document(node: Node) -> values.Configuration:
    """Return how the configuration stands."""
    failure = node.live.failure
    return values.Configuration(
        loaded_at=node.live.loaded_at,
        failure=None if failure is None else values.ReloadFailure(at=failure.at, detail=failure.detail),
        under_way=tuple(node.fleet.under_way),
    )

"""POST /v1/config/reload, and what the status tells of the configuration in force."""

from fastapi import APIRouter

from service.api.errors.problems import refused
from service.api.schemas import Body
from service.conversations.transcript import rfc3339
from service.node.node import Node
from service.node.reloader import Reloader


class ReloadOut(Body):
    """What a reload has changed: settings that are in force by now, and models by their names.

    ``restarted`` and ``resized`` models are changed worker after worker, from now on. ``refused`` is always empty here:
    where anything is refused, the answer is 409 and nothing has changed.
    """

    changed: list[str]
    added: list[str]
    removed: list[str]
    resized: list[str]
    restarted: list[str]
    unchanged: list[str]
    refused: list[str]


class ReloadFailureOut(Body):
    """The last reload, where it changed nothing."""

    at: str
    detail: str


class ConfigurationOut(Body):
    """The configuration in force; ``under_way`` says what workers have yet to do until they are as it wants them."""

    loaded_at: str
    failure: ReloadFailureOut | None
    under_way: list[str]


def configuration_router(reloader: Reloader) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/config", tags=["configuration"])

    @router.post("/reload", summary="Read the configuration anew", responses=refused(401, 409, 422, 503))
    async def reload() -> ReloadOut:
        plan = await reloader.reload()
        return ReloadOut(
            changed=list(plan.changed),
            added=list(plan.added),
            removed=list(plan.removed),
            resized=list(plan.resized),
            restarted=list(plan.restarted),
            unchanged=list(plan.unchanged),
            refused=[],
        )

    return router


def configuration_document(node: Node) -> ConfigurationOut:
    """Return how the configuration stands."""
    failure = node.live.failure
    return ConfigurationOut(
        loaded_at=rfc3339(node.live.loaded_at) or "",
        failure=failure and ReloadFailureOut(at=rfc3339(failure.at) or "", detail=failure.detail),
        under_way=node.fleet.under_way,
    )

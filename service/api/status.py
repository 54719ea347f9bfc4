"""GET /v1/status: one snapshot for live displays."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from fastapi import APIRouter

from service.api import schemas
from service.api.problems import refused
from service.api.workers import tool_servers, worker_document
from service.node.node import Node
from service.node.status import status_of


def status_router(node: Node) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/status", summary="See what runs, what waits, and for what", responses=refused(401, 503))
    async def status() -> schemas.StatusOut:
        return status_document(node, await node.unclaimed())

    return router


def status_document(node: Node, unclaimed: Mapping[str, str] = MappingProxyType({})) -> schemas.StatusOut:
    """Return a snapshot as it is shown."""
    now = status_of(node.scheduler, node.fleet)
    told = msgspec.to_builtins(now)
    return schemas.StatusOut(
        jobs=now.jobs,
        conversations=schemas.ConversationCountsOut.model_validate(told["conversations"]),
        pools=schemas.PoolsOut.model_validate(told["pools"]),
        prefix_tokens=schemas.PrefixTokensOut.model_validate(told["prefix_tokens"]),
        heads=schemas.HeadsOut(pending=told["pending"], ready=told["ready"]),
        unclaimed=dict(unclaimed),
        store=schemas.StoreOut(node=node.store.node_id, trouble=node.store.trouble),
        tool_servers=tool_servers(node.tools),
        workers=[worker_document(worker) for worker in node.fleet],
    )

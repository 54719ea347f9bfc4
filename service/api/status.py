"""GET /v1/status: one snapshot for live displays."""

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import APIRouter

from service.api import status_schemas
from service.api.configuration import configuration_document
from service.api.door.access import CallerNow
from service.api.lanes import lane_document
from service.api.problems import refused
from service.api.workers import tool_servers, worker_document
from service.conversations.callers import ANYBODY, Caller
from service.node.node import Node
from service.node.status import status_of


def status_router(node: Node) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/status", summary="See what runs, what waits, and for what", responses=refused(401, 503))
    async def status(caller: CallerNow) -> status_schemas.StatusOut:
        return status_document(node, await node.unclaimed(), caller)

    return router


def status_document(
    node: Node, unclaimed: Mapping[str, str] = MappingProxyType({}), caller: Caller = ANYBODY
) -> status_schemas.StatusOut:
    """Return a snapshot as a caller is shown it: the heads are of jobs that it may know of."""
    now = status_of(node.scheduler, node.fleet, is_seen=None if caller.sees_all else caller.sees)
    return status_schemas.StatusOut(
        jobs=now.jobs,
        conversations=now.conversations,
        ended_turns=now.ended_turns,
        pools=now.pools,
        prefix_tokens=now.prefix_tokens,
        heads=status_schemas.HeadsOut(pending=list(now.pending), ready=list(now.ready)),
        unclaimed=dict(unclaimed),
        store=status_schemas.StoreOut(node=node.store.node_id, trouble=node.store.trouble),
        configuration=configuration_document(node),
        tool_servers=tool_servers(node.tools),
        lanes=[lane_document(node.fleet.lanes, lane) for lane in node.fleet.lanes.lanes],
        workers=[worker_document(node.reserved, worker, is_named=caller.sees_all) for worker in node.fleet],
    )

"""GET /v1/status: one snapshot for live displays."""

from collections.abc import Mapping
from types import MappingProxyType

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.routes.configuration import ConfigurationOut, configuration_document
from service.api.routes.workers import lane_document, tool_servers, worker_document
from service.api.schemas import Body, LaneOut, ToolServerOut, WorkerOut
from service.conversations.callers import ANYBODY, Caller
from service.node.node import Node
from service.node.status import ConversationsSoFar, Head, Pools, PrefixTokens, status_of
from service.telemetry.metrics import Metrics


class HeadsOut(Body):
    """The turns that wait at the heads of the pools."""

    pending: list[Head]
    ready: list[Head]


class StoreOut(Body):
    """The store as this node sees it; ``trouble`` is what ails it."""

    node: str
    trouble: str | None


class StatusOut(Body):
    """A moment of this node; ``jobs`` are those that have not ended.

    ``unclaimed`` says of each model what the conversations wait for that need it next and that no node runs.
    """

    jobs: int
    conversations: ConversationsSoFar
    ended_turns: int  # of jobs, since the start
    pools: Pools
    prefix_tokens: PrefixTokens
    heads: HeadsOut
    unclaimed: dict[str, str]
    store: StoreOut
    configuration: ConfigurationOut
    tool_servers: list[ToolServerOut]
    lanes: list[LaneOut]
    workers: list[WorkerOut]


def metrics_router(metrics: Metrics) -> APIRouter:
    """Return the route that Prometheus asks."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/metrics",
        summary="Metrics, in Prometheus' text format",
        response_class=PlainTextResponse,
        responses=refused(401),
    )
    async def read() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def status_router(node: Node) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1", tags=["status"])

    @router.get("/status", summary="See what runs, what waits, and for what", responses=refused(401, 503))
    async def status(caller: CallerNow) -> StatusOut:
        return status_document(node, await node.unclaimed(), caller)

    return router


def status_document(
    node: Node, unclaimed: Mapping[str, str] = MappingProxyType({}), caller: Caller = ANYBODY
) -> StatusOut:
    """Return a snapshot as a caller is shown it: the heads are of jobs that it may know of."""
    now = status_of(node.scheduler, node.fleet, is_seen=None if caller.sees_all else caller.sees)
    return StatusOut(
        jobs=now.jobs,
        conversations=now.conversations,
        ended_turns=now.ended_turns,
        pools=now.pools,
        prefix_tokens=now.prefix_tokens,
        heads=HeadsOut(pending=list(now.pending), ready=list(now.ready)),
        unclaimed=dict(unclaimed),
        store=StoreOut(node=node.store.node_id, trouble=node.store.trouble),
        configuration=configuration_document(node),
        tool_servers=tool_servers(node.tools),
        lanes=[lane_document(node.fleet.lanes, lane) for lane in node.fleet.lanes.lanes],
        workers=[worker_document(node.reserved, worker, is_named=caller.sees_all) for worker in node.fleet],
    )

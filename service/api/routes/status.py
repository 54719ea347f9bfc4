"""The node as a whole: its status, its metrics, and the reload of its configuration."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from roundhouse_client.values import node as values
from service.api.door.access import CallerNow
from service.api.errors.problems import refused
from service.api.routes.workers import shown_lane, shown_worker, tool_servers
from service.conversations.callers import ANYBODY, Caller
from service.node.node import Node
from service.node.reloader import Reloader
from service.node.status import status_of
from service.store.awaited_turns import Awaited
from service.telemetry.metrics import Metrics

NOTHING_AWAITED: Final = Awaited()


def configuration_router(reloader: Reloader) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/config", tags=["configuration"])

    @router.post("/reload", summary="Reload the configuration", responses=refused(401, 409, 422, 503))
    async def reload() -> values.Reload:
        plan = await reloader.reload()
        return values.Reload(
            changed=plan.changed,
            added=plan.added,
            removed=plan.removed,
            resized=plan.resized,
            restarted=plan.restarted,
            unchanged=plan.unchanged,
            refused=(),  # with any, the answer is 409 and nothing has changed
        )

    return router


def shown_configuration(node: Node) -> values.Configuration:
    """Return the state of the configuration."""
    failure = node.live.failure
    return values.Configuration(
        loaded_at=node.live.loaded_at,
        failure=None if failure is None else values.ReloadFailure(at=failure.at, detail=failure.detail),
        under_way=tuple(node.fleet.roster.under_way),
    )


def metrics_router(metrics: Metrics) -> APIRouter:
    """Return the route for Prometheus."""
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

    @router.get("/status", summary="See what runs and what waits for what", responses=refused(401, 503))
    async def status(caller: CallerNow) -> values.Status:
        return shown_status(node, await node.unclaimed(), caller, await node.callers.count(caller.owner))

    return router


def shown_status(
    node: Node,
    unclaimed: Mapping[str, str] = MappingProxyType({}),
    caller: Caller = ANYBODY,
    awaited: Awaited = NOTHING_AWAITED,
) -> values.Status:
    """Return a snapshot for a caller: the pools' heads are turns of jobs that it may see."""
    pools = node.scheduler.view
    now = status_of(node.scheduler, node.fleet, is_seen=None if caller.sees_all else caller.sees)
    return values.Status(
        jobs=now.jobs + len(awaited.parked.keys() - pools.jobs()),
        # A conversation that waits for a caller is on no scheduler, but is under way.
        conversations=replace(now.conversations, total=now.conversations.total + sum(awaited.parked.values())),
        ended_turns=now.ended_turns,
        pools=now.pools,
        awaited=awaited.turns,
        prefix_tokens=now.prefix_tokens,
        heads=values.PoolHeads(pending=now.pending, ready=now.ready),
        unclaimed=dict(unclaimed),
        store=values.StoreStatus(node=node.store.node_id, trouble=node.store.trouble),
        configuration=shown_configuration(node),
        tool_servers=tool_servers(node.tools),
        lanes=tuple(shown_lane(node.fleet.lane_pool, lane) for lane in node.fleet.lanes),
        workers=tuple(shown_worker(lambda: pools, worker, is_named=caller.sees_all) for worker in node.fleet),
    )

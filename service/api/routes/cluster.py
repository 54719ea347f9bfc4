"""GET /v1/nodes and GET /v1/spans: the nodes on one store, and the engines that span several of them."""

from fastapi import APIRouter

from roundhouse_client.values.node import ClusterNode, ClusterNodes, EngineSpan, EngineSpanMember, EngineSpans
from service.api.errors.problems import refused
from service.node.node import Node
from workers.span_board import StoredSpan


def cluster_router(node: Node) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1", tags=["cluster"])

    @router.get("/nodes", summary="List the nodes that share this store", responses=refused(401))
    async def list_nodes() -> ClusterNodes:
        if node.seats is None:
            alone = ClusterNode(
                id=node.store.node_id, address=None, port=None, models=tuple(node.live.models), seen_s=0.0, is_this=True
            )
            return ClusterNodes(nodes=(alone,))
        own = node.fleet.spans.seat if node.fleet.spans is not None else None
        return ClusterNodes(
            nodes=tuple(
                ClusterNode(
                    id=seat.id,
                    address=seat.address,
                    port=seat.port,
                    models=tuple(seat.models),
                    seen_s=round(seat.seen_s, 1),
                    is_this=seat.id == own,
                )
                for seat in node.seats.seats
            )
        )

    @router.get("/spans", summary="List the engines that span several nodes", responses=refused(401))
    async def list_spans() -> EngineSpans:
        stored = node.fleet.spans.stored if node.fleet.spans is not None else {}
        return EngineSpans(spans=tuple(_shown(worker, span) for worker, span in sorted(stored.items())))

    return router


def _shown(worker: str, span: StoredSpan) -> EngineSpan:
    members = span.generation.members
    return EngineSpan(
        worker=worker,
        model=worker.rpartition("-")[0],
        generation=span.generation.number,
        is_running=span.because is None,
        because=span.because,
        members=tuple(
            EngineSpanMember(rank=rank, node=member.seat, address=member.address, devices=member.devices)
            for rank, member in enumerate(members)
        ),
    )

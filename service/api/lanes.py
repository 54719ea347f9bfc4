"""GET /v1/lanes: which models stand on which devices, and which come."""

from fastapi import APIRouter

from service.api import schemas
from service.api.problems import refused
from service.conversations.transcript import rfc3339
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_workers import LaneWorkers


def lanes_router(pool: LanePool) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/lanes", tags=["lanes"])

    @router.get("", summary="List lanes, and what stands on each", responses=refused(401))
    async def list_lanes() -> schemas.LaneList:
        return schemas.LaneList(lanes=[lane_document(pool, lane) for lane in pool.lanes])

    return router


def lane_document(pool: LanePool, workers: LaneWorkers) -> schemas.LaneOut:
    """Return a lane as it is shown."""
    lane, resident = workers.lane, workers.resident
    memory = pool.health.memory.get(lane.device.uuid) if pool.health is not None else None
    return schemas.LaneOut(
        lane=lane.id,
        device=lane.device.uuid,
        layout=lane.layout,
        memory_mib=lane.memory_mib,
        port=lane.port,
        resident=[resident] if resident else [],
        phase=workers.phase,
        next=workers.next,
        because=workers.current.because,
        need_mib=workers.current.spec.need_mib if resident else None,
        swaps=workers.swaps,
        load_s={model: round(seconds, 3) for model, seconds in workers.loads_s.items()},
        barred=sorted(workers.barred_now()),
        sick=pool.mark_of(workers),
        next_at=rfc3339(workers.next_at),
        device_memory=memory and schemas.DeviceMemoryOut(total_mib=memory.total_mib, used_mib=memory.used_mib),
        measured_mib=dict(pool.memory_use.most_mib) if pool.memory_use is not None else {},
    )

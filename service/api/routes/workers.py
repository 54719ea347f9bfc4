"""The HTTP API of workers and of the service's own health."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request

from roundhouse_client.values import node as node_values
from roundhouse_client.values import workers as values
from service.api.door.access import CallerNow, is_unknown
from service.api.errors.problems import refused
from service.config.tools import Equipment
from service.errors import NotReady, StoreUnavailable, WorkerNotFound
from service.scheduling.core.view import PoolsView
from service.store.store import Store
from workers.devices.device import DeviceMemory
from workers.fleet import Fleet
from workers.health.incident import Incident, RequestView, incident_document
from workers.health.kv_watch import KvWatch
from workers.health.latency_record import LatencyRecord
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_workers import LaneWorkers
from workers.policy.pace import Spread
from workers.process.handed_over import LogLine
from workers.process.identity import EngineExit
from workers.supervised import SupervisedWorker

STREAMS: Final[Mapping[int, str]] = {0: "roundhouse", 1: "stdout", 2: "stderr"}


def lanes_router(pool: LanePool) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/v1/lanes", tags=["lanes"])

    @router.get("", summary="List lanes, and the model on each", responses=refused(401))
    async def list_lanes() -> node_values.Lanes:
        return node_values.Lanes(lanes=tuple(shown_lane(pool, lane) for lane in pool.lanes))

    return router


def shown_lane(pool: LanePool, workers: LaneWorkers) -> node_values.Lane:
    """Return a lane as the API shows it."""
    lane, resident = workers.lane, workers.resident
    memory = pool.lanes.health.memory.get(lane.device.uuid) if pool.lanes.health is not None else None
    return node_values.Lane(
        lane=lane.id,
        device=lane.device.uuid,
        layout=lane.layout,
        memory_mib=lane.memory_mib,
        port=lane.port,
        resident=(resident,) if resident else (),
        phase=workers.phase,
        next=workers.next,
        because=workers.current.supervisor.because,
        need_mib=workers.current.spec.need_mib if resident else None,
        swaps=workers.swaps,
        load_s={model: round(seconds, 3) for model, seconds in workers.loads_s.items()},
        barred=tuple(sorted(workers.barred_now())),
        sick=workers.mark,
        next_at=workers.next_at,
        device_memory=_memory(memory),
        measured_mib=dict(pool.memory_use.most_mib) if pool.memory_use is not None else {},
    )


def _memory(memory: DeviceMemory | None) -> node_values.DeviceMemory | None:
    return None if memory is None else msgspec.convert(memory, node_values.DeviceMemory, from_attributes=True)


def workers_router(fleet: Fleet, view: Callable[[], PoolsView]) -> APIRouter:
    """Return the routes of workers; ``view`` gets the scheduler's view, since a takeover replaces the scheduler."""
    router = APIRouter(prefix="/v1/workers", tags=["workers"])

    shown = partial(shown_worker, view)

    def find(worker_id: str) -> SupervisedWorker:
        worker = fleet.get(worker_id)
        if worker is None:
            raise WorkerNotFound(worker_id)
        return worker

    @router.get("", summary="List workers", responses=refused(401))
    async def list_workers(caller: CallerNow) -> values.Workers:
        return values.Workers(workers=tuple(shown(worker, is_named=caller.sees_all) for worker in fleet))

    @router.get(
        "/{worker_id:path}/logs", summary="Read the engine's last output lines", responses=refused(400, 401, 404)
    )
    async def get_logs(
        worker_id: str,
        tail: Annotated[int, Query(ge=0, le=10_000)] = 100,
        after: Annotated[int, Query(ge=0, description="only lines with a larger number")] = 0,
    ) -> values.WorkerLog:
        worker = find(worker_id)
        lines = tuple(_line(line) for line in worker.supervisor.log.tail(tail, after=after))
        return values.WorkerLog(id=worker.spec.id, incarnation=worker.now.incarnation, lines=lines)

    @router.get("/{worker_id:path}/incidents", summary="Read a worker's incidents", responses=refused(401, 404))
    async def get_incidents(worker_id: str) -> values.Incidents:
        worker = find(worker_id)
        incidents = tuple(_incident(each) for each in worker.recorder.incidents)
        return values.Incidents(id=worker.spec.id, incidents=incidents)

    _add_operating(router, fleet, find, shown)

    # This route is last: a worker's id may hold slashes, as its model's name does.
    @router.get("/{worker_id:path}", summary="Read a worker", responses=refused(401, 404))
    async def get_worker(worker_id: str, caller: CallerNow) -> values.Worker:
        return shown(find(worker_id), is_named=caller.sees_all)

    return router


def _add_operating(
    router: APIRouter,
    fleet: Fleet,
    find: Callable[[str], SupervisedWorker],
    shown: Callable[[SupervisedWorker], values.Worker],
) -> None:
    @router.post(
        "/{worker_id:path}/restart", summary="Replace the engine now", status_code=202, responses=refused(401, 404)
    )
    async def restart(worker_id: str) -> values.Worker:
        worker = find(worker_id)
        if fleet.forgive(worker_id):  # its model was unloaded: start it and let it take turns
            worker.resume_nowait("an operator asked for a restart")
        else:
            worker.restart_nowait("an operator asked for a restart")
        return shown(worker)

    @router.post("/{worker_id:path}/drain", summary="Drain a worker", status_code=202, responses=refused(401, 404))
    async def drain(worker_id: str) -> values.Worker:
        worker = find(worker_id)
        worker.drain_nowait("drained by an operator")
        return shown(worker)

    @router.post(
        "/{worker_id:path}/resume",
        summary="Undo a drain, or start a worker that gave up",
        status_code=202,
        responses=refused(401, 404),
    )
    async def resume(worker_id: str) -> values.Worker:
        worker = find(worker_id)
        fleet.forgive(worker_id)
        worker.resume_nowait("an operator asked to resume")
        return shown(worker)


def health_router(fleet: Fleet, store: Store, tools: Equipment) -> APIRouter:
    """Return the routes that orchestrators probe."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", summary="200 while the process serves")
    async def healthz() -> node_values.Health:
        return node_values.Health(status="ok")

    @router.get("/readyz", summary="200 when models and store are ready", responses=refused(401, 503))
    async def readyz(request: Request) -> node_values.Readiness:
        missing = fleet.models_without_ready_worker()
        if is_unknown(request):  # only callers with a key see names
            if missing or store.trouble is not None:
                raise NotReady({})
            return node_values.Readiness(status="ready", without=())
        if missing:
            raise NotReady({model: fleet.trouble_of(model) for model in missing})
        if store.trouble is not None:
            raise StoreUnavailable(store.trouble)
        without = tuple(server for server in tool_servers(tools) if server.trouble is not None)
        return node_values.Readiness(status="ready", without=without)

    return router


def tool_servers(tools: Equipment) -> tuple[node_values.ToolServer, ...]:
    """Return the MCP servers as the API shows them."""
    return tuple(
        node_values.ToolServer(model=model, name=state.name, tools=state.tools, trouble=state.trouble)
        for model, state in tools.states()
    )


def shown_worker(view: Callable[[], PoolsView], worker: SupervisedWorker, *, is_named: bool = True) -> values.Worker:
    """Return a worker as the API shows it; ``view`` gives the slots and KV cache that turns and programs hold.

    ``is_named`` shows the job names of its requests.
    """
    now, pools = worker.snapshot(), view()
    return values.Worker(
        id=now.id,
        model=now.model,
        engine=now.engine,
        state=now.state,
        because=now.because,
        next_at=now.next_at,
        pid=now.pid,
        pgid=now.pid,  # the engine leads its own session and group
        port=now.port,
        incarnation=now.incarnation,
        restarts=max(0, now.incarnation - 1),
        slots=values.Slots(total=now.slots_total, in_use=now.slots_in_use, held=pools.held(now.id)),
        slots_configured=now.slots_configured,
        slots_because=now.slots_because,
        last_exit=_exit(now.last_exit),
        verdict=now.verdict,
        requests=tuple(_request(view, is_named=is_named) for view in now.requests),
        tokens_per_s=round(now.tokens_per_s, 1),
        pace=_pace(worker.requests.latency),
        kv=_kv(worker.kv, pools.reserved(now.id)),
        weight_version=now.weight_version,
        ignored=now.ignored,
        not_continued=now.not_continued,
    )


def _request(view: RequestView, *, is_named: bool) -> values.WorkerRequest:
    shown = msgspec.convert(view, values.WorkerRequest, from_attributes=True)
    return shown if is_named else replace(shown, job_name="")


def _line(line: LogLine) -> values.LogLine:
    stream = STREAMS[line.stream]
    return values.LogLine(
        number=line.number, incarnation=line.incarnation, stream=stream, at=line.at_utc, text=line.text
    )


def _pace(latency: LatencyRecord) -> values.Pace:
    pace, error = latency.pace, latency.error
    return values.Pace(
        prefill_ms=_spread(pace.prefill_ms),
        decode_ms=_spread(pace.kernel_ms()),
        error=None if error is None else round(error, 3),
    )


def _spread(spread: Spread | None) -> values.Spread | None:
    return None if spread is None else msgspec.convert(spread, values.Spread, from_attributes=True)


def _kv(watch: KvWatch, reserved: int) -> values.KvCache | None:
    if watch.budget is None or watch.cache is None:
        return None
    return values.KvCache(budget=watch.budget, reserved=reserved, used=watch.cache.used)


def _exit(ended: EngineExit | None) -> values.EngineExit | None:
    if ended is None:
        return None
    fields = {name: value for name, value in asdict(ended).items() if name != "parted"}
    return values.EngineExit(**fields, text=str(ended) if ended.parted is None else ended.parted.because)


def _incident(incident: Incident) -> values.Incident:
    shown = {**incident_document(incident), "exit": _exit(incident.exit)}
    return msgspec.convert(shown, values.Incident)

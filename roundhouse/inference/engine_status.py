"""The status of an inference engine's lanes, models and agents: values of one moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roundhouse.inference.lane_agents import LaneAgent
from roundhouse.inference.runs import AgentRuns
from workers.health.incident import WorkerSnapshot
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_workers import LaneWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStatus:
    """One lane: its device, and the workers of its models; ``current`` is the one whose engine is there, or was last.

    ``sick`` says why the device is left alone, and ``lacking`` are adapters that the current engine has yet to take.
    """

    lane: str
    device: str
    resident: str | None
    sick: str | None
    current: WorkerSnapshot
    workers: tuple[WorkerSnapshot, ...]
    lacking: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model: the runs that wait for it, whether any lane could have it, and in ``trouble`` what they wait for.

    ``need_mib`` is the memory that it is placed by: as its files tell, or as it was seen to take (``measured_mib``).
    """

    waiting: int
    has_room: bool
    is_lost: bool
    trouble: str
    hint: str | None  # the lane that it is for
    need_mib: int | None
    measured_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The lanes and models of an inference engine that agents were registered for, and each agent's last lane.

    ``sick`` are the devices that are left alone, and why.
    """

    lanes: tuple[LaneStatus, ...]
    models: Mapping[str, ModelStatus]
    last_lanes: Mapping[str, str]
    sick: Mapping[str, str]


def engine_status(pool: LanePool, runs: AgentRuns, agents: Iterable[LaneAgent]) -> EngineStatus:
    """Describe lanes, models and agents at this moment."""
    health = pool.lanes.health
    return EngineStatus(
        lanes=tuple(_lane_status(lane) for lane in pool.lanes),
        models={model: _model_status(pool, runs.waiting.get(model, 0), model) for model in pool.lanes.models},
        last_lanes={agent.id: agent.last_lane for agent in agents if agent.last_lane},
        sick={} if health is None else {uuid: mark.because for uuid, mark in health.marks.items()},
    )


def _lane_status(lane: LaneWorkers) -> LaneStatus:
    return LaneStatus(
        lane=lane.lane.id,
        device=lane.lane.device.uuid,
        resident=lane.resident,
        sick=lane.mark,
        current=lane.current.snapshot(),
        workers=tuple(worker.snapshot() for worker in lane),
        lacking=tuple(lane.current.adapters.missing),
    )


def _model_status(pool: LanePool, waiting: int, model: str) -> ModelStatus:
    spec, seen = pool.lanes.specs[model], pool.memory_use
    return ModelStatus(
        waiting=waiting,
        has_room=pool.lanes.has_room(model),
        is_lost=pool.lanes.is_lost(model),
        trouble=pool.lanes.trouble_of(model),
        hint=pool.demand.hints.get(model),
        need_mib=spec.need_mib if seen is None else seen.need_mib(spec),
        measured_mib=None if seen is None else seen.most_mib.get(model),
    )

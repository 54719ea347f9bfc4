"""What is shown of a worker."""

from dataclasses import dataclass
from datetime import datetime

from workers.health.incident import RequestView
from workers.policy.liveness import Verdict
from workers.process.identity import EngineExit
from workers.spec import WorkerId
from workers.states import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A worker at one moment; advisory."""

    id: WorkerId
    model: str
    engine: str
    state: WorkerState
    because: str
    next_at: datetime | None
    pid: int | None
    port: int
    incarnation: int
    slots_total: int
    slots_configured: int
    slots_in_use: int
    slots_because: str | None
    last_exit: EngineExit | None
    verdict: Verdict | None
    requests: tuple[RequestView, ...]
    tokens_per_s: float
    weight_version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimit:
    """Fewer slots than the engine says that it holds, and why."""

    slots: int
    because: str

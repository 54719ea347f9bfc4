"""What is kept of a worker over its incarnations: its output, its states, and what broke."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import quote

from workers.engine.log_ring import LogRing
from workers.engine.supervisor import Moves
from workers.health.incident import Incidents
from workers.spec import WorkerId, WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Diary:
    """One for each id of a worker: the models that come to a lane one after the other share it."""

    log: LogRing
    moves: Moves
    incidents: Incidents

    @classmethod
    def of_worker(cls, spec: WorkerSpec) -> Self:
        """Return a worker's, with the incidents of earlier lives of ours where a folder has them."""
        file = spec.state_dir / "incidents" / _file_name(spec.id) if spec.state_dir else None
        return cls(log=LogRing(), moves=Moves(), incidents=Incidents(file))


def _file_name(worker_id: WorkerId) -> str:
    return f"{quote(worker_id, safe='')}.jsonl"

"""One update of weights: the request, and its progress. Values and measurements; no I/O."""

from collections.abc import Callable, Mapping

import msgspec

from workers.policy.weight_update import UpdateProgress, UpdateStage, UpdateState, WorkerPart
from workers.policy.weights import UpdateMode, UpdatePhase
from workers.spec import WorkerId


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that a trainer broadcasts; ``dtype`` is torch's name for it (``bfloat16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def document(self) -> dict[str, object]:
        """The form in which an engine receives it."""
        return {"name": self.name, "dtype": self.dtype.removeprefix("torch."), "shape": list(self.shape)}


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's update: the folder of a checkpoint, or tensors that a trainer will broadcast in order.

    ``version`` None is the next one. With ``clear_cache`` kept requests read their prompts again. Tensors are broadcast
    together until they are ``bucket_bytes``; with 0 one by one. ``group`` is the number of the trainer's group, if it
    gives one.
    """

    version: int | None = None
    mode: UpdateMode = UpdateMode.KEEP
    clear_cache: bool = True
    checkpoint: str | None = None
    tensors: tuple[Tensor, ...] = ()
    bucket_bytes: int = 0
    group: int | None = None


class WorkerProgress:
    """The progress of one worker in an update; it has been in its ``stage`` since ``since``, in monotonic seconds."""

    def __init__(self, worker: WorkerId, incarnation: int, now: float) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.part = WorkerPart()
        self.since = now
        self.received = 0  # tensors
        self.total = 0
        self.paused_at: float | None = None
        self.paused_s = 0.0

    def __repr__(self) -> str:
        return f"<WorkerProgress {self.worker} {self.stage} {self.error or ''}>"

    @property
    def stage(self) -> UpdateStage:
        """The stage that it is in."""
        return self.part.stage

    @property
    def error(self) -> str | None:
        """Why it has failed."""
        return self.part.error

    def take_part(self, part: WorkerPart, now: float) -> None:
        """Set the worker's new part."""
        if part.stage is not self.part.stage:
            self.since = now
        self.part = part


class WeightUpdate:
    """An update, running or over; written by its ``UpdateRun``. Times are monotonic seconds of ``clock``."""

    def __init__(
        self,
        number: int,
        version: int,
        previous: int,
        request: UpdateRequest,
        clock: Callable[[], float],
        incarnations: Mapping[WorkerId, int],
    ) -> None:
        self.number = number
        self.version = version
        self.previous = previous
        self.request = request
        self.clock = clock
        self.shares = {worker: WorkerProgress(worker, number, clock()) for worker, number in incarnations.items()}
        self.state = UpdateState.RUNNING
        self.phase = UpdatePhase.PAUSE
        self.error: str | None = None
        self.phase_s: dict[UpdatePhase, float] = {}

    def __repr__(self) -> str:
        return f"<WeightUpdate {self.number} to {self.version} {self.state} {self.phase}>"

    @property
    def survivors(self) -> list[WorkerProgress]:
        """The workers that have not failed."""
        return [share for share in self.shares.values() if share.error is None]

    def take_progress(self, progress: UpdateProgress) -> None:
        """Set the decided progress."""
        self.state, self.phase, self.error = progress.state, progress.phase, progress.error
        for worker, part in progress.parts.items():
            self.shares[WorkerId(worker)].take_part(part, self.clock())

    def complete(self) -> None:
        """Complete an update that had no engine to change."""
        self.state = UpdateState.COMPLETED

    def fail(self, because: str) -> None:
        """End the update as failed."""
        self.state, self.error = UpdateState.FAILED, because

"""One update of weights as it is asked for, and as it goes. Values and their changes; no I/O."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from workers.spec import WorkerId
from workers.weights.phases import Phase, UpdateMode


class UpdateState(StrEnum):
    """How an update stands."""

    RUNNING = "running"
    COMPLETED = "completed"
    PARTIAL = "partial"  # the version is the model's; workers that failed are started again, and brought to it
    FAILED = "failed"  # the model has the version that it had before


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor that a trainer broadcasts; ``dtype`` is torch's word for it (``bfloat16``)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def document(self) -> dict[str, object]:
        """The form in which an engine is told of it."""
        return {"name": self.name, "dtype": self.dtype.removeprefix("torch."), "shape": list(self.shape)}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequest:
    """What somebody asks for: the folder of a checkpoint, or tensors that a trainer will broadcast in their order.

    ``version`` None is the next one. With ``clear_cache`` requests that are kept read their prompts again. Tensors are
    broadcast together until they are ``bucket_bytes``; with 0 each by itself.
    """

    version: int | None = None
    mode: UpdateMode = UpdateMode.KEEP
    clear_cache: bool = True
    checkpoint: str | None = None
    tensors: tuple[Tensor, ...] = ()
    bucket_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class Share:
    """One worker's part in an update; ``stage`` is what it does, since ``since``, in monotonic seconds."""

    worker: WorkerId
    incarnation: int
    stage: str = "waiting"
    since: float = 0.0
    received: int = 0
    total: int = 0
    error: str | None = None
    paused_at: float | None = None
    paused_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class WeightUpdate:
    """An update, running or over; written by whoever runs it. Times are monotonic seconds of ``clock``."""

    number: int
    version: int
    previous: int
    request: UpdateRequest
    clock: Callable[[], float]
    shares: dict[WorkerId, Share]
    state: UpdateState = UpdateState.RUNNING
    phase: Phase = Phase.PAUSE
    error: str | None = None
    phase_s: dict[Phase, float] = field(default_factory=dict)

    @property
    def survivors(self) -> list[Share]:
        """The workers that have failed in nothing yet."""
        return [share for share in self.shares.values() if share.error is None]

    @property
    def failed(self) -> list[Share]:
        """The workers that have failed."""
        return [share for share in self.shares.values() if share.error is not None]

    def enter(self, share: Share, stage: str) -> None:
        """Take the fact that a worker does something else from here on."""
        share.stage, share.since = stage, self.clock()

    def fail(self, share: Share, because: str) -> None:
        """Take the fact that a worker is out of it; the first reason stands."""
        if share.error is None:
            share.error = f"{self.phase}: {because}"
            self.enter(share, "failed")

    def words(self) -> str:
        """Name who failed, and how."""
        return "; ".join(f"{share.worker}: {share.error}" for share in self.failed)

"""One update of weights as it is asked for, and as it goes. Values and their changes; no I/O."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    broadcast together until they are ``bucket_bytes``; with 0 each by itself. ``group`` is the number of the group that
    the trainer is in, where it says so.
    """

    version: int | None = None
    mode: UpdateMode = UpdateMode.KEEP
    clear_cache: bool = True
    checkpoint: str | None = None
    tensors: tuple[Tensor, ...] = ()
    bucket_bytes: int = 0
    group: int | None = None


class Share:
    """One worker's part in an update; ``stage`` is what it does, since ``since``, in monotonic seconds."""

    def __init__(self, worker: WorkerId, incarnation: int, now: float) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.stage = "waiting"
        self.since = now
        self.received = 0  # tensors
        self.total = 0
        self.error: str | None = None
        self.is_late = False  # whether it has outrun a limit, and by its own doing
        self.paused_at: float | None = None
        self.paused_s = 0.0

    def __repr__(self) -> str:
        """State what it does."""
        return f"<Share {self.worker} {self.stage} {self.error or ''}>"


class WeightUpdate:
    """An update, running or over; written by whoever runs it. Times are monotonic seconds of ``clock``."""

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
        self.shares = {worker: Share(worker, incarnation, clock()) for worker, incarnation in incarnations.items()}
        self.state = UpdateState.RUNNING
        self.phase = Phase.PAUSE
        self.error: str | None = None
        self.is_late = False  # whether it has outrun a limit, and by its own doing
        self.phase_s: dict[Phase, float] = {}

    def __repr__(self) -> str:
        """State how far it is."""
        return f"<WeightUpdate {self.number} to {self.version} {self.state} {self.phase}>"

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

"""Jobs and their progress, batches and deliveries."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from roundhouse_client.values.transcripts import GivenUp
from roundhouse_client.values.value import Value

GOING_ON: Final = frozenset({"queued", "running"})  # every other state of a job is an end, in newer versions too


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationCounts(Value):
    """The number of a job's conversations in each state."""

    total: int
    completed: int
    failed: int
    cancelled: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts(Value):
    """The number of a job's turns in each state; ``pending`` ones wait for other turns, ``ready`` ones for a slot.

    ``awaited`` ones wait for a caller.
    """

    total: int
    pending: int
    ready: int
    in_flight: int
    completed: int
    failed: int
    cancelled: int
    awaited: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress(Value):
    """The progress of a job."""

    conversations: ConversationCounts
    turns: TurnCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Value):
    """A job; ``state`` is queued, running, completed, completed_with_failures, failed or cancelled."""

    id: str
    name: str
    state: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    progress: JobProgress
    metadata: Mapping[str, object]
    is_metadata_cut: bool  # in lists, metadata above 4 KiB is cut: the job itself has all
    key: str | None  # name of the key that posted it
    waits_for: tuple[str, ...] = ()  # needs that only an operator can meet: models that were removed
    given_up: tuple[GivenUp, ...] = ()  # the first ten, patterns cut; the result has all

    @property
    def has_ended(self) -> bool:
        """Whether the job is over."""
        return self.state not in GOING_ON


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage(Value):
    """Jobs, the newest first; ``next_cursor`` gets the next page, and is None at the end."""

    jobs: tuple[Job, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFault(Value):
    """One fault of a line of a batch."""

    path: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine(Value):
    """The result of one line of a batch: a job with its ``id``, or a problem with its ``code``.

    ``status`` is 202 for a new job, 200 for one that the same key posted before, or the problem's.
    """

    line: int
    status: int
    id: str | None = None
    name: str | None = None
    state: str | None = None
    code: str | None = None
    detail: str | None = None
    errors: tuple[LineFault, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Value):
    """A message to a job's webhook; ``state`` is waiting, delivered or given_up."""

    id: str
    url: str
    state: str
    attempts: int
    last_error: str | None
    next_at: datetime
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries(Value):
    """The messages of a job."""

    deliveries: tuple[Delivery, ...]

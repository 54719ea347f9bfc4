"""What the HTTP surface answers, for its description in /openapi.json."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from service.conversations.states import ConversationState, JobState, TurnState
from service.conversations.transcript import TokenUsage
from service.node.status import Pools
from workers.health.incident import RequestView
from workers.health.probes import KernelView
from workers.policy.pace import Spread


class Body(BaseModel):
    """What is answered has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ConversationCounts(Body):
    """How many conversations are how far."""

    total: int
    completed: int
    failed: int
    cancelled: int


class TurnCounts(Body):
    """How many turns are how far."""

    total: int
    pending: int
    ready: int
    in_flight: int
    completed: int
    failed: int
    cancelled: int


class ProgressOut(Body):
    """How far a job is."""

    conversations: ConversationCounts
    turns: TurnCounts


class JobOut(Body):
    """A job."""

    id: str
    name: str
    state: JobState
    created_at: str
    started_at: str | None
    finished_at: str | None
    progress: ProgressOut
    key: str | None  # the name of the key that it was posted with
    metadata: dict[str, object]
    is_metadata_cut: bool  # in a list, where it is larger than 4 KiB: the job itself has it
    waits_for: list[str]  # what it waits for that only an operator brings: models that were removed


class JobList(Body):
    """A page of jobs, the newest first."""

    jobs: list[JobOut]
    next_cursor: str | None


class ProblemFault(Body):
    """One thing that is wrong with a request."""

    path: str
    message: str


class BatchLine(Body):
    """What became of one line of a batch: a job, or a problem."""

    line: int
    status: int
    id: str | None = None
    name: str | None = None
    state: JobState | None = None
    code: str | None = None
    detail: str | None = None
    errors: list[ProblemFault] = []


class DeliveryOut(Body):
    """One message to a webhook: waiting, delivered or given up."""

    id: str
    url: str
    state: str
    attempts: int
    last_error: str | None
    next_at: str
    created_at: str


class DeliveryList(Body):
    """The messages of a job."""

    deliveries: list[DeliveryOut]


class AttemptOut(Body):
    """One try of a turn; ``constrained_by`` is the engine's parameter that held the model to its validation."""

    outcome: TurnState
    reason: str | None
    detail: str | None
    text: str
    worker: str
    incarnation: int
    started_at: datetime
    finished_at: datetime
    tool_calls: list[dict[str, object]]
    constrained_by: str | None


class TurnOut(Body):
    """One agent speaking once in one round."""

    agent: str
    role: str
    round: int
    state: TurnState
    reason: str | None
    detail: str | None
    text: str
    thinking: str
    tool_calls: list[dict[str, object]]
    signals: list[dict[str, object]]
    finish_reason: str | None
    attempts: list[AttemptOut]
    usage: TokenUsage
    worker: str | None
    incarnation: int | None
    weight_version: int | None
    weight_version_end: int | None
    queued_at: datetime | None
    started_at: datetime | None
    first_token_at: datetime | None
    finished_at: datetime | None


class TranscriptOut(Body):
    """One conversation; turns in the order in which they became visible."""

    id: str
    state: ConversationState
    reason: str | None
    metadata: dict[str, object]
    turns: list[TurnOut]


class PromptOut(Body):
    """What one attempt was asked: messages as the engine was sent them last, parameters, and definitions of tools.

    Null where an older version of Roundhouse asked, and kept nothing of it.
    """

    messages: list[dict[str, object]] | None
    params: dict[str, object] | None
    tools: list[dict[str, object]]


class PromptsOut(Body):
    """What was really asked for a turn: an entry for each of its attempts, in their order."""

    attempts: list[PromptOut]


class ResultOut(Body):
    """All transcripts of a job that has ended."""

    id: str
    state: JobState
    conversations: list[TranscriptOut]


class SlotsOut(Body):
    """A worker's slots."""

    total: int
    in_use: int


class ExitOut(Body):
    """How an engine's process ended."""

    status: int | None
    signal: int | None
    text: str
    max_rss_bytes: int | None
    cpu_s: float | None


class MemoryAtIncident(Body):
    """MiB of a device's memory at the last look before, and what each process had by its pid, where that was seen."""

    total_mib: int
    used_mib: int
    held: dict[int, int] | None


class IncidentOut(Body):
    """One broken incarnation; the tails are the last lines of its two streams, ``pools`` all turns at that moment."""

    worker: str
    incarnation: int
    at: datetime
    reason: str
    because: str
    verdict: str | None
    exit: ExitOut | None
    stdout_tail: list[str]
    stderr_tail: list[str]
    kernel: KernelView
    in_flight: list[RequestView]
    finding: str | None
    model: str | None  # None where an older version kept it
    device: str | None  # of a lane
    device_memory: MemoryAtIncident | None
    pools: Pools | None


class IncidentsOut(Body):
    """A worker's incidents, the newest first."""

    id: str
    incidents: list[IncidentOut]


class PaceOut(Body):
    """How fast an engine is, and by what part of what they took predictions of its answers were off, in the middle."""

    prefill_ms: Spread | None  # a token of a prompt
    decode_ms: Spread | None  # a token of an answer
    error: float | None


class KvOut(Body):
    """A KV cache that is lent by tokens: how many are lent in all, to the turns there, and how many the engine uses."""

    budget: int
    reserved: int
    used: int


class WorkerOut(Body):
    """A worker."""

    id: str
    model: str
    engine: str
    state: str
    because: str
    next_at: str | None  # when something follows of itself, where anything does
    pid: int | None
    pgid: int | None
    port: int
    incarnation: int
    restarts: int
    slots: SlotsOut
    slots_configured: int
    slots_because: str | None  # why they are fewer than the engine holds, where they are
    last_exit: ExitOut | None
    verdict: str | None
    requests: list[RequestView]
    tokens_per_s: float
    pace: PaceOut
    kv: KvOut | None
    weight_version: int | None


class WorkerList(Body):
    """All workers, in the order of the configuration."""

    workers: list[WorkerOut]


class DeviceMemoryOut(Body):
    """A device's memory in MiB."""

    total_mib: int
    used_mib: int


class LaneOut(Body):
    """A lane: its place, the model whose engine is there, the one that it is kept for, and what its loads took."""

    lane: str
    device: str  # the UUID of a GPU or slice, or "cpu"
    layout: str
    memory_mib: int | None
    port: int
    resident: list[str]
    phase: str
    next: str | None
    because: str
    need_mib: int | None  # of the resident, where it is known
    swaps: int
    load_s: dict[str, float]  # of each model that was loaded here: its last load
    barred: list[str]  # models that gave up here, and are tried elsewhere meanwhile
    sick: str | None  # why its device is left alone, where it is
    next_at: str | None  # when it is tried again of itself
    device_memory: DeviceMemoryOut | None  # at the last look, where it can be looked at
    measured_mib: dict[str, int]  # the most that an engine of each model was seen to take, on any lane


class LaneList(Body):
    """All lanes, device by device."""

    lanes: list[LaneOut]


class LogLineOut(Body):
    """One line that an engine printed."""

    number: int
    incarnation: int
    stream: Literal["stdout", "stderr", "roundhouse"]
    at: str
    text: str


class LogsOut(Body):
    """The last lines of a worker's engine, of this and the previous incarnation."""

    id: str
    incarnation: int
    lines: list[LogLineOut]


class HealthOut(Body):
    """The process serves."""

    status: Literal["ok"]


class ToolServerOut(Body):
    """An MCP server of a model; ``trouble`` is why it is not connected, ``tools`` how many it listed last."""

    model: str
    name: str
    tools: int | None
    trouble: str | None


class ReadyOut(Body):
    """Every model has a ready worker; ``without`` are the MCP servers that are not connected: their tools fail."""

    status: Literal["ready"]
    without: list[ToolServerOut]


class Problem(Body):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemFault]

"""Workers, and their engines' requests, logs and incidents."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots(Value):
    """A worker's slots; ``held`` ones are kept for the next requests of their programs."""

    total: int
    in_use: int
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExit(Value):
    """The end of an engine's process."""

    status: int | None
    signal: int | None
    text: str
    max_rss_bytes: int | None
    cpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Value):
    """The evidence for a verdict; times are in seconds before it, None for never."""

    silent_s: float
    limit_s: float | None
    last_byte_s: float | None
    prompt_tokens_done: int | None
    prompt_tokens: int | None
    output_tokens: int
    counters: str | None
    counters_rose_s: float | None
    cpu_percent: float | None
    log_grew_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest(Value):
    """One request in flight; ``held_s`` is its time there in seconds."""

    id: int
    job_name: str
    verdict: str
    evidence: Evidence
    held_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Value):
    """A measure in milliseconds: median, minimum and maximum of the newest values."""

    middle: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace(Value):
    """The pace of an engine, per token read and written; ``error`` is the relative error of predictions."""

    prefill_ms: Spread | None
    decode_ms: Spread | None
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache(Value):
    """A KV cache that is lent by tokens: all tokens, those reserved for turns, and those that the engine uses."""

    budget: int
    reserved: int
    used: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Value):
    """A worker; ``state`` is starting, ready, draining, stopping, stopped, backoff or failed, ``because`` its cause."""

    id: str
    model: str
    engine: str
    state: str
    because: str
    next_at: datetime | None
    pid: int | None
    pgid: int | None
    port: int
    incarnation: int
    restarts: int
    slots: Slots
    slots_configured: int
    slots_because: str | None
    last_exit: EngineExit | None
    verdict: str | None
    requests: tuple[WorkerRequest, ...]
    tokens_per_s: float
    pace: Pace
    kv: KvCache | None
    weight_version: int | None
    ignored: tuple[str, ...] = ()
    not_continued: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Value):
    """All workers, in the order of the configuration."""

    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine(Value):
    """One line that an engine printed; ``stream`` is stdout, stderr or roundhouse."""

    number: int
    incarnation: int
    stream: str
    at: datetime
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLog(Value):
    """The last lines of a worker's engine, of this and the previous incarnation."""

    id: str
    incarnation: int
    lines: tuple[LogLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Value):
    """One process of an engine, as seen by the kernel."""

    pid: int
    name: str
    state: str
    wchan: str | None
    rss_bytes: int
    cpu_s: float
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTree(Value):
    """An engine's whole process tree at one moment."""

    processes: tuple[Process, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtIncident(Value):
    """A device's memory in MiB at the last look before, and each process's by its pid, where seen."""

    total_mib: int
    used_mib: int
    held: Mapping[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools(Value):
    """The number of turns in each of the three pools, and the number of slots."""

    pending: int
    ready: int
    in_flight: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Value):
    """One broken incarnation: the decision and its cause, its end, and its last output."""

    worker: str
    incarnation: int
    at: datetime
    reason: str
    because: str
    verdict: str | None
    exit: EngineExit | None
    stdout_tail: tuple[str, ...]
    stderr_tail: tuple[str, ...]
    kernel: ProcessTree
    in_flight: tuple[WorkerRequest, ...]
    finding: str | None
    model: str | None
    device: str | None
    device_memory: MemoryAtIncident | None
    pools: Pools | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incidents(Value):
    """A worker's incidents, the newest first."""

    id: str
    incidents: tuple[Incident, ...]

"""A whole node: its status, its lanes and its health."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value
from roundhouse_client.values.workers import Pools, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationsSoFar(Value):
    """The conversations that this life of the service has taken up: ended, and durably so."""

    total: int
    finished: int
    persisted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTokens(Value):
    """The tokens of agents' last prompts that engines could have reused, and those that they report to have."""

    reusable: int
    reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTurn(Value):
    """One turn that waits, and for what."""

    job: str
    name: str
    conversation: str
    agent: str
    round: int
    model: str
    waits_for: str
    next_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHeads(Value):
    """The turns that wait at the heads of the pools."""

    pending: tuple[WaitingTurn, ...]
    ready: tuple[WaitingTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus(Value):
    """The store as the node sees it; ``trouble`` is what ails it."""

    node: str
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServer(Value):
    """An MCP server of a model; ``trouble`` is why it is not connected, ``tools`` how many it listed last."""

    model: str
    name: str
    tools: int | None
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory(Value):
    """A device's memory in MiB."""

    total_mib: int
    used_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane(Value):
    """A lane: its place, the model whose engine is there, the one that it is kept for, and what its loads took."""

    lane: str
    device: str
    layout: str
    memory_mib: int | None
    port: int
    resident: tuple[str, ...]
    phase: str
    next: str | None
    because: str
    need_mib: int | None
    swaps: int
    load_s: Mapping[str, float]
    barred: tuple[str, ...]
    sick: str | None
    next_at: datetime | None
    device_memory: DeviceMemory | None
    measured_mib: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes(Value):
    """All lanes, device by device."""

    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadFailure(Value):
    """The last reload of the configuration, where it changed nothing."""

    at: datetime
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(Value):
    """The configuration in force; ``under_way`` says what workers have yet to do until they are as it wants them."""

    loaded_at: datetime
    failure: ReloadFailure | None
    under_way: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload(Value):
    """The changes of a reload: settings that are in force by now, and models by their names.

    ``restarted`` and ``resized`` models are changed worker after worker, from then on.
    """

    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    resized: tuple[str, ...]
    restarted: tuple[str, ...]
    unchanged: tuple[str, ...]
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Value):
    """A moment of a node; ``jobs`` are those that have not ended, ``ended_turns`` those of jobs since its start.

    ``unclaimed`` says of each model what the conversations wait for that need it next and that no node runs.
    """

    jobs: int
    conversations: ConversationsSoFar
    ended_turns: int | None
    pools: Pools
    prefix_tokens: PrefixTokens
    heads: PoolHeads
    unclaimed: Mapping[str, str]
    store: StoreStatus
    tool_servers: tuple[ToolServer, ...]
    lanes: tuple[Lane, ...]
    workers: tuple[Worker, ...]
    configuration: Configuration | None = None  # None of an older service
    awaited: int = 0  # turns that wait for a caller to speak, in the whole store


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakingTurn(Value):
    """A turn on a slot; ``words`` are the last that it has said, or thought where it ``is_thinking``."""

    job: str
    name: str
    conversation: str
    agent: str
    round: int
    worker: str
    running_s: float
    output_tokens: int
    is_thinking: bool
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaking(Value):
    """The turns on slots, those that started last first; ``is_cut``: there are more."""

    turns: tuple[SpeakingTurn, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine(Value):
    """One line of usage; the first five fields say of what, as far as was asked for.

    ``prompt_tokens``, of which ``cached_tokens`` were in a cache, and ``answer_tokens`` are of attempts that stand,
    ``wasted_tokens`` of those that do not. ``slot_s`` is for how long slots were held, in seconds.
    """

    key: str | None = None
    job: str | None = None
    agent: str | None = None
    model: str | None = None
    day: str | None = None
    turns: int
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    wasted_tokens: int
    slot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport(Value):
    """Usage, in a line for each combination of ``by``; ``is_cut``: there are more than were asked for."""

    by: tuple[str, ...]
    usage: tuple[UsageLine, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Health(Value):
    """The process serves."""

    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(Value):
    """Every model has a ready worker; ``without`` are the MCP servers that are not connected."""

    status: str
    without: tuple[ToolServer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpgradeEnd(Value):
    """The result of an upgrade in place; ``detail`` is why it was refused, None where it was done.

    ``roundhouse`` is the version that left, or stayed. ``seconds`` is how long no program served. ``kept_servers`` and
    ``ended_servers`` are MCP servers over stdio, as MODEL/SERVER.
    """

    at: datetime
    roundhouse: str
    detail: str | None
    seconds: float | None
    kept: tuple[str, ...]
    ended: Mapping[str, str]
    kept_servers: tuple[str, ...]
    ended_servers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceProgram(Value):
    """The program that serves, and how many upgrades in place its process has seen."""

    version: str
    pid: int
    upgrades: int
    phase: str
    last: UpgradeEnd | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedUpgrade(ServiceProgram):
    """An upgrade in place that has begun: to which version, and what becomes of workers' engines."""

    to_version: str
    kept: tuple[str, ...]
    ended: Mapping[str, str]
    started: tuple[str, ...]

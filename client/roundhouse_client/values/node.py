"""A node: its status, lanes, usage, health and upgrades."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value
from roundhouse_client.values.workers import Pools, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationsSoFar(Value):
    """The conversations since the service's start: all, ended ones, and durably ended ones."""

    total: int
    finished: int
    persisted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTokens(Value):
    """Prompt tokens that engines could have reused from agents' last prompts, and those that they report as reused."""

    reusable: int
    reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingTurn(Value):
    """One waiting turn, with what it waits for."""

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
    """The first waiting turns of the pools."""

    pending: tuple[WaitingTurn, ...]
    ready: tuple[WaitingTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus(Value):
    """The store as the node sees it; ``trouble`` is its present problem."""

    node: str
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServer(Value):
    """An MCP server of a model; ``trouble`` is why it is not connected, ``tools`` the number that it listed last."""

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
    """A lane: its place, its model, the next one, and the times of its loads."""

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
    """The last reload of the configuration, if it failed and changed nothing."""

    at: datetime
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration(Value):
    """The configuration in force; ``under_way`` lists the changes that workers have yet to make for it."""

    loaded_at: datetime
    failure: ReloadFailure | None
    under_way: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload(Value):
    """The changes of a reload: settings now in force, and models by name.

    ``restarted`` and ``resized`` models change afterwards, worker after worker.
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
    """A node at one moment; ``jobs`` counts unfinished jobs, ``ended_turns`` jobs' turns since its start.

    ``unclaimed`` says, per model, what conversations that need it next and that no node runs wait for.
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
    configuration: Configuration | None = None  # None from an older service
    awaited: int = 0  # turns in the whole store that wait for a caller


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakingTurn(Value):
    """A turn on a slot; ``words`` are its last words, or thoughts if it ``is_thinking``."""

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
    """The turns on slots, the newest first; ``is_cut``: there are more."""

    turns: tuple[SpeakingTurn, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine(Value):
    """One line of usage; the first five fields are the requested dimensions.

    ``prompt_tokens``, including ``cached_tokens`` from a cache, and ``answer_tokens`` count attempts that stand,
    ``wasted_tokens`` those that do not. ``slot_s`` is the time on slots in seconds.
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
    """Usage, in a line for each combination of ``by``; ``is_cut``: there are more lines than the limit."""

    by: tuple[str, ...]
    usage: tuple[UsageLine, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult(Value):
    """The HTTP status with which a node has made a change that was asked of all nodes."""

    url: str
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode(Value):
    """A node of the store, last seen ``seen_s`` seconds ago; without ``address`` other nodes cannot reach it."""

    id: str
    address: str | None
    port: int | None
    models: tuple[str, ...]
    seen_s: float
    is_this: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNodes(Value):
    """The nodes that share a store, as the node that answers last saw them."""

    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpanMember(Value):
    """A node's part of an engine; the member of rank 0 leads it and serves its requests."""

    rank: int
    node: str
    address: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpan(Value):
    """The newest generation of an engine that spans several nodes; ``because`` is why it is over."""

    worker: str
    model: str
    generation: int
    is_running: bool
    because: str | None
    members: tuple[EngineSpanMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpans(Value):
    """The engines that span several nodes."""

    spans: tuple[EngineSpan, ...]


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
    """The result of an upgrade in place; ``detail`` is why it was refused, None if it was done.

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
    """The serving program, and the number of upgrades in place of its process."""

    version: str
    pid: int
    upgrades: int
    phase: str
    last: UpgradeEnd | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedUpgrade(ServiceProgram):
    """An upgrade in place that has begun: its version, and the fate of workers' engines."""

    to_version: str
    kept: tuple[str, ...]
    ended: Mapping[str, str]
    started: tuple[str, ...]

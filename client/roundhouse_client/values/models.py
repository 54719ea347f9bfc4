"""Models, and their tools, adapters and weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from roundhouse_client.values.value import Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Value):
    """A model, or an adapter on the model ``root``; ``max_model_len`` is its context in tokens, None if unknown.

    The other fields are those that OpenAI's clients expect.
    """

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None = None  # None from an older service as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Models(Value):
    """All models of a service, and the adapters on them."""

    object: str
    data: tuple[Model, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(Value):
    """One tool; ``server`` is its MCP server, None for a Python callable."""

    name: str
    description: str
    parameters: Mapping[str, object]
    server: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer(Value):
    """An MCP server of the model; ``trouble`` is why it is not connected, ``tools`` the number that it listed last."""

    name: str
    tools: int | None
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools(Value):
    """A model's tools by name, and their servers."""

    model: str
    tools: tuple[Tool, ...]
    servers: tuple[McpServer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter(Value):
    """One LoRA adapter; ``workers`` are those whose engines have it now."""

    name: str
    is_configured: bool
    source: str
    digest: str | None
    size: int | None
    loaded_at: datetime | None
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters(Value):
    """A model's adapters, their most number (``room``), and the change under way."""

    model: str
    room: int
    changing: str | None
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember(Value):
    """One worker's place in a trainer's group: its engine has ``size`` ranks from ``first_rank``."""

    worker: str
    incarnation: int
    first_rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGroup(Value):
    """A trainer's group: the trainer is rank 0 of ``world_size``."""

    number: int
    backend: str
    state: str
    error: str | None
    key: str
    world_size: int
    members: tuple[GroupMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShare(Value):
    """One worker's part in an update: its stage, for how many seconds, and how much it has received."""

    worker: str
    incarnation: int
    stage: str
    elapsed_s: float
    received: int
    total: int
    paused_s: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate(Value):
    """An update of a model's weights; ``state`` is running, completed, partial or failed."""

    number: int
    version: int
    previous: int
    mode: str
    checkpoint: str | None
    tensors: int
    state: str
    phase: str
    error: str | None
    phase_s: Mapping[str, float]
    workers: tuple[UpdateShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWeights(Value):
    """A worker's weights, and what it waits for if they are not the model's."""

    worker: str
    state: str
    incarnation: int
    version: int
    in_rotation: bool
    waits_for: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(Value):
    """A model's weights; ``update`` is the one under way, or the last."""

    model: str
    version: int
    checkpoint: str | None
    group: TrainerGroup | None
    update: WeightUpdate | None
    updates: tuple[WeightUpdate, ...]
    workers: tuple[WorkerWeights, ...]

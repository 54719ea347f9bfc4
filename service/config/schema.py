"""The configuration as operators write it; every key except ``models`` has a default.

Source: specification, "Configuration files".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from service.config.keys import KeyConfig, SentKey, repeated
from service.config.model import LAST_PORT, Kept, ModelConfig, ModelName, Place, Port, Text
from service.conversations.document.job_faults import JobRules
from service.conversations.document.limits import Limits
from service.conversations.job.job import GroupBy
from service.formats.faults import Rules, StrictModel, rules
from service.formats.hosts import canonical_host, canonical_origin, signing_key
from service.scheduling.core.policies import POLICIES
from workers.devices.layout import Layout, LayoutPolicy
from workers.policy.limits import Seconds
from workers.policy.placement import SwapRule
from workers.spec import LOOPBACK

LOCAL_STORES = frozenset({"sqlite", "memory"})
LANE = "lane"  # workers on lanes are named lane-0, lane-1 and so on


def _address(host: str) -> str:
    """Return one name for all hosts that take the port on loopback, as listening everywhere does."""
    return "127.0.0.1" if host in {"localhost", "0.0.0.0"} else host  # noqa: S104 - compared, not bound


def _reachable_host(host: str) -> str:
    known = canonical_host(host)
    if known in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        raise ValueError(f"{host!r} is no address that other nodes can reach")
    return known


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    return name


class ServerConfig(StrictModel):
    """The HTTP front end and where state is kept."""

    host: Text = "127.0.0.1"
    port: Port = 8080
    address: Annotated[str, AfterValidator(_reachable_host)] | None = None
    state_dir: Place = Path("state")
    api_keys: list[SentKey] = Field(default_factory=list)
    keys: list[KeyConfig] = Field(default_factory=list)
    keys_file: Place | None = None
    hosts: list[Annotated[str, AfterValidator(canonical_host)]] = Field(default_factory=list)
    origins: list[Annotated[str, AfterValidator(canonical_origin)]] = Field(default_factory=list)
    roots: list[Place] = Field(default_factory=list)
    drain_s: float = Field(default=30.0, ge=0)
    log: Literal["text", "json"] = "text"  # format of the log on standard error
    heartbeat_s: Seconds = 15.0
    queue: int = Field(default=1024, ge=0)
    wait_s: Seconds | None = None

    @rules
    def _needs_keys(self) -> Rules:
        has_keys = self.api_keys or self.keys or self.keys_file
        ways = "api_keys (or ROUNDHOUSE_API_KEYS), keys or a keys_file; or keep host: 127.0.0.1"
        is_open = self.host not in LOOPBACK and not has_keys
        yield is_open, f"host {self.host} is reachable from outside and needs {ways}"
        fault = repeated(self.keys, self.api_keys)
        yield fault, f"keys: {fault}"


def _known_store(url: str) -> str:
    if url not in {"sqlite", "memory"} and not url.startswith(("postgresql://", "postgres://")):
        kind = url.partition(":")[0]
        raise ValueError(
            f"{kind!r} is not a store; known: sqlite, memory, postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        )
    if url not in {"sqlite", "memory"}:
        _check_address(url)
    return url


def _check_address(url: str) -> None:
    from psycopg import ProgrammingError, conninfo  # noqa: PLC0415 - it takes a tenth of a second, and few need it

    try:
        conninfo.conninfo_to_dict(url)
    except ProgrammingError:  # its message would show the password
        raise ValueError("is not a PostgreSQL URL; percent-encode special characters in the password") from None


def _usable_secret(secret: str) -> str:
    signing_key(secret)
    return secret


class StoreConfig(StrictModel):
    """The store of jobs, and how long it keeps them, in seconds; null is for ever."""

    url: Annotated[str, AfterValidator(_known_store)] = "sqlite"
    lease_s: float = Field(default=15.0, ge=1.0)
    keep_jobs_s: Kept | None = None
    keep_keys_s: Kept = 86_400.0
    keep_events: int = Field(default=100_000, ge=100)
    keep_usage_days: int | None = Field(default=400, ge=1, le=36_500)


class WebhooksConfig(StrictModel):
    """The hosts to which callers may have a job's end reported, and the secrets that sign such messages."""

    hosts: list[Annotated[str, AfterValidator(canonical_host)]] = Field(default_factory=list)
    secrets: dict[str, Annotated[str, Field(min_length=16), AfterValidator(_usable_secret)]] = Field(
        default_factory=dict
    )
    private: bool = False
    timeout_s: Seconds = 10.0
    give_up_s: Seconds = 86_400.0


class SchedulingConfig(StrictModel):
    """The order in which turns go to slots."""

    policy: Annotated[str, AfterValidator(_known_policy)] = "critical_path"
    group_by: GroupBy | None = None
    swap: SwapRule = SwapRule.FAIR
    hold_slots: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusConfig(LayoutPolicy):
    """Lanes, for models that are placed on them; ``inventory`` is a file in place of the machine's own devices."""

    inventory: Place | None = None


class TelemetryConfig(StrictModel):
    """Measurements beside metrics; the standard OTEL_* variables say where traces go."""

    traces: bool = False


class RolloutsConfig(StrictModel):
    """Recorded tokens: the Python callables that jobs may name for rewards, their limit, and the room for tokens."""

    rewards: list[str] = Field(default_factory=list)
    reward_s: Seconds = 60.0
    most_mib: int | None = Field(default=None, ge=1)


class Config(StrictModel):
    """The whole configuration."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    store: StoreConfig = Field(default_factory=StoreConfig)
    webhooks: WebhooksConfig = Field(default_factory=WebhooksConfig)
    scheduling: SchedulingConfig = Field(default_factory=SchedulingConfig)
    limits: Limits = Field(default_factory=Limits)
    gpus: GpusConfig = Field(default_factory=GpusConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    rollouts: RolloutsConfig = Field(default_factory=RolloutsConfig)
    models: dict[ModelName, ModelConfig] = Field(min_length=1)

    @rules
    def _names_differ(self) -> Rules:
        owners = {name: f"models.{name}" for name in self.models}
        for name, model in self.models.items():
            for adapter in model.adapters:
                owner = owners.setdefault(adapter, f"models.{name}.adapters")
                yield (
                    owner != f"models.{name}.adapters",
                    f"models.{name}.adapters.{adapter}: {owner} already has this name",
                )

    @rules
    def _lanes_can_be_shared(self) -> Rules:
        on_lanes = self._on_lanes
        has_name = on_lanes and LANE in self.models.keys() - {*on_lanes}
        yield has_name, f"models.{LANE}: its workers would have the lanes' names; give it another name"
        for name in on_lanes[1:]:
            message = (
                f"models.{name}.placement: layout A has one base model, whose adapters share an engine on each GPU, and"
                f" models.{on_lanes[0]} is already on lanes; make this an adapter of it, or give gpus.layout: B"
            )
            yield self.gpus.layout is Layout.A, message

    @rules
    def _ports_differ(self) -> Rules:
        first, last = self.gpus.ports
        taken = range(first, min(last, LAST_PORT) + 1) if self._on_lanes else range(0)
        yield self.server.port in taken, f"gpus.ports: [{first}, {last}] has the server's port {self.server.port}"
        owners = {("127.0.0.1", port): "gpus.ports" for port in taken}
        owners[_address(self.server.host), self.server.port] = "server"
        listening = {name: model for name, model in self.models.items() if not model.is_portless}
        for name, model in listening.items():
            for index in range(model.replicas + model.most_spares):
                port = model.port + index
                owner = owners.setdefault((_address(model.host), port), f"models.{name}")
                message = (
                    f"models.{name}.port: port {port} of {'replica' if index < model.replicas else 'spare'} {index} is "
                    f"already {owner}'s; give one of them another (replicas and spares take the ports that follow)"
                )
                yield owner != f"models.{name}", message

    @rules
    def _spans_share_a_store(self) -> Rules:
        for name, model in self.models.items():
            has_span = model.span.nodes > 1
            is_alone = self.store.url in LOCAL_STORES
            yield (
                has_span and is_alone,
                f"models.{name}.span: its nodes need one store; give store.url: postgresql://...",
            )
            message = f"models.{name}.span: the other nodes need this one's address; give server.address"
            yield has_span and self.server.address is None, message

    @property
    def _on_lanes(self) -> list[str]:
        return [name for name, model in self.models.items() if model.placement == "lanes"]


def adapters_of(config: Config) -> dict[str, str]:
    """Return the configured LoRA adapters, each with its base model."""
    return {adapter: name for name, model in config.models.items() for adapter in model.adapters}


def unable_to_record(model: ModelConfig) -> str | None:
    """Return why the tokens of a model's answers cannot be recorded, None if they can."""
    if model.engine == "attached":
        return "an attached server does not say which tokens it reads and writes"
    return None


def rules_of(config: Config, adapters: Mapping[str, str] | None = None, elsewhere: Iterable[str] = ()) -> JobRules:
    """Return the rules of a configuration; ``elsewhere`` are models of other nodes on the same store.

    ``adapters`` maps adapters to their base models; None takes those of the configuration.
    """
    return JobRules(
        models=tuple(dict.fromkeys((*config.models, *elsewhere))),
        adapters=adapters_of(config) if adapters is None else adapters,
        limits=config.limits,
        webhook_hosts=tuple(config.webhooks.hosts),
        webhook_secrets=tuple(config.webhooks.secrets),
        key_s=config.store.keep_keys_s,
        servers={name: tuple(model.tools.mcp) for name, model in config.models.items()},
        untold=tuple(name for name, model in config.models.items() if model.bios.leaves_out_context),
        unable={name: why for name, model in config.models.items() if (why := unable_to_record(model))},
        rewards=tuple(config.rollouts.rewards),
    )

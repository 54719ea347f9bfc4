"""One model as operators write it, and the workers that serve it.

Source: specification, "Configuration files".
"""

import math
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, model_validator

from service.config.given_values import distinct, unlike_default, whole
from service.conversations.document.spec import Phrase
from service.conversations.job.wording import leaves_out, quote_fault
from service.formats.faults import Rules, StrictModel, rules
from workers.devices.visible import DEVICE_VARIABLES
from workers.engine.launch.flags import named
from workers.policy.continuation import Continuation, continuation_of
from workers.policy.limits import Seconds
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.policy.spares import MOST_AUTO
from workers.policy.weights import WeightsPolicy
from workers.requests.bios_words import Clock
from workers.spec import LOOPBACK, Capacity, WorkerTimeouts
from workers.tools.calls import STUCK, WrongArguments

LAST_PORT: Final = 65535
Scalar = str | int | float | bool | None
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
Kept = Annotated[float, Field(gt=0, le=3e9)]  # seconds; bounded so that now minus this is a valid date
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # an argument cannot hold a NUL
# These go into an engine's environment, where a comma or a line break would start a second value.
Uuid = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
SLOTS: Final = 4  # default; each has room for the whole context
SHARED_SLOTS: Final = 256  # vLLM's slots, which share a KV cache
SLOTS_A_LENGTH: Final = 4  # llama.cpp's slots that share the KV room of one whole context
CONTEXT: Final = 4096
MOST_SPARES: Final = 256
PARALLEL: Final = (("tensor-parallel-size", "tp"), ("pipeline-parallel-size", "pp"))  # vLLM's sizes of one engine
OF_OWN_ENGINES: Final = {"timeouts": ("start_s", "stop_grace_s"), "restart": ("failures", "retry_s")}
ATTACHED_PREFILL_S: Final = 600.0  # the time that our own engines get to load


def _usable_path(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("a path must not hold a NUL")
    return path


def _usable_argument(value: object) -> object:
    if not all(isinstance(each, Scalar) for each in (value if isinstance(value, list) else [value])):
        raise ValueError("must be text, a number, true, false, null or a list of those")
    return value


def _usable_folder(value: object) -> object:
    if value is not None and value is not False and not isinstance(value, str | Path):
        raise ValueError("must be a path, false or null")
    return value


Place = Annotated[Path, AfterValidator(_usable_path)]
# A fault in a union would be reported once per member; a check before them reports it once.
Argument = Annotated[Scalar | list[Scalar], BeforeValidator(_usable_argument)]
Devices = Annotated[list[int | Uuid] | None, Field(min_length=1, max_length=256), AfterValidator(distinct)]
Folder = Annotated[Place | Literal[False] | None, BeforeValidator(_usable_folder)]


def _gives_up(restart: RestartPolicy) -> RestartPolicy:
    if restart.failures is None:
        raise ValueError("failures: a number from 1")
    return restart


class HttpToolsConfig(StrictModel):
    """An endpoint that runs tools."""

    url: HttpUrl
    headers: dict[str, str] = Field(default_factory=dict)


class McpServerConfig(StrictModel):
    """One MCP server: a program that is started, or an address."""

    command: list[str] = Field(default_factory=list)
    env: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    url: HttpUrl | None = None
    headers: dict[str, str] = Field(default_factory=dict)

    @rules
    def _is_one_of_both(self) -> Rules:
        has_url = self.url is not None
        yield bool(self.command) == has_url, "give an MCP server either command: [...] or url: http://..."
        yield self.headers and not has_url, "headers: only for an MCP server with a url; give a program env"
        yield self.env and has_url, "env: only for an MCP server with a command; give a url headers"


class ToolsConfig(StrictModel):
    """Tool runners: the one that lists the tool (python, then mcp), else the HTTP endpoint."""

    iterations: int = Field(default=8, ge=0)
    stuck: int | None = Field(default=STUCK, ge=2)
    timeout_s: Seconds = 60.0
    fallback: bool = True
    arguments: WrongArguments = WrongArguments.FAIL
    python: dict[str, Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]] = Field(default_factory=dict)
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    http: HttpToolsConfig | None = None


class DoorConfig(StrictModel):
    """Rules for client requests; with ``params`` the model's parameters fill in what a request leaves out."""

    params: bool = True


class BiosConfig(StrictModel):
    """Words around a job's own, such as the start of each prompt; null takes Roundhouse's."""

    enabled: bool = True
    template: Phrase = None
    clock: Clock = Clock.START
    clock_step_s: float = Field(default=600.0, ge=0)
    context: Phrase = None
    cue: Phrase = None
    quote: Phrase = None
    invalid: Phrase = None
    left: Phrase = None

    @property
    def leaves_out_context(self) -> bool:
        """Whether the operator's template leaves out a job's ``prompts.context``."""
        return leaves_out(self.template, "context") and self.enabled

    @rules
    def _has_no_vain_words(self) -> Rules:
        yield self.context and leaves_out(self.template, "context"), "context: the template has no $context"
        is_timeless = leaves_out(self.template, "now")
        for key in unlike_default(self, "clock", "clock_step_s"):
            yield is_timeless, f"{key}: the template has no $now"
        fault = quote_fault(self.quote)
        yield fault, f"quote: {fault}"


def _spares_of(given: object) -> object:
    is_number = isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MOST_SPARES
    if given != "auto" and not is_number:
        raise ValueError(f"must be auto, or a number from 0 to {MOST_SPARES}")
    return given


class SpanConfig(StrictModel):
    """The number of nodes that one engine spans."""

    nodes: int = Field(default=1, ge=1, le=64)


class ModelConfig(StrictModel):
    """One model, and the workers that serve it."""

    engine: Literal["llama-server", "embedded", "vllm", "attached"]
    model: Text | None = None
    command: list[Text] = Field(default_factory=list)
    args: dict[str, Argument] = Field(default_factory=dict)
    env: dict[str, Annotated[Text, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    placement: Literal["fixed", "lanes"] = "fixed"
    pin: bool = False
    keep_s: Seconds | None = None
    memory_mib: int | None = Field(default=None, ge=1, le=2**31)
    devices: Devices = None
    replicas: int = Field(default=1, ge=1, le=256)
    span: SpanConfig = Field(default_factory=SpanConfig)
    spares: Annotated[Annotated[int, Field(ge=0, le=MOST_SPARES)] | Literal["auto"], BeforeValidator(_spares_of)] = 0
    host: Text = "127.0.0.1"
    port: Port = 9100
    socket_dir: Folder = None
    url: HttpUrl | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    slots: int = Field(default=SLOTS, ge=1, le=4096)
    capacity: Capacity = Capacity.SLOTS
    kv_tokens: int | None = Field(default=None, ge=1)
    context: int = Field(default=CONTEXT, ge=16)
    max_answer: int | None = Field(default=None, ge=1)
    continuation: Annotated[Continuation, BeforeValidator(continuation_of)] = Continuation.ON
    params: dict[str, object] = Field(default_factory=dict)
    door: DoorConfig = Field(default_factory=DoorConfig)
    timeouts: WorkerTimeouts = Field(default_factory=WorkerTimeouts)
    restart: Annotated[RestartPolicy, AfterValidator(_gives_up)] = Field(default_factory=RestartPolicy)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    repetition: RepetitionLimits | None = Field(default_factory=RepetitionLimits)
    bios: BiosConfig = Field(default_factory=BiosConfig)
    weights: WeightsPolicy | None = None
    adapters: dict[ModelName, Text] = Field(default_factory=dict)
    max_adapters: int | None = Field(default=None, ge=1, le=4096)

    @property
    def most_spares(self) -> int:
        """The number of spares that the model may have."""
        return MOST_AUTO if self.spares == "auto" else self.spares

    @property
    def is_portless(self) -> bool:
        """Whether no fixed port is listened on: attached, on a lane, or on a UNIX socket, vLLM's default."""
        is_on_socket = self.engine == "vllm" and self.socket_dir is not False
        return self.url is not None or is_on_socket or self.placement == "lanes"

    @rules
    def _is_attached_or_not(self) -> Rules:
        is_attached, is_vllm = self.engine == "attached", self.engine == "vllm"
        yield (
            (self.url is not None) is not is_attached,
            "engine attached needs url: http://...; other engines refuse url",
        )
        vain = ", ".join(
            unlike_default(self, "args", "command", "devices", "env", "host", "port", "replicas", "spares")
        )
        yield is_attached and vain, f"{vain}: not for an attached engine, which Roundhouse does not start"
        yield self.headers and not is_attached, "headers: only for an attached engine"
        has_adapters = self.adapters or self.max_adapters
        yield is_attached and has_adapters, "adapters: not for an attached engine, which has its own"
        count = len(self.adapters)
        yield self.max_adapters is not None and self.max_adapters < count, f"max_adapters: there are {count} already"
        yield self.weights is not None and not is_vllm, "weights: only for vllm"
        yield self.socket_dir and not is_vllm, "socket_dir: only vllm listens on a UNIX socket"
        is_on_port, why = is_vllm and self.socket_dir is False, "and vLLM's control endpoints need no key"
        yield is_on_port and self.host not in LOOPBACK, f"host {self.host} is reachable from outside, {why}"

    @rules
    def _ignores_no_key(self) -> Rules:
        for section, keys in OF_OWN_ENGINES.items():
            for key in unlike_default(getattr(self, section), *keys):
                message = f"{section}.{key}: not for an attached engine, which Roundhouse neither starts nor stops"
                yield self.engine == "attached", message
        is_on_socket = self.engine == "vllm" and self.socket_dir is not False and self.placement == "fixed"
        for key in unlike_default(self, "host", "port"):
            message = f"{key}: vllm listens on a UNIX socket; also give socket_dir: false, or leave this out"
            yield is_on_socket, message

    @model_validator(mode="before")
    @classmethod
    def _share_cache(cls, given: object) -> object:
        """Set the defaults of a shared KV cache: most slots, lent by tokens, for vLLM; the usual memory for llama.cpp.

        Lending by tokens never slowed vLLM in the studies of capacity (``bench/studies``); it slowed llama.cpp on a
        CPU.
        """
        if not isinstance(given, dict):
            return given
        if given.get("engine") == "vllm":
            given = {"capacity": Capacity.TOKENS, **given}
        if given.get("capacity") != Capacity.TOKENS or given.get("slots") is not None:
            return given
        if given.get("engine") == "vllm":
            return {**given, "slots": SHARED_SLOTS}
        context = whole(given.get("context", CONTEXT))
        tokens = given.get("kv_tokens") or (SLOTS * context if context is not None else None)
        return {**given, "slots": SLOTS * SLOTS_A_LENGTH, "kv_tokens": tokens}

    @model_validator(mode="before")
    @classmethod
    def _wait_for_loading(cls, given: object) -> object:
        """Give an attached server time to read long, or to load its model at the first request, as Ollama does.

        Its reading speed is known from its first answer on.
        """
        timeouts = given.get("timeouts", {}) if isinstance(given, dict) else None
        if not (isinstance(given, dict) and given.get("engine") == "attached" and isinstance(timeouts, dict)):
            return given
        return {**given, "timeouts": {"prefill_stall_s": ATTACHED_PREFILL_S, **timeouts}}

    @rules
    def _shares_what_it_has(self) -> Rules:
        is_shared, least = self.capacity is Capacity.TOKENS, f"context ({self.context} tokens)"
        without = "not for an attached engine, whose server sets its KV cache; leave it out"
        yield is_shared and self.engine == "attached", f"capacity: {without}"
        if self.kv_tokens is not None:
            is_counted = is_shared and self.engine != "vllm"
            yield not is_counted, "kv_tokens: only for llama.cpp with capacity: tokens; vllm reports its own"
            yield self.kv_tokens < self.context, f"kv_tokens: must be at least {least}, which one request may have"

    @rules
    def _is_placed_once(self) -> Rules:
        is_on_lane, by_lane = self.placement == "lanes", "set by the lane; leave it out, or give placement: fixed"
        on_lane = "an attached engine cannot be on lanes; use placement: fixed"
        yield is_on_lane and self.engine == "attached", f"placement: {on_lane}"
        for key in unlike_default(self, "devices", "host", "port", "replicas", "spares"):
            yield is_on_lane, f"{key}: {by_lane}"
        for name in sorted(DEVICE_VARIABLES & self.env.keys()):
            yield is_on_lane, f"env.{name}: {by_lane}"
            yield self.devices is not None, f"env.{name}: devices sets the same; give only one of them"
        for key in unlike_default(self, "keep_s", "memory_mib", "pin"):
            yield not is_on_lane, f"{key}: only for a model with placement: lanes"
        yield self.pin and self.keep_s is not None, "keep_s: a model with pin: true stays loaded; give only one of them"

    @rules
    def _spans_nodes(self) -> Rules:
        nodes, is_vllm = self.span.nodes, self.engine == "vllm"
        if nodes == 1:
            return
        yield not is_vllm, "span: only vllm can span several nodes"
        yield self.placement == "lanes", "span: not for a model on lanes; give placement: fixed"
        yield self.most_spares, "spares: not for a model that spans nodes"
        command = self.command or ["vllm", "serve"]
        yield is_vllm and command[-1] != "serve", "command: a model that spans nodes needs one that ends with serve"
        size = self._world_size
        message = (
            f"span.nodes: {nodes} nodes cannot share {size} parts; give args.tensor-parallel-size and "
            "args.pipeline-parallel-size, numbers whose product is a multiple of nodes"
        )
        yield size is None or size < nodes or size % nodes, message

    @property
    def _world_size(self) -> int | None:
        """The number of vLLM's workers in one engine; None if a size is not a number above 0."""
        given = named({name: value for name, value in self.args.items() if not isinstance(value, list)})
        sizes = [given.get(long, given.get(short, 1)) for long, short in PARALLEL]
        numbers = [whole(size) for size in sizes if not isinstance(size, list | tuple)]
        known = [number for number in numbers if number is not None and number > 0]
        return math.prod(known) if len(known) == len(sizes) else None

    @rules
    def _ports_exist(self) -> Rules:
        more = self.replicas + self.most_spares - 1
        yield self.port + more > LAST_PORT, f"port {self.port} and the {more} ports after it exceed {LAST_PORT}"

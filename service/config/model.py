"""One model as operators write it, and the workers that serve it.

Source: specification, "Configuration files".
"""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, HttpUrl, model_validator

from service.conversations.spec import Phrase
from service.formats.faults import StrictModel
from workers.engine.launch.devices import DEVICE_VARIABLES
from workers.policy.limits import Seconds
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.policy.weights import WeightsPolicy
from workers.requests.prompts.bios import Clock
from workers.spec import LOOPBACK, Capacity, WorkerTimeouts
from workers.tools.calls import STUCK, WrongArguments

LAST_PORT: Final = 65535
Scalar = str | int | float | bool | None
Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
Kept = Annotated[float, Field(gt=0, le=3e9)]  # seconds: a date before our time cannot be told
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # no program can be given a NUL
# Each becomes a value in an engine's environment, where a comma or a line would be a second one.
Uuid = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
SLOTS: Final = 4  # each with room for the whole context
SHARED_SLOTS: Final = 256  # of vLLM, that share a KV cache
SLOTS_A_LENGTH: Final = 4  # of llama.cpp that share it, for each one that would have the whole context
CONTEXT: Final = 4096
ATTACHED_PREFILL_S: Final = 600.0  # as long as an engine of ours may take to load


def _usable_path(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError("no path holds a NUL")
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
# What is wrong with a union's value would be told once for each member: what it may be is told before they are tried.
Argument = Annotated[Scalar | list[Scalar], BeforeValidator(_usable_argument)]
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

    @model_validator(mode="after")
    def _is_one_of_both(self) -> "McpServerConfig":
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server has either command: [...] or url: http://...")
        return self


class ToolsConfig(StrictModel):
    """The runners of tools: the one that lists the tool (python, then mcp), else the HTTP endpoint."""

    iterations: int = Field(default=8, ge=0)
    stuck: int | None = Field(default=STUCK, ge=2)
    timeout_s: Seconds = 60.0
    fallback: bool = True
    arguments: WrongArguments = WrongArguments.FAIL
    python: dict[str, Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]] = Field(default_factory=dict)
    mcp: dict[str, McpServerConfig] = Field(default_factory=dict)
    http: HttpToolsConfig | None = None


class DoorConfig(StrictModel):
    """Rules for requests of clients; with ``params`` the model's fill what a request leaves out."""

    params: bool = True


class BiosConfig(StrictModel):
    """The words around a job's own, the first of each prompt included; null is Roundhouse's own."""

    enabled: bool = True
    template: str | None = None
    clock: Clock = Clock.START
    clock_step_s: float = Field(default=600.0, ge=0)
    context: Phrase = None
    cue: Phrase = None
    quote: Phrase = None
    invalid: Phrase = None
    left: Phrase = None


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
    devices: list[int | Uuid] | None = Field(default=None, min_length=1, max_length=256)
    replicas: int = Field(default=1, ge=1, le=256)
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
    def is_portless(self) -> bool:
        """Whether no port is listened on: an attached server, or one on a UNIX socket, as vLLM's is by default."""
        is_on_socket = self.engine == "vllm" and self.socket_dir is not False
        return self.url is not None or is_on_socket or self.placement == "lanes"

    @model_validator(mode="after")
    def _is_attached_or_not(self) -> "ModelConfig":
        if (self.url is not None) is not (self.engine == "attached"):
            raise ValueError("engine attached needs url: http://..., and no other engine has one")
        given = self.model_fields_set
        unused = sorted(given & {"command", "args", "env", "host", "port", "replicas", "devices"})
        if self.engine == "attached" and unused:
            raise ValueError(f"{', '.join(unused)}: not of an attached engine, which Roundhouse does not start")
        if self.engine != "attached" and self.headers:
            raise ValueError("headers: only of an attached engine")
        if self.engine == "attached" and (self.adapters or self.max_adapters):
            raise ValueError("adapters: an attached engine has its own")
        if self.max_adapters is not None and self.max_adapters < len(self.adapters):
            raise ValueError(f"max_adapters: there are {len(self.adapters)} already")
        if self.weights is not None and self.engine != "vllm":
            raise ValueError("weights: only those of vllm can change")
        if self.socket_dir and self.engine != "vllm":
            raise ValueError("socket_dir: only vllm listens on a UNIX socket")
        if self.engine == "vllm" and self.socket_dir is False and self.host not in LOOPBACK:
            raise ValueError(f"host {self.host} is reachable from outside, and vLLM's control endpoints know no key")
        return self

    @model_validator(mode="before")
    @classmethod
    def _share_cache(cls, given: object) -> object:
        """Set the defaults of a shared KV cache: on vLLM the most slots, lent by tokens; on llama.cpp today's memory.

        By tokens vLLM was never slower in ``bench.capacity`` and ``bench.capacity_gpu``; llama.cpp on a CPU was.
        """
        if not isinstance(given, dict):
            return given
        if given.get("engine") == "vllm":
            given = {"capacity": Capacity.TOKENS, **given}
        if given.get("capacity") != Capacity.TOKENS or given.get("slots") is not None:
            return given
        if given.get("engine") == "vllm":
            return {**given, "slots": SHARED_SLOTS}
        context = str(given.get("context", CONTEXT))
        tokens = given.get("kv_tokens") or (SLOTS * int(context) if context.isdecimal() else None)
        return {**given, "slots": SLOTS * SLOTS_A_LENGTH, "kv_tokens": tokens}

    @model_validator(mode="before")
    @classmethod
    def _wait_for_loading(cls, given: object) -> object:
        """Give a server that is not ours time to load its model under a first request, as Ollama does, or to read long.

        How fast it reads is known from the first answer on.
        """
        timeouts = given.get("timeouts", {}) if isinstance(given, dict) else None
        if not (isinstance(given, dict) and given.get("engine") == "attached" and isinstance(timeouts, dict)):
            return given
        return {**given, "timeouts": {"prefill_stall_s": ATTACHED_PREFILL_S, **timeouts}}

    @model_validator(mode="after")
    def _shares_what_it_has(self) -> "ModelConfig":
        if self.capacity is Capacity.TOKENS and self.engine == "attached":
            raise ValueError("capacity: an attached engine shares its KV cache as it was started; leave it out")
        if self.kv_tokens is None:
            return self
        if self.capacity is not Capacity.TOKENS or self.engine == "vllm":
            raise ValueError("kv_tokens: only of llama.cpp with capacity: tokens; vllm tells what it has")
        if self.kv_tokens < self.context:
            raise ValueError(f"kv_tokens: one request may have {self.context} tokens (context); give as many at least")
        return self

    @model_validator(mode="after")
    def _is_placed_once(self) -> "ModelConfig":
        given = self.model_fields_set
        if self.placement == "lanes":
            if self.engine == "attached":
                raise ValueError("placement: an attached engine is where it is; leave placement: fixed")
            for key in sorted(
                key for key in given & {"replicas", "port", "host", "devices"} if not self._is_default(key)
            ):
                raise ValueError(f"{key}: a lane gives it; leave it out, or give placement: fixed")
            for name in sorted(DEVICE_VARIABLES & self.env.keys()):
                raise ValueError(f"env.{name}: a lane gives it; leave it out, or give placement: fixed")
        else:
            for name in sorted(DEVICE_VARIABLES & self.env.keys() if self.devices is not None else ()):
                raise ValueError(f"env.{name}: devices says so too; give one of both")
            for key in sorted(key for key in given & {"pin", "keep_s"} if not self._is_default(key)):
                raise ValueError(f"{key}: only of a model with placement: lanes")
        if self.pin and self.keep_s is not None:
            raise ValueError("keep_s: a model with pin: true stays; give one of both")
        return self

    def _is_default(self, key: str) -> bool:
        """Whether a key says what it would without being given: the effective configuration gives all of them."""
        return bool(getattr(self, key) == type(self).model_fields[key].default)

    @model_validator(mode="after")
    def _ports_exist(self) -> "ModelConfig":
        if self.port + self.replicas - 1 > LAST_PORT:
            raise ValueError(f"port {self.port} and the {self.replicas - 1} that follow go beyond {LAST_PORT}")
        return self

"""The specification of one worker."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, NewType

from annotated_types import Ge

from transport.endpoint import Endpoint
from workers.devices.layout import Device, DeviceChoice, Lane, variables_of
from workers.errors import InvalidSpec
from workers.policy.limits import Configured, Seconds
from workers.policy.liveness import StallLimits
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.policy.weights import WeightsPolicy
from workers.requests.prompts.bios import BiosPolicy
from workers.tools.calls import ToolLimits
from workers.tools.definition import ToolDefinition
from workers.tools.runner import ToolRunner

WorkerId = NewType("WorkerId", str)
FlagValue = str | int | float | bool | None
Flag = FlagValue | Sequence[FlagValue]
Tools = Sequence[ToolDefinition | Mapping[str, object]]


ANSWER_BOUNDS: Final = frozenset({"max_tokens", "max_completion_tokens", "n_predict"})
MAX_PORT: Final = 65535
MAX_SOCKET_PATH: Final = 107
MOST_CACHE: Final = 2**31 - 1  # tokens: --ctx-size of llama.cpp is a C int
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineKind(StrEnum):
    """The engines that a worker can run."""

    LLAMA_SERVER = "llama-server"  # llama.cpp's own binary
    EMBEDDED = "embedded"  # llama.cpp's server out of the xllamacpp wheel, in a program of ours
    VLLM = "vllm"
    ATTACHED = "attached"  # any OpenAI-compatible server that runs already: no process of ours


LLAMA_CPP: Final = frozenset({EngineKind.LLAMA_SERVER, EngineKind.EMBEDDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeouts(Configured):
    """Limits on an engine, in seconds; None is for ever."""

    start_s: Seconds = 600.0  # from the process's start to readiness: loading of weights included
    stop_grace_s: Seconds = 10.0  # from SIGTERM to SIGKILL
    prefill_stall_s: Seconds | None = (
        120.0  # no progress before the first token; grows with the prompt at measured rate
    )
    decode_stall_s: Seconds | None = 60.0  # no progress after it
    cancel_s: Seconds | None = 60.0  # a slot that stays busy after its request is gone
    busy_stall_s: Annotated[float, Ge(0)] | None = (
        None  # for so much longer CPU ticks alone speak; None: 900 on a CPU, 0 on a GPU
    )
    request_s: Seconds | None = None  # one whole request, its tools included
    refusal_s: Seconds | None = (
        300.0  # for how long one turn may be refused (500, 503, a broken stream) before it fails
    )

    @property
    def stall(self) -> StallLimits:
        """The limits on silence."""
        return StallLimits(
            prefill_s=self.prefill_stall_s, decode_s=self.decode_stall_s, busy_s=self.busy_stall_s or 0.0
        )


class Capacity(StrEnum):
    """The bound on the requests that an engine has at once."""

    SLOTS = "slots"  # each slot has room for the whole context
    TOKENS = "tokens"  # slots share a KV cache, and are lent as far as that has room


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One engine process and its slots; the names are those of the configuration.

    ``model`` is what the engine loads, as it takes it: a path, or the id of a repository; it may be None where
    ``command`` is a program that needs none. Of an attached engine it is the model's name there, and ``url`` is where
    that is, with ``headers`` for every request. ``socket`` is a UNIX socket that vLLM listens on instead of a port.
    ``name`` is what the model is called, ``id`` the worker.
    ``command`` stands in place of the engine's own program; the engine's ordinary flags follow it. ``args`` are further
    flags, passed through unknown: a name to its value, True for a bare flag, a sequence for a repeated one.
    ``adapters`` are LoRA adapters that the engine is started with, by the names under which requests ask for them: a
    folder for vLLM, a GGUF file for llama.cpp. ``max_adapters`` is how many there may be at once, those that
    are loaded later among them; None is as many as are given here.
    ``on_cpu`` says whether the engine computes on the CPU; None is found out from the machine and its devices.
    ``max_answer`` bounds an answer in tokens where no parameter does; None is three quarters of the context.
    ``context`` is in tokens a slot; with ``capacity: tokens`` it is the most that one request may have of the KV cache
    that slots share: of ``kv_tokens`` for llama.cpp (None is as much as slots of full length would have), and of what
    vLLM says that it has. ``params`` are defaults of generation parameters.
    ``tools`` and ``exit_tools`` are OpenAI definitions of what ``Worker.submit`` shows the model; ``tool_runner`` runs
    the former. ``lane`` is the place on a device where the engine runs while turns want its model; there it needs
    ``need_mib`` of memory, where that is known, and stays idle for ``keep_s``, or for ever with ``pin``; each engine
    that starts there first reads ``warm_up`` and ``warm_up_tools``, which prompts begin with. One step of an answer is
    ``max_tokens_per_step`` tokens, for what an answer should take. An engine that is on no lane computes on
    ``devices``, as far as they are known; where there is a ``device_choice`` they are of it. One of llama.cpp on the
    CPU computes with ``threads``. ``state_dir`` is where incidents and started processes are noted; None notes them
    nowhere.

    Source: specification, "Worker interface" and "Configuration".
    """

    engine: EngineKind
    port: int = 9100
    model: str | None = None
    name: str = "model"
    id: WorkerId = WorkerId("")
    host: str = "127.0.0.1"
    socket: Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    slots: int = 4
    context: int = 4096
    max_answer: int | None = None
    command: Sequence[str] = ()
    args: Mapping[str, Flag] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, object] = field(default_factory=dict)
    timeouts: WorkerTimeouts = field(default_factory=WorkerTimeouts)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    bios: BiosPolicy = field(default_factory=BiosPolicy)
    tools: Tools = ()
    exit_tools: Tools = ()
    tool_runner: ToolRunner | None = None
    tool_limits: ToolLimits = field(default_factory=ToolLimits)
    repetition: RepetitionLimits = field(default_factory=RepetitionLimits)
    weights: WeightsPolicy = field(default_factory=WeightsPolicy)
    adapters: Mapping[str, str] = field(default_factory=dict)
    max_adapters: int | None = None
    on_cpu: bool | None = None
    state_dir: Path | None = None
    lane: Lane | None = None
    device_choice: DeviceChoice | None = None
    # What an engine got as it was started is no setting: another choice makes no worker another one.
    devices: tuple[Device, ...] = field(default=(), compare=False)
    threads: int | None = field(default=None, compare=False)
    need_mib: int | None = None
    pin: bool = False
    keep_s: float | None = None
    max_tokens_per_step: int = 1
    warm_up: str = ""
    warm_up_tools: Sequence[Mapping[str, object]] = ()
    capacity: Capacity = Capacity.SLOTS
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        """Take an engine and its capacity by their plain names, and name the worker after its model.

        Raises:
            InvalidSpec: a value cannot be; the message names each that cannot.
        """
        object.__setattr__(self, "engine", EngineKind(self.engine))
        object.__setattr__(self, "capacity", Capacity(self.capacity))
        object.__setattr__(self, "id", self.id or WorkerId(f"{self.name}-0"))
        faults = list(self._faults())
        if faults:
            raise InvalidSpec("; ".join(faults))

    @property
    def endpoint(self) -> Endpoint:
        """The address of the engine."""
        if self.url is not None:
            return Endpoint.of_url(self.url, self.headers)
        return Endpoint(host=self.host, port=self.port, uds=str(self.socket) if self.socket else None)

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The devices that the engine computes on, as far as they are known; nothing of one on the CPU."""
        return self.devices if self.lane is None else () if self.lane.device.is_cpu else (self.lane.device,)

    @property
    def device_variables(self) -> Mapping[str, str]:
        """The variables that show the engine the devices that were chosen for it."""
        return variables_of(self.devices) if self.device_choice is not None else {}

    @property
    def owns_engine(self) -> bool:
        """Whether the engine is a process of ours, to be started, killed and started again."""
        return self.engine is not EngineKind.ATTACHED

    @property
    def bounded_params(self) -> Mapping[str, object]:
        """The defaults of generation parameters, with a bound on the answer, where the engine is ours."""
        if not ANSWER_BOUNDS.isdisjoint(self.params) or (self.max_answer is None and not self.owns_engine):
            return self.params
        return {**self.params, "max_tokens": self.max_answer or max(1, self.context * 3 // 4)}

    def defaults_beside(self, params: Mapping[str, object]) -> Mapping[str, object]:
        """Return the defaults of generation parameters for a request with ``params``, which may bound the answer."""
        return self.bounded_params if ANSWER_BOUNDS.isdisjoint(params) else self.params

    @property
    def most_answer(self) -> int:
        """The tokens that an answer may have where its request does not say."""
        bound = next((self.params[name] for name in sorted(ANSWER_BOUNDS) if name in self.params), None)
        return bound if isinstance(bound, int) and bound > 0 else self.max_answer or max(1, self.context * 3 // 4)

    def slots_offered(self, told: int | None, most: int | None) -> int:
        """Return how many requests may be in flight; ``told`` is how many of full length the engine says that it holds.

        ``most`` is how many are lent until further notice.
        """
        slots = self.slots
        if told is not None and self.capacity is Capacity.SLOTS:
            slots = max(1, min(slots, told))
        return slots if most is None else min(slots, most)

    @property
    def adapter_room(self) -> int:
        """The number of adapters that the engine is started to hold."""
        return max(len(self.adapters), self.max_adapters or 0)

    @property
    def shares_pool(self) -> bool:
        """Whether its slots share a KV cache that fails all of its requests when it is full."""
        return self.capacity is Capacity.TOKENS and self.engine in LLAMA_CPP

    @property
    def cache_tokens(self) -> int:
        """The tokens that llama.cpp's KV cache is started with, over all slots."""
        return self.kv_tokens or self.slots * self.context

    @property
    def served_name(self) -> str:
        """The engine's name for the model."""
        return self.name if self.owns_engine else self.model or self.name

    def _faults(self) -> Iterator[str]:
        yield from self._address_faults()
        yield from self._capacity_faults()
        values: dict[str, object] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, most in (("port", MAX_PORT), ("slots", None), ("context", None)):
            if not _is_count(values[name], most):
                yield f"{name}: {values[name]!r} is not a number from 1" + (f" to {most}" if most else "")
        env: Mapping[object, object] = dict(self.env.items())
        for key, value in env.items():
            if not isinstance(key, str) or not isinstance(value, str):
                yield f"env.{key}: {value!r} is not text"
        for limit in fields(self.timeouts):
            value = getattr(self.timeouts, limit.name)
            if value is None and limit.name in ("start_s", "stop_grace_s"):
                yield f"timeouts.{limit.name}: has to be given"
            elif limit.name == "busy_stall_s" and value == 0:
                continue
            elif value is not None and not (isinstance(value, int | float) and value > 0):
                yield f"timeouts.{limit.name}: {value!r} is not a time in seconds"

    def _capacity_faults(self) -> Iterator[str]:
        if self.capacity is Capacity.TOKENS and not self.owns_engine:
            yield "capacity: an attached engine does not say how its slots share a KV cache; leave capacity: slots"
        counts = [self.slots, self.context] if self.kv_tokens is None else [self.kv_tokens]
        is_known = self.engine in LLAMA_CPP and all(_is_count(each, None) for each in counts)
        if is_known and self.cache_tokens > MOST_CACHE:
            name = "context" if self.kv_tokens is None else "kv_tokens"
            yield f"{name}: llama.cpp has no KV cache of {self.cache_tokens} tokens in all; {MOST_CACHE} at most"
        if self.kv_tokens is None:
            return
        if not self.shares_pool:
            yield "kv_tokens: only of llama.cpp with capacity: tokens; vLLM says itself what its KV cache has room for"
        elif not _is_count(self.kv_tokens, None) or self.kv_tokens < self.context:
            yield f"kv_tokens: {self.kv_tokens!r} has no room for one request of {self.context} tokens (context)"

    def _address_faults(self) -> Iterator[str]:
        if (self.url is None) is (self.engine is EngineKind.ATTACHED):
            yield "url: is required, http://..." if self.url is None else "url: only an attached engine has one"
        elif self.url is not None:
            try:
                Endpoint.of_url(self.url)
            except ValueError as error:
                yield f"url: {error}"
        if self.adapters and not self.owns_engine:
            yield "adapters: an attached engine has its own"
        if self.socket is not None and self.engine is not EngineKind.VLLM:
            yield "socket: only vllm listens on one"
        if self.socket is not None and len(str(self.socket).encode()) > MAX_SOCKET_PATH:
            yield f"socket: {self.socket} is longer than the {MAX_SOCKET_PATH} bytes that Linux allows"
        if self.engine is EngineKind.VLLM and self.socket is None and self.host not in LOOPBACK:
            yield f"host: {self.host} is reachable from outside, and vLLM's control endpoints know no key"


def _is_count(value: object, most: int | None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= (most or value)

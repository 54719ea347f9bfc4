"""The specification of one worker."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, NewType

from annotated_types import Ge

from transport.answer_bound import bound_of, bounds_in, laid_over
from transport.endpoint import Endpoint
from workers.devices.layout import Device, DeviceChoice, Lane, variables_of
from workers.errors import InvalidSpec
from workers.policy.continuation import Continuation
from workers.policy.limits import Configured, Seconds
from workers.policy.liveness import StallLimits
from workers.policy.params import param_faults
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.policy.weights import WeightsPolicy
from workers.requests.bios_words import BiosPolicy
from workers.tools.calls import ToolLimits
from workers.tools.definition import ToolDefinition
from workers.tools.runner import ToolRunner

WorkerId = NewType("WorkerId", str)
FlagValue = str | int | float | bool | None
Flag = FlagValue | Sequence[FlagValue]
Tools = Sequence[ToolDefinition | Mapping[str, object]]


MAX_PORT: Final = 65535
MAX_SOCKET_PATH: Final = 107
MOST_CACHE: Final = 2**31 - 1  # in tokens: --ctx-size of llama.cpp is a C int
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class EngineKind(StrEnum):
    """The engines that a worker can run."""

    LLAMA_SERVER = "llama-server"  # llama.cpp's own binary
    EMBEDDED = "embedded"  # llama.cpp's server from the xllamacpp wheel, in a program of ours
    VLLM = "vllm"
    ATTACHED = "attached"  # any OpenAI-compatible server that already runs: no process of ours


LLAMA_CPP: Final = frozenset({EngineKind.LLAMA_SERVER, EngineKind.EMBEDDED})
OF_LLAMA_CPP: Final = "n_predict"  # llama.cpp's own name for the bound of an answer; other engines ignore it


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimeouts(Configured):
    """Limits on an engine, in seconds; None is for ever."""

    start_s: Seconds = 600.0  # from the process's start to readiness, loading of weights included
    stop_grace_s: Seconds = 10.0  # from SIGTERM to SIGKILL
    prefill_stall_s: Seconds | None = (
        120.0  # no progress before the first token; grows with the prompt at the measured rate
    )
    decode_stall_s: Seconds | None = 60.0  # no progress after the first token
    cancel_s: Seconds | None = 60.0  # a slot that stays busy after its request is gone
    busy_stall_s: Annotated[float, Ge(0)] | None = (
        None  # extra time in which CPU ticks alone count as progress; None: 900 on a CPU, 0 on a GPU
    )
    request_s: Seconds | None = None  # one whole request, its tools included
    refusal_s: Seconds | None = 300.0  # how long one turn may be refused (500, 503, a broken stream) before it fails

    @property
    def stall(self) -> StallLimits:
        """The limits on silence."""
        return StallLimits(
            prefill_s=self.prefill_stall_s, decode_s=self.decode_stall_s, busy_s=self.busy_stall_s or 0.0
        )


class Capacity(StrEnum):
    """The bound on an engine's concurrent requests."""

    SLOTS = "slots"  # each slot has room for the whole context
    TOKENS = "tokens"  # slots share a KV cache, and are lent while it has room


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One engine process and its slots; names as in the configuration.

    ``name`` is the model's name, ``id`` the worker's. ``model`` is what the engine loads, in its own form: a path, or
    the id of a repository; None if ``command`` is a program that needs none. For an attached engine it is the model's
    name there, ``url`` is the address, and ``headers`` go with every request. ``socket`` is a UNIX socket that vLLM
    listens on instead of a port. ``nodes`` is the number of nodes that the engine spans.

    ``command`` replaces the engine's own program; the engine's ordinary flags follow it. ``args`` are further flags,
    passed through unchecked: a name to its value, True for a bare flag, a sequence for a repeated one. ``adapters`` are
    the LoRA adapters that the engine starts with, by the names that requests use: a folder for vLLM, a GGUF file for
    llama.cpp. ``max_adapters`` bounds how many there may be at once, including those loaded later; None is as many as
    are given here.

    ``on_cpu`` says whether the engine computes on the CPU; None derives it from the machine and its devices.
    ``max_answer`` bounds an answer in tokens if no parameter does; None is three quarters of the context. ``context``
    is in tokens per slot. With ``capacity: tokens`` it is the most that one request may have of the shared KV cache:
    for llama.cpp of ``kv_tokens`` (None is as much as slots of full length would have), for vLLM of the size that it
    reports. ``params`` are defaults of generation parameters.

    ``tools`` and ``exit_tools`` are the OpenAI definitions that ``Worker.submit`` shows the model; ``tool_runner`` runs
    ``tools``. ``lane`` is the place on a device where the engine runs while turns want its model. There it needs
    ``need_mib`` of memory, if that is known, and stays idle for ``keep_s``, or for ever with ``pin``; ``memory_mib`` is
    the configured need, which replaces the estimate from its files. Each engine that starts there first reads
    ``warm_up`` and ``warm_up_tools``, with which prompts begin. One step of an answer makes up to
    ``max_tokens_per_step`` tokens, for estimates of time. An engine without a lane computes on ``devices``, as far as
    they are known; a ``device_choice`` picks them, from ``listed_devices`` if the configuration lists any. On the CPU
    llama.cpp computes with ``threads``.

    ``state_dir`` keeps incidents and started processes; None keeps neither. ``folder`` is the engine's working
    directory, from which relative paths in ``args`` start; None is this program's own.

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
    nodes: int = 1
    slots: int = 4
    context: int = 4096
    max_answer: int | None = None
    continuation: Continuation = Continuation.ON
    # How many spares the model has is no setting of its workers; None is one where it is worth its memory.
    spares: int | None = field(default=0, compare=False)
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
    listed_devices: tuple[Device, ...] | None = None
    # Devices and threads that an engine got when it started are no setting: another choice makes no other worker.
    device_choice: DeviceChoice | None = field(default=None, compare=False)
    devices: tuple[Device, ...] = field(default=(), compare=False)
    threads: int | None = field(default=None, compare=False)
    need_mib: int | None = None
    memory_mib: int | None = None
    folder: Path | None = None
    pin: bool = False
    keep_s: float | None = None
    max_tokens_per_step: int = 1
    warm_up: str = ""
    warm_up_tools: Sequence[Mapping[str, object]] = ()
    capacity: Capacity = Capacity.SLOTS
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        """Convert plain names of engine, capacity and continuation, and name the worker after its model.

        Raises:
            InvalidSpec: values are invalid; the message names each.
        """
        for name in ("args", "env", "params", "headers", "adapters"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise InvalidSpec(f"{name}: {given!r} is no mapping")
        object.__setattr__(self, "engine", EngineKind(self.engine))
        object.__setattr__(self, "capacity", Capacity(self.capacity))
        object.__setattr__(self, "continuation", Continuation(self.continuation))
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
        """The known devices that the engine computes on; empty on the CPU."""
        return self.devices if self.lane is None else () if self.lane.device.is_cpu else (self.lane.device,)

    @property
    def device_variables(self) -> Mapping[str, str]:
        """The environment variables that show the engine the devices chosen for it."""
        return variables_of(self.devices) if self.device_choice is not None else {}

    @property
    def owns_engine(self) -> bool:
        """Whether the engine is a process of ours, to be started, killed and restarted."""
        return self.engine is not EngineKind.ATTACHED

    @property
    def bounded_params(self) -> Mapping[str, object]:
        """The defaults of generation parameters, with a bound on the answer if the engine is ours."""
        return self.defaults_beside({})

    def defaults_beside(self, params: Mapping[str, object]) -> Mapping[str, object]:
        """Return the default generation parameters for a request with ``params``, which may bound the answer.

        With ``params`` laid over them there is one bound: that of ``params``, else the model's, else ``max_answer``. A
        bound that this engine would ignore is also given under a name that it knows.
        """
        defaults = laid_over({}, self.params)  # null sets nothing
        given, own = bounds_in(params), bounds_in(defaults)
        bounds = given or own
        if given:
            defaults = {name: value for name, value in defaults.items() if name not in own} if own else defaults
        elif not bounds and (self.max_answer is not None or self.owns_engine):
            return {**defaults, "max_tokens": self._unbounded_answer}
        if self.engine not in LLAMA_CPP and set(bounds) == {OF_LLAMA_CPP}:
            return {**defaults, "max_tokens": bounds[OF_LLAMA_CPP]}
        return defaults

    def params_of(self, params: Mapping[str, object]) -> dict[str, object]:
        """Return the generation parameters of a request with ``params``."""
        return {**self.defaults_beside(params), **laid_over({}, params)}

    def longest_answer(self, params: Mapping[str, object]) -> int:
        """Return the most tokens that the answer to a request with ``params`` may have, as far as known."""
        return bound_of(self.params_of(params)) or self._unbounded_answer

    @property
    def most_answer(self) -> int:
        """The most tokens of an answer whose request sets no bound."""
        return self.longest_answer({})

    @property
    def _unbounded_answer(self) -> int:
        return self.max_answer or max(1, self.context * 3 // 4)

    def slots_offered(self, reported: int | None) -> int:
        """Return how many requests may be in flight; ``reported`` full-length ones are what the engine can hold."""
        if reported is None or self.capacity is not Capacity.SLOTS:
            return self.slots
        return max(1, min(self.slots, reported))

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
        bounds: dict[str, int | None] = {"port": MAX_PORT, "slots": None, "context": None}
        bounds |= {name: None for name in ("max_answer", "memory_mib") if values[name] is not None}
        for name, most in bounds.items():
            if not _is_count(values[name], most):
                yield f"{name}: {values[name]!r} is not a number from 1" + (f" to {most}" if most else "")
        yield from (f"params.{name}: {message}" for name, message in param_faults(self.params))
        env: Mapping[object, object] = dict(self.env.items())
        for key, value in env.items():
            if not isinstance(key, str) or not isinstance(value, str):
                yield f"env.{key}: {value!r} is not text"
        yield from self._timeout_faults()

    def _timeout_faults(self) -> Iterator[str]:
        for limit in fields(self.timeouts):
            value = getattr(self.timeouts, limit.name)
            if value is None and limit.name in ("start_s", "stop_grace_s"):
                yield f"timeouts.{limit.name}: has to be given"
            elif limit.name == "busy_stall_s" and value == 0 and value is not False:
                continue
            elif value is not None and not _is_time(value):
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


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0

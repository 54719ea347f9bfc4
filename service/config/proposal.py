"""A proposed configuration of one model for this machine, with a reason per line, and a first job for it. Pure."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import yaml

from service.config.workers import SMALL, TINY
from service.errors import ConfigError
from workers.devices.device import Gpu
from workers.files.model_memory import ModelMemory
from workers.models.hub_name import PREFIX as HUB_PREFIX
from workers.models.hub_name import parse_hub_name

CPU_CONTEXT: Final = 4096
GPU_CONTEXT: Final = 8192
LEAST_CONTEXT: Final = 512
CPU_SLOTS: Final = 4  # at most; more slots make each answer slower
GPU_SLOTS: Final = 8
VLLM_SLOTS: Final = 32
UNKNOWN_SLOTS: Final = 2  # where a token's memory is unknown and a context is asked for: one agent and its helper
USABLE: Final = 0.8  # share of a memory that others use as well
SMALL_MEMORY: Final = ModelMemory(weights_mib=94, token_bytes=23_040)  # before it is fetched
SMALL_PARAMS: Final = {"max_tokens": 60, "temperature": 0.3, "repeat_penalty": 1.15}
OWN: Final = {SMALL: "a small real model, 93 MB, fetched once", TINY: "a generated model, whose text is noise"}
COLUMN: Final = 44
JOB: Final = """\
# Two agents argue, and a third says who leads: roundhouse run job.yaml
name: first
rounds: 2
agents:
  - {{id: pro, model: {model}, system: You argue for yes. Give one short reason.}}
  - {{id: con, model: {model}, system: You argue for no. Give one short reason.}}
  - id: chair
    model: {model}
    system: Say who leads, pro or con.
    speak_after_within_round: [pro, con]   # it waits for both, and reads what they said
    visible_to: []                         # nobody reads its words
    validation: {{choices: [pro, con]}}      # the engine holds the model to one of them
conversations:
  - {{id: cars, prompt: "Should towns ban cars from their centres?"}}
  - {{id: homework, prompt: "Should homework be abolished?"}}
"""


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """A machine's devices and engines: memory is in MiB; ``programs`` are the installed engines.

    ``context`` is the context wanted for each answer, in tokens; None for the default.
    """

    gpus: Sequence[Gpu] = ()
    cores: int
    memory_mib: int
    programs: frozenset[str]
    http_port: int = 8080
    engine_port: int = 9100
    context: int | None = None

    def memory(self, *, on_gpu: bool) -> int | None:
        """Return the memory of a device, or of the machine, in MiB."""
        return self.gpus[0].memory_mib if on_gpu else self.memory_mib


class NamedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a person names it; ``memory`` is None where none of its files says."""

    reference: str
    is_gguf: bool
    memory: ModelMemory | None = None

    @property
    def name(self) -> str:
        """The name that a job's agents use for it."""
        return name_of(self.reference)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One key of a model or of the server, with its value and the reason for it."""

    key: str
    value: object
    because: str


def name_of(reference: str) -> str:
    """Return the name that a job's agents use for the model of a reference.

    Raises:
        InvalidSpec: a hub name is not valid.
    """
    if reference.startswith(HUB_PREFIX):
        stem = parse_hub_name(reference).repository.lower().removesuffix("-gguf")
    else:
        stem = reference.rpartition(":")[2] if reference in OWN else Path(reference).name
    return re.sub(r"[^a-z0-9.-]+", "-", stem.lower().removesuffix(".gguf")).strip("-.") or "model"


def propose(model: NamedModel, means: Means) -> list[Line]:
    """Return the proposed keys of a model.

    Raises:
        ConfigError: no engine here can serve it, or it does not fit in memory.
    """
    engine, why = _engine(model, means)
    is_vllm, is_small, on_gpu = engine == "vllm", model.reference == SMALL, bool(means.gpus) and engine != "embedded"
    most = (VLLM_SLOTS if is_vllm else GPU_SLOTS) if on_gpu else max(2, min(CPU_SLOTS, means.cores))
    slots = most if is_vllm or means.context is None else _slots_of(model, means, most, means.context, on_gpu=on_gpu)
    place = means.gpus[0].name if on_gpu else f"{means.cores} cores"
    context = _context(model, means, 1 if is_vllm else slots, on_gpu=on_gpu)
    params = dict(SMALL_PARAMS if is_small else {"max_tokens": 512})
    if means.context is not None:  # answers may be that long: clients that set no bound would be cut off
        del params["max_tokens"]
    endless = "it repeats itself otherwise" if is_small else "an endless answer stops there"
    has_context = not is_vllm or means.context is not None
    lines = (
        (True, "engine", engine, why),
        (True, "model", model.reference, _origin(model)),
        (True, "slots", slots, f"concurrent answers, on {place}"),
        (has_context, "context", context, "tokens of a prompt and its answer, in each slot"),
        (on_gpu and len(means.gpus) > 1, "replicas", len(means.gpus), "an engine on each GPU"),
        (not is_vllm, "port", means.engine_port, "of the first engine, on loopback"),
        (params, "params", params, endless),
        (is_small, "door", {"params": True}, "chats use them too"),
    )
    return [Line(key=key, value=value, because=because) for is_said, key, value, because in lines if is_said]


def _origin(model: NamedModel) -> str:
    if model.reference.startswith(HUB_PREFIX):
        return "from the hub, fetched once, at today's revision"
    return OWN.get(model.reference, "as given")


def _engine(model: NamedModel, means: Means) -> tuple[str, str]:
    if not model.is_gguf:
        if "vllm" not in means.programs:
            raise ConfigError(f"{model.reference}: this model needs vllm, which is not on the path")
        return "vllm", "the vllm on the path: this is not a GGUF file"
    if "llama-server" in means.programs and (means.gpus or "embedded" not in means.programs):
        return "llama-server", "the one on the path" + (", which can use the GPU" if means.gpus else "")
    if "embedded" in means.programs:
        return "embedded", "llama.cpp's server, which is installed with Roundhouse"
    raise ConfigError(f"{model.reference}: this model needs llama.cpp, and no llama-server is on the path")


def _slots_of(model: NamedModel, means: Means, slots: int, context: int, *, on_gpu: bool) -> int:
    """Return the most slots of the given context that memory holds; few where its need is not known."""
    there = means.memory(on_gpu=on_gpu)
    if model.memory is None or model.memory.token_bytes is None or there is None:
        return min(slots, UNKNOWN_SLOTS)
    while slots > 1 and (model.memory.need_mib(slots * context) or 0) > int(there * USABLE):
        slots //= 2
    return slots


def _context(model: NamedModel, means: Means, slots: int, *, on_gpu: bool) -> int:
    """Return the longest context, up to the wanted or default one, that memory holds in all slots."""
    context = means.context or (GPU_CONTEXT if on_gpu else CPU_CONTEXT)
    there = means.memory(on_gpu=on_gpu)
    if model.memory is None or there is None:
        return context
    usable = int(there * USABLE)
    while True:
        need = model.memory.need_mib(slots * context) or model.memory.weights_mib
        if need <= usable:
            return context
        if context <= LEAST_CONTEXT:
            what = means.gpus[0].name if on_gpu else "this machine"
            raise ConfigError(
                f"{model.reference} does not fit: it needs {need} MiB with {slots} slots of {context} tokens, but"
                f" may use only {usable} MiB of {what}"
            )
        context //= 2


def configuration_text(model: NamedModel, means: Means, state_dir: Path | None = None) -> str:
    """Return the text of a configuration, with a reason behind each value.

    Raises:
        ConfigError: see ``propose``.
    """
    gpus = ", ".join(gpu.name for gpu in means.gpus) or "no GPU"
    text = [f"# For {means.cores} cores, {means.memory_mib / 1024:.0f} GiB of memory, {gpus}.", "models:"]
    text.append(_with_reason(f"  {model.name}:", "the name that agents use"))
    text += (_with_reason(f"    {line.key}: {_flow(line.value)}", line.because) for line in propose(model, means))
    text.append("server:")
    text.append(_with_reason(f"  port: {means.http_port}", "of the service and its dashboard, on loopback"))
    if state_dir is not None:
        text.append(_with_reason(f"  state_dir: {_flow(str(state_dir))}", "jobs, and generated models"))
    return "\n".join(text) + "\n"


def job_text(model: NamedModel) -> str:
    """Return the text of a first job."""
    return JOB.format(model=_flow(model.name))


def _flow(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _with_reason(text: str, because: str) -> str:
    return f"{text:<{COLUMN}}  # {because}"

"""vLLM: argv and environment from a specification. Pure.

Source: vLLM 0.32 and 0.33, ``vllm serve --help`` and ``vllm/envs.py``. Settings whose defaults vary are always given:
the number of concurrent sequences (the default depends on the card, and is wrong on a slice of one), the length of the
context, that prefixes are kept, and that answers report the cached part of the prompt.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from workers.engine.launch.flags import named, refuse_doubled, refuse_owned, render_flags
from workers.engine.launch.llama_server import for_engines
from workers.policy.weights import Backend
from workers.process.child import Command
from workers.spans import SpanGeneration
from workers.spec import Flag, WorkerSpec

PROGRAM: Final = ("vllm", "serve")
OWNED: Final = {
    "model": "model",
    "served-model-name": "the model's name",
    "host": "host",
    "port": "port",
    "uds": "socket",
    "max-num-seqs": "slots",
    "max-model-len": "context",
}
OF_SPANS: Final = dict.fromkeys(
    (
        *("nnodes", "n", "node-rank", "r", "master-addr", "master-port", "headless", "no-headless"),
        *("distributed-executor-backend", "data-parallel-size", "dp", "data-parallel-size-local", "dpl"),
        *("data-parallel-rank", "dpn", "data-parallel-start-rank", "dpr", "data-parallel-address", "dpa"),
        *("data-parallel-rpc-port", "dpp", "data-parallel-backend", "dpb"),
    ),
    "span",
)
# Each with the flags that also decide it, so that an operator's choice stands.
DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "enable-prefix-caching": ("enable-prefix-caching", "no-enable-prefix-caching"),
    "enable-prompt-tokens-details": ("enable-prompt-tokens-details", "no-enable-prompt-tokens-details"),
}
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # its control endpoints: pause, weights, reports about itself
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # no effect without --enable-lora
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that numbers of devices are those of nvidia-smi
}
DEVICES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
EXTENSION: Final = "roundhouse_weights.WeightReceiver"
EXTENSION_FOLDER: Final = Path(__file__).absolute().parent.parent.parent / "weights" / "extension"
DEFAULT_RANK: Final = 16  # default of --max-lora-rank
ANY_DEVICE: Final = frozenset({"*"})


def vllm_command(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of a vLLM API server, whether ``command`` is its CLI (``vllm serve``) or its module.

    Raises:
        InvalidSpec: ``args`` repeats a flag, or one that a configuration key sets.
    """
    refuse_owned(spec.args, OWNED if spec.nodes == 1 else OWNED | OF_SPANS)
    refuse_doubled(spec.args, {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size"})
    program = tuple(spec.command) or PROGRAM
    is_cli = program[-1] == "serve"  # the CLI takes the model as its first argument, and warns of the flag
    flags: dict[str, Flag] = {
        "model": None if is_cli else spec.model,
        "served-model-name": spec.name,
        "host": None if spec.socket else spec.host,
        "port": None if spec.socket else spec.port,
        "uds": str(spec.socket) if spec.socket else None,
        "max-num-seqs": spec.slots,
        "max-model-len": spec.context,
    }
    given = named(spec.args)
    flags |= {name: True for name, rivals in DEFAULTS.items() if given.keys().isdisjoint(rivals)}
    if spec.weights.backend is Backend.NCCL and "weight-transfer-config" not in given:
        flags["weight-transfer-config"] = '{"backend": "nccl"}'
    flags |= {name: value for name, value in _rooms(spec.adapter_room).items() if name not in given}
    model = (spec.model,) if is_cli and spec.model else ()
    adapters = tuple(f"{name}={folder}" for name, folder in spec.adapters.items())
    if adapters:
        adapters = ("--lora-modules", *adapters)
    env = {**ENVIRONMENT, **for_engines(environment), "VLLM_PROCESS_NAME_PREFIX": spec.id}
    env |= {**spec.device_variables, **spec.env}
    if is_extended(spec):
        flags["worker-extension-cls"] = EXTENSION
        env["PYTHONPATH"] = ":".join(filter(None, (str(EXTENSION_FOLDER), env.get("PYTHONPATH"))))
    argv = (*program, *model, *render_flags(flags), *adapters, *render_flags(spec.args))
    return Command(argv=argv, env=env, folder=None if spec.folder is None else str(spec.folder))


def member_command(spec: WorkerSpec, command: Command, generation: SpanGeneration, rank: int) -> Command:
    """Return the command of a member of a span; only that of the first one answers requests."""
    place: dict[str, Flag] = {
        "nnodes": len(generation.members),
        "node-rank": rank,
        "master-addr": generation.members[0].address,
        "master-port": generation.port,
        "headless": True if rank else None,
    }
    span = {
        "rank": rank,
        "size": len(generation.members),
        "address": generation.members[0].address,
        "port": generation.lifeline_port,
        "key": generation.key,
        "join_s": spec.timeouts.start_s,
        "lease_s": generation.lease_s,
    }
    env = {"VLLM_HOST_IP": generation.members[rank].address, **command.env}
    return replace(command, argv=(*command.argv, *render_flags(place)), env=env, span=span)


def is_extended(spec: WorkerSpec) -> bool:
    """Whether our extension is in the engine's worker processes: not if an operator has set another."""
    return "worker-extension-cls" not in named(spec.args)


def most_rank(spec: WorkerSpec) -> int:
    """Return the largest rank of an adapter that the engine accepts."""
    rank = named(spec.args).get("max-lora-rank")
    return int(str(rank)) if str(rank).isdigit() else DEFAULT_RANK


def _rooms(adapters: int) -> dict[str, Flag]:
    """Return the flags for adapters, and one place more: on a CPU the base's tokens take the last one's in a batch."""
    return {"enable-lora": True, "max-loras": adapters + 1, "max-cpu-loras": adapters + 1} if adapters else {}


def devices_of(spec: WorkerSpec, environment: Mapping[str, str]) -> frozenset[str]:
    """Return the devices that an engine may use, as configured; otherwise any.

    Two vLLMs that start on one device at the same time each charge the other's memory to themselves (vllm #55827).
    """
    given = named(spec.args)
    if "device-ids" in given:
        return _named(str(given["device-ids"]))
    for name in DEVICES:
        value = spec.env.get(name, spec.device_variables.get(name, environment.get(name, "")))
        if value:
            return _named(value)
    return ANY_DEVICE


def _named(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip()) or ANY_DEVICE


def reads_tool_calls(spec: WorkerSpec) -> bool:
    """Whether vLLM knows how its model writes calls; otherwise it answers 400 to any request that has tools."""
    return "enable-auto-tool-choice" in named(spec.args)


def socket_of(folder: Path, worker_id: str) -> Path:
    """Return the path of a worker's socket below the folder that the operator has named."""
    return folder / f"{worker_id}.sock"

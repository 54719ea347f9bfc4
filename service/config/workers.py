"""The specifications of the workers that a configuration asks for."""

import hashlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from service.config.inventory import lanes_for
from service.config.machine_plan import share_machine
from service.config.model import ModelConfig
from service.config.schema import Config
from service.config.tools import check_programs, check_rewards, python_tools
from service.errors import ConfigError
from workers.devices.layout import Lane
from workers.engine.launch import command_for
from workers.engine.launch.vllm import socket_of
from workers.errors import InvalidSpec
from workers.files.gguf_header import companion_of, is_gguf
from workers.lanes.lane_spec import memory_need, most_room, on_lane
from workers.models.hub_cache import find_kept, hub_settings
from workers.models.hub_name import PREFIX as HUB_PREFIX
from workers.models.hub_name import HubName, parse_hub_name
from workers.models.small_model import small_model_path
from workers.policy.repetition import RepetitionLimits
from workers.policy.weights import WeightsPolicy
from workers.requests.bios_words import BiosPolicy
from workers.spec import LLAMA_CPP, MAX_SOCKET_PATH, EngineKind, Flag, WorkerId, WorkerSpec
from workers.tools.calls import ToolLimits

OWN_PREFIX: Final = "roundhouse:"
TINY: Final = "roundhouse:tiny"  # made on the spot; its text is noise
SMALL: Final = "roundhouse:small"  # a real model, fetched from the package index
REMOTE_CODE: Final = "trust-remote-code"
TINY_MODEL: Final = "tiny.gguf"
MAX_ID: Final = 48  # bytes of a worker's id in its socket's name
REPOSITORY: Final = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")


def worker_specs(config: Config, base: Path, state_dir: Path) -> list[WorkerSpec]:
    """Return one specification per replica; relative paths start at ``base``, the configuration's folder.

    Raises:
        ConfigError: a model file, a device or a program (an MCP server's too) is not there, or a flag is given twice.
        DevicesUnreadable: the machine's driver fails.
    """
    try:
        specs = share_machine(_specs_of(config, base, state_dir), config, base, tiny_model_path(state_dir))
    except InvalidSpec as error:  # a URL that is not valid, say
        raise ConfigError(f"models: {error}") from error
    for spec in specs:
        _check_launch(spec)
    check_programs(config)
    check_rewards(config, base)
    return specs


def _specs_of(config: Config, base: Path, state_dir: Path) -> list[WorkerSpec]:
    specs: list[WorkerSpec] = []
    for name, model in config.models.items():
        if model.placement == "fixed":
            sockets = _socket_folder(model, base, state_dir)
            plain = _usable_spec(name, model, base, state_dir)
            specs += [_replica(plain, index, sockets) for index in range(model.replicas)]
    return [*specs, *_specs_on_lanes(config, base, state_dir)]


def _specs_on_lanes(config: Config, base: Path, state_dir: Path) -> list[WorkerSpec]:
    """Return a specification for each model on each lane; a lane runs one model at a time."""
    placed = {name: model for name, model in config.models.items() if model.placement == "lanes"}
    if not placed:
        return []
    plain = [_usable_spec(name, model, base, state_dir) for name, model in placed.items()]
    lanes = lanes_for(plain, config.gpus.inventory, base, config.gpus)
    specs = [_with_need(spec, lanes) for spec in plain]
    _check_pins(specs, lanes)
    return [
        # One socket per model: a sleeping engine goes on listening.
        on_lane(spec, lane, socket_of(sockets, f"{lane.id}-{number}") if sockets else None)
        for lane in lanes
        for number, spec in enumerate(specs)
        for sockets in [_socket_folder(placed[spec.name], base, state_dir)]
    ]


def _with_need(spec: WorkerSpec, lanes: Sequence[Lane]) -> WorkerSpec:
    """Return the specification with the memory that its model needs on a device, where that is known.

    Raises:
        ConfigError: no device has room for it.
    """
    need, most = memory_need(spec, os.environ, is_on_cpu=lanes[0].device.is_cpu), most_room(lanes)
    if need is None:
        return spec
    if most is not None and need.least > most:
        if spec.memory_mib is not None:
            raise ConfigError(f"models.{spec.name}.memory_mib: {need.least} MiB; the largest device has {most} MiB")
        raise ConfigError(
            f"models.{spec.name}.model: {spec.model} takes {need.least} MiB with {need.tokens} tokens of context, and "
            f"the largest device has room for {most} MiB; give a smaller context, fewer slots, another model, or "
            "memory_mib if it takes less"
        )
    return replace(spec, need_mib=need.taken)


def _check_pins(specs: Sequence[WorkerSpec], lanes: Sequence[Lane]) -> None:
    """Check that pinned models leave a lane to the others.

    Raises:
        ConfigError: they do not.
    """
    pinned = [spec.name for spec in specs if spec.pin]
    if len(pinned) > len(lanes) or (len(pinned) == len(lanes) and len(specs) > len(pinned)):
        raise ConfigError(
            f"models.{pinned[-1]}.pin: {len(pinned)} models are pinned, and there are {len(lanes)} lanes for "
            f"{len(specs)} models; pin fewer, or raise gpus.max_agents_per_gpu"
        )


def models_without_file(config: Config) -> list[str]:
    """Return the models that name no file, so that the one that Roundhouse makes stands in."""
    return [name for name, model in config.models.items() if _stands_in(model)]


def own_models(config: Config) -> frozenset[str]:
    """Return those of Roundhouse's own models, ``TINY`` and ``SMALL``, that a configuration needs."""
    return frozenset({TINY, SMALL} & set(map(_named_model, config.models.values())))


def hub_models(config: Config) -> list[HubName]:
    """Return the models of a hub, in the form that their engines load.

    Raises:
        InvalidSpec: a hub name is not valid.
    """
    models = [model for model in config.models.values() if EngineKind(model.engine) is not EngineKind.ATTACHED]
    return list(dict.fromkeys(_hub_name(model) for model in models if _is_of_hub(model)))


def _is_of_hub(model: ModelConfig) -> bool:
    return model.model is not None and model.model.startswith(HUB_PREFIX)


def _hub_name(model: ModelConfig) -> HubName:
    if any(flag.replace("_", "-").removeprefix("--") == REMOTE_CODE for flag in model.args):
        raise InvalidSpec(f"{model.model}: {REMOTE_CODE} would run code from the hub, and no code is fetched")
    return parse_hub_name(str(model.model), is_gguf=EngineKind(model.engine) is not EngineKind.VLLM)


def _hub_file(model: ModelConfig) -> str:
    """Return the cached path of a hub's model, or its name until it is fetched."""
    kept = find_kept(_hub_name(model), hub_settings(os.environ, Path.home()).cache)
    return str(model.model if kept is None else kept.absolute())


def tiny_model_path(state_dir: Path) -> Path:
    """Return the path of the model that Roundhouse makes itself."""
    return state_dir.resolve() / "models" / TINY_MODEL


def _stands_in(model: ModelConfig) -> bool:
    return EngineKind(model.engine) is EngineKind.EMBEDDED and model.model is None and not model.command


def _named_model(model: ModelConfig) -> str | None:
    return TINY if _stands_in(model) else model.model


def _model_file(name: str, model: ModelConfig, base: Path, state_dir: Path) -> str | None:
    engine, given = EngineKind(model.engine), model.model
    own = {TINY: tiny_model_path(state_dir), SMALL: small_model_path()}.get(_named_model(model) or "")
    if own is not None and engine not in LLAMA_CPP:
        raise ConfigError(f"models.{name}.model: {given} is a GGUF file, which {engine} does not load")
    if own is not None:
        return str(own)
    if engine is EngineKind.ATTACHED or (given is None and model.command):
        return given
    if _is_of_hub(model):
        return _hub_file(model)
    if given is None:
        what = "the folder of a checkpoint" if engine is EngineKind.VLLM else "the path of a GGUF file"
        raise ConfigError(f"models.{name}.model: is required for engine {engine}: {what}")
    return _local_model(name, model, (base / Path(given).expanduser()).resolve())


def _local_model(name: str, model: ModelConfig, path: Path) -> str:
    """Return the path of a model on this machine, or its name where the engine itself may fetch it."""
    engine, given = EngineKind(model.engine), str(model.model)
    is_vllm, has_command = engine is EngineKind.VLLM, bool(model.command)
    if path.is_dir() if is_vllm else path.is_file():
        if not (is_vllm or has_command):
            _check_gguf(name, path)
        return str(path)
    if given.startswith(OWN_PREFIX):
        raise ConfigError(f"models.{name}.model: {given} is not one of Roundhouse's models: {SMALL}, {TINY}")
    if has_command and not is_vllm:
        return str(path)
    is_repository = REPOSITORY.match(given) and not given.endswith(".gguf") and not path.exists()
    if is_repository and engine is not EngineKind.EMBEDDED:
        return given
    hint = f"; for a model of the hub write hf:{given}" if is_repository else ""
    raise ConfigError(f"models.{name}.model: there is no {'folder' if is_vllm else 'file'} {path}{hint}")


def _check_gguf(name: str, path: Path) -> None:
    if not is_gguf(path):
        raise ConfigError(f"models.{name}.model: {path} is not a readable GGUF file")
    kind = companion_of(path)
    if kind is not None:
        raise ConfigError(f"models.{name}.model: {path} is {kind} by its own header, not a model")


def _replica(spec: WorkerSpec, index: int, sockets: Path | None) -> WorkerSpec:
    worker_id = WorkerId(f"{spec.name}-{index}")
    socket = socket_of(sockets, worker_id) if sockets else None
    return replace(spec, id=worker_id, port=spec.port + index, socket=socket)


def _usable_spec(name: str, model: ModelConfig, base: Path, state_dir: Path) -> WorkerSpec:
    try:
        return _spec(name, model, base, state_dir)
    except InvalidSpec as error:
        raise ConfigError(f"models.{name}.{error}") from error


def _spec(name: str, model: ModelConfig, base: Path, state_dir: Path) -> WorkerSpec:
    """Return the specification that all workers of a model share."""
    bios, tools, engine = model.bios, model.tools, EngineKind(model.engine)
    return WorkerSpec(
        name=name,
        engine=engine,
        model=_model_file(name, model, base, state_dir),
        host=model.host,
        port=model.port,
        url=str(model.url) if model.url else None,
        headers=model.headers,
        nodes=model.span.nodes,
        slots=model.slots,
        capacity=model.capacity,
        kv_tokens=model.kv_tokens,
        context=model.context,
        max_answer=model.max_answer,
        continuation=model.continuation,
        spares=None if model.spares == "auto" else model.spares,
        command=_command(model.command),
        folder=None if engine is EngineKind.ATTACHED else base.resolve(),
        args={key: _flag(value) for key, value in model.args.items()},
        env=model.env,
        params=model.params,
        timeouts=model.timeouts,
        restart=model.restart,
        bios=BiosPolicy(
            is_on=bios.enabled,
            template=bios.template,
            clock=bios.clock,
            clock_step_s=bios.clock_step_s,
            context=bios.context,
            cue=bios.cue,
            quote=bios.quote,
            invalid=bios.invalid,
            left=bios.left,
        ),
        tool_limits=ToolLimits(
            iterations=tools.iterations,
            stuck=tools.stuck,
            timeout_s=tools.timeout_s,
            fallback=tools.fallback,
            arguments=tools.arguments,
        ),
        tool_runner=python_tools(name, model.tools.python, base),
        repetition=model.repetition or RepetitionLimits(lines=None),
        weights=model.weights or WeightsPolicy(),
        adapters={key: _adapter(name, key, path, model, base) for key, path in model.adapters.items()},
        max_adapters=model.max_adapters,
        pin=model.pin,
        memory_mib=model.memory_mib,
        keep_s=model.keep_s,
    )


def _command(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command with an absolute program path, since the engine starts in another folder."""
    if not command or "/" not in command[0]:
        return tuple(command)
    return (str(Path(command[0]).absolute()), *command[1:])


def _socket_folder(model: ModelConfig, base: Path, state_dir: Path) -> Path | None:
    """Return the folder of vLLM's sockets; None for a port, which must be asked for: control endpoints check no key."""
    if model.engine != "vllm" or model.socket_dir is False:
        return None
    if model.socket_dir:
        return (base / model.socket_dir).resolve()
    folder = state_dir.resolve() / "sockets"
    if len(os.fsencode(folder)) + MAX_ID <= MAX_SOCKET_PATH:
        return folder
    short = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]  # Linux bounds a socket's path
    return Path(tempfile.gettempdir()) / f"roundhouse-{os.geteuid()}-{short}"


def _adapter(name: str, adapter: str, path: str, model: ModelConfig, base: Path) -> str:
    """Return an adapter's path: a folder for vLLM, a file for llama.cpp."""
    found = (base / Path(path).expanduser()).resolve()
    folder = (found / "adapter_config.json", "folder with an adapter_config.json")
    file, what = folder if model.engine == "vllm" else (found, "GGUF file")
    if not file.is_file():
        raise ConfigError(f"models.{name}.adapters.{adapter}: no {what} at {found}")
    return str(found)


def _flag(value: object) -> Flag:
    if isinstance(value, list):
        return tuple(value)
    assert value is None or isinstance(value, str | int | float | bool)  # noqa: S101 - the schema allows nothing else
    return value


def _check_launch(spec: WorkerSpec) -> None:
    if not spec.owns_engine:
        return
    try:
        program = command_for(spec, {}).argv[0]
    except InvalidSpec as error:
        raise ConfigError(f"models.{spec.name}.{error}") from error
    if shutil.which(program) is None:
        raise ConfigError(
            f"models.{spec.name}.command: no such program: {program!r}; give its path with command: [...]"
        )
    if spec.engine is EngineKind.EMBEDDED and not spec.command and find_spec("xllamacpp") is None:
        raise ConfigError(
            f"models.{spec.name}.engine: the embedded engine is not installed: there is no wheel of xllamacpp for"
            f" {platform.system()} on {platform.machine()}; use llama-server, vllm or attached"
        )

"""From the configuration to the specifications of its workers."""

import re
import shutil
from pathlib import Path
from typing import Final

from service.config.schema import Config, ModelConfig
from service.errors import ConfigError
from service.tools import python_tools
from workers.errors import InvalidSpec
from workers.launch import command_for
from workers.policy.repetition import RepetitionLimits
from workers.policy.restart import RestartPolicy
from workers.prompting.bios import BiosPolicy
from workers.spec import EngineKind, Flag, WorkerId, WorkerSpec, WorkerTimeouts
from workers.tools.runner import ToolRunner
from workers.tools.running import ToolLimits

TINY_MODEL: Final = "tiny.gguf"
_REPOSITORY: Final = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")


def worker_specs(config: Config, base: Path, state_dir: Path) -> list[WorkerSpec]:
    """Return one specification a replica; relative paths are taken from ``base``, the configuration's folder.

    Raises:
        ConfigError: a model file or a program is not there, or a flag is given twice.
    """
    specs: list[WorkerSpec] = []
    for name, model in config.models.items():
        file = _model_file(name, model, base, state_dir)
        python = python_tools(name, model.tools.python, base)
        specs += [_spec(name, model, file, index, python) for index in range(model.replicas)]
    for spec in specs:
        _check_launch(spec)
    return specs


def models_without_file(config: Config) -> list[str]:
    """Return the models that name no file, so that Roundhouse makes one for them."""
    return [name for name, model in config.models.items() if _is_tiny(model)]


def tiny_model_path(state_dir: Path) -> Path:
    """Return where the model is that Roundhouse makes itself."""
    return state_dir.resolve() / "models" / TINY_MODEL


def _is_tiny(model: ModelConfig) -> bool:
    return EngineKind(model.engine) is EngineKind.EMBEDDED and model.model is None and not model.command


def _model_file(name: str, model: ModelConfig, base: Path, state_dir: Path) -> str | None:
    if _is_tiny(model):
        return str(tiny_model_path(state_dir))
    if model.model is None:
        if model.command:
            return None
        raise ConfigError(f"models.{name}.model: is required for engine {model.engine}: the path of a GGUF file")
    path = (base / Path(model.model).expanduser()).resolve()
    if path.is_file() or model.command:
        return str(path)
    if (
        EngineKind(model.engine) is EngineKind.LLAMA_SERVER
        and _REPOSITORY.match(model.model)
        and not model.model.endswith(".gguf")
    ):
        return model.model
    raise ConfigError(f"models.{name}.model: there is no file {path}")


def _spec(name: str, model: ModelConfig, file: str | None, index: int, python: ToolRunner | None) -> WorkerSpec:
    lines = model.repetition.lines if model.repetition else None
    bios, tools = model.bios, model.tools
    return WorkerSpec(
        id=WorkerId(f"{name}-{index}"),
        name=name,
        engine=EngineKind(model.engine),
        model=file,
        host=model.host,
        port=model.port + index,
        slots=model.slots,
        context=model.context,
        command=tuple(model.command),
        args={key: _flag(value) for key, value in model.args.items()},
        env=model.env,
        params=model.params,
        timeouts=WorkerTimeouts(**model.timeouts.model_dump()),
        restart=RestartPolicy(**model.restart.model_dump()),
        bios=BiosPolicy(is_on=bios.enabled, template=bios.template, clock_step_s=bios.clock_step_s),
        tool_limits=ToolLimits(iterations=tools.iterations, timeout_s=tools.timeout_s, fallback=tools.fallback),
        tool_runner=python,
        repetition=RepetitionLimits(lines=lines),
    )


def _flag(value: object) -> Flag:
    if isinstance(value, list):
        return tuple(value)
    assert value is None or isinstance(value, str | int | float | bool)  # noqa: S101 - the schema allows nothing else
    return value


def _check_launch(spec: WorkerSpec) -> None:
    try:
        program = command_for(spec, {}).argv[0]
    except InvalidSpec as error:
        raise ConfigError(f"models.{spec.name}.{error}") from error
    if shutil.which(program) is None:
        raise ConfigError(
            f"models.{spec.name}.command: there is no program {program!r}; give its path with command: [...]"
        )

"""The configuration when none is named: found in this folder, made for one model, or written by ``init``."""

import fcntl
import os
import random
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import typer

from service.cli.commands.known_configurations import note_known
from service.cli.conventions import FILE, state_home
from service.config.inventory import devices_of
from service.config.load import load_config
from service.config.proposal import OWN, SMALL_MEMORY, Means, NamedModel, configuration_text, job_text
from service.config.workers import SMALL
from service.errors import ConfigError
from service.store.state_folder import LOCK_NAME
from workers.devices.discovery import host_memory_mib, usable_cores
from workers.devices.visible import usable
from workers.errors import DevicesUnreadable
from workers.files.atomic import replace_file
from workers.files.model_memory import MIB, ModelMemory, model_memory
from workers.models.hub_cache import find_kept, hub_settings, is_settled
from workers.models.hub_name import GGUF, HubName, parse_hub_name
from workers.models.hub_name import PREFIX as HUB_PREFIX
from workers.spec import WorkerSpec

JOB_FILE: Final = "job.yaml"
HTTP_PORTS: Final = range(8080, 8180)
PASSING_PORTS: Final = range(8180, 8280)  # ports of services that end with their command: none looks here
ENGINE_PORTS: Final = range(9100, 9200)
PROGRAMS: Final = ("llama-server", "vllm")


def config_path(config: Path | None, model: str | None) -> Path:
    """Return the configuration to use: the named one, one made for ``model``, or this folder's.

    Raises:
        ConfigError: there is none, or both are given.
    """
    if config is not None and model is not None:
        raise ConfigError("--config and --model exclude each other: give one of them")
    if model is not None:
        return _made(model)
    if config is not None:
        return config
    if not Path(FILE).is_file():
        raise ConfigError(f"no {FILE} here: write one with roundhouse init, or give --model M or --config FILE")
    typer.echo(f"configuration: {FILE}", err=True)
    return Path(FILE)


def write_files(model: str, folder: Path) -> None:
    """Write a configuration for this machine, and a first job for it.

    Raises:
        ConfigError: a file is there already, or the model cannot be served here.
    """
    paths = (folder / FILE, folder / JOB_FILE)
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} already exists, and is not overwritten; give another folder with --dir")
    named = _named(model)
    means = _means(http_port=_free_port(HTTP_PORTS), engine_port=_free_port(ENGINE_PORTS))
    for path, text in zip(paths, (configuration_text(named, means), job_text(named)), strict=True):
        replace_file(path, text.encode())
        typer.echo(f"written: {path}")
    note_known(paths[0], load_config(paths[0]))
    here = "" if folder == Path() else f"cd {folder} && "
    typer.echo(f"next: {here}roundhouse run {JOB_FILE}")


def write_passing(model: str, folder: Path, context: int | None = None) -> Path:
    """Write a configuration on free ports into a temporary folder; ``context`` is the wanted context in tokens.

    Raises:
        ConfigError: the model cannot be served here.
    """
    path = folder / FILE
    means = _means(http_port=_free_port(PASSING_PORTS), engine_port=_free_port(ENGINE_PORTS), context=context)
    replace_file(path, configuration_text(_named(model), means, folder / "state").encode())
    return path


def is_reference(model: str) -> bool:
    """Whether a name refers to a model's files, and not to a model of a service."""
    return model in OWN or model.startswith(HUB_PREFIX) or Path(model).expanduser().exists()


def _made(model: str) -> Path:
    named = _named(model)
    home = state_home() / named.name
    path = home / FILE
    if path.is_file() and _is_served(home / "state"):  # the next reload of that service must not see changes
        return path
    means = _means(http_port=_free_port(HTTP_PORTS), engine_port=_free_port(ENGINE_PORTS))
    replace_file(path, configuration_text(named, means, home / "state").encode())
    return path


def _is_served(state_dir: Path) -> bool:
    """Whether a service runs on a state folder."""
    try:
        with (state_dir / LOCK_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _named(reference: str) -> NamedModel:
    """Return the facts of a model: one of ours, of a hub, a GGUF file, or a folder with a checkpoint."""
    if reference in OWN:
        return NamedModel(reference=reference, is_gguf=True, memory=SMALL_MEMORY if reference == SMALL else None)
    if reference.startswith(HUB_PREFIX):
        return _named_of_hub(parse_hub_name(reference))
    path = Path(reference).expanduser().resolve()
    is_gguf = path.is_file() and path.suffix == ".gguf"
    if not is_gguf and not (path / "config.json").is_file():
        raise ConfigError(
            f"{reference}: no such model; give {', '.join(OWN)}, a GGUF file, a folder with config.json and weights, or"
            " hf:ORG/REPO of a hub"
        )
    return NamedModel(reference=str(path), is_gguf=is_gguf, memory=model_memory(str(path)))


def _named_of_hub(name: HubName) -> NamedModel:
    """Return a hub's model, pinned to its commit; under its given name where the hub is away but a copy is cached."""
    settings = hub_settings(os.environ, Path.home())
    kept = find_kept(name, settings.cache)
    if kept is not None and is_settled(name, kept, settings.cache):
        return _kept_of_hub(name, kept)
    from workers.models.hub import HubUnreachable, find_model  # noqa: PLC0415 - only a fetch needs it

    try:
        found = find_model(name, settings)
    except HubUnreachable:
        if kept is None or (name.is_of_commit and name.file is None):
            raise
        return _kept_of_hub(name, kept)
    memory = ModelMemory(weights_mib=-(-found.weights_bytes // MIB), token_bytes=None)
    return NamedModel(reference=str(found.name), is_gguf=found.is_gguf, memory=memory)


def _kept_of_hub(name: HubName, kept: Path) -> NamedModel:
    return NamedModel(reference=str(name), is_gguf=kept.suffix == GGUF, memory=model_memory(str(kept)))


def _means(http_port: int = HTTP_PORTS[0], engine_port: int = ENGINE_PORTS[0], context: int | None = None) -> Means:
    try:
        gpus = usable(devices_of(None, Path(), os.environ))
    except DevicesUnreadable as error:
        typer.echo(f"no GPU is used: {error}", err=True)
        gpus = []
    programs = {name for name in PROGRAMS if shutil.which(name)} | ({"embedded"} if find_spec("xllamacpp") else set())
    return Means(
        gpus=gpus,
        cores=usable_cores(),
        memory_mib=host_memory_mib(),
        programs=frozenset(programs),
        http_port=http_port,
        engine_port=engine_port,
        context=context,
    )


def on_free_ports(specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
    """Return the specifications of this command's own engines, with other ports where theirs are taken.

    Ports are drawn at random: two commands that start together would pick the same first free one.
    """
    taken = {spec.port for spec in specs if spec.owns_engine and spec.socket is None and not is_free(spec.port)}
    if not taken:
        return list(specs)
    used = {spec.port for spec in specs}
    free = (port for port in random.sample(ENGINE_PORTS, len(ENGINE_PORTS)) if port not in used and is_free(port))
    moved = dict(zip(sorted(taken), free, strict=False))
    for port, other in moved.items():
        typer.echo(f"port {port} is taken; {other} is used", err=True)
    return [replace(spec, port=moved.get(spec.port, spec.port)) if spec.owns_engine else spec for spec in specs]


def _free_port(ports: range) -> int:
    """Return the first free port, or the first port where none is free."""
    return next(filter(is_free, ports), ports[0])


def is_free(port: int) -> bool:
    """Whether a port of loopback is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

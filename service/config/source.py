"""The source of a service's configuration: its files, its folders, and all that is prepared before a start."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from service.config.keys import callers_of
from service.config.lane_plan import with_mig
from service.config.load import load_config, named_variables, naming_lines
from service.config.schema import Config
from service.config.workers import SMALL, TINY, hub_models, own_models, tiny_model_path, worker_specs
from service.conversations.callers import Caller
from workers.models.hub_cache import hub_settings
from workers.models.hub_name import HubName
from workers.models.small_model import ensure_small_model
from workers.spec import WorkerSpec

if TYPE_CHECKING:
    from workers.models.download import Progress

MOST_FILES: Final = 10_000  # files of a folder that are checked


def roots_of(config: Config, base: Path) -> list[Path]:
    """Return the folders of ``server.roots``; without any, the configuration's folder and each model's."""
    given = config.server.roots
    if given:
        return [(base / root.expanduser()).resolve() for root in given]
    models = [(base / Path(model.model).expanduser()).resolve() for model in config.models.values() if model.model]
    folders = (path if path.is_dir() else path.parent for path in models if path.exists())
    return list(dict.fromkeys((base.resolve(), *folders)))


def outside_with_files(roots: Sequence[Path], path: Path) -> str | None:
    """Return why a path, or a file in it if it is a folder, may not be read; None if all may be.

    A link below the roots may lead out of them.
    """
    fault = outside_of(roots, path)
    if fault is not None or not path.is_dir():
        return fault
    try:
        files = list(islice(path.iterdir(), MOST_FILES))
    except OSError:
        return f"{path} cannot be read"
    return next((fault for fault in (outside_of(roots, file) for file in files) if fault is not None), None)


def outside_of(roots: Sequence[Path], path: Path) -> str | None:
    """Return why a path may not be read; None where it may.

    A path elsewhere is refused in the same words whether it exists or not, so that callers cannot find that out.
    """
    try:
        resolved = path.resolve()
        resolved.exists()
        if any(resolved.is_relative_to(root) for root in roots):
            return None
    except (OSError, ValueError, RuntimeError):  # a NUL, a circle of links, or too long a name
        pass
    return f"{path} is not below any of server.roots: {', '.join(map(str, roots))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A usable configuration: the files, programs and keys that it names are there.

    Callers may have files read from ``roots``; ``callers`` are known by the digests of their keys;
    ``variables`` are the environment variables that it names, ``files`` the files that it was read from.
    """

    config: Config
    specs: Sequence[WorkerSpec]
    roots: Sequence[Path] = ()
    callers: Mapping[bytes, Caller] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """A configuration file, and the command line's overrides."""

    path: Path
    overrides: Mapping[str, object] = field(default_factory=dict)  # keys of ``server``
    enable_mig: bool = False

    def load(self, progress: "Progress | None" = None) -> LoadedConfig:
        """Read the file and all that it names; Roundhouse's own models are made or fetched, which may take long.

        Raises:
            ConfigError: with every fault.
            ModelUnavailable: the small model, or one of a hub, cannot be fetched.
        """
        base = self.path.parent
        config = with_mig(load_config(self.path, self.overrides), enable_mig=self.enable_mig)
        callers = callers_of_config(config, base)
        with naming_lines(self.path):
            specs = usable_specs(config, base, config.server.state_dir, progress)
        return LoadedConfig(
            config=config,
            specs=specs,
            roots=roots_of(config, base),
            callers=callers,
            variables=named_variables(self.path),
            files=_files_of(config, self.path),
        )


def _files_of(config: Config, path: Path) -> tuple[Path, ...]:
    """Return the files that a configuration was read from."""
    named = (config.server.keys_file, config.gpus.inventory)
    return (path, *(path.parent / file.expanduser() for file in named if file is not None))


def callers_of_config(config: Config, base: Path) -> dict[bytes, Caller]:
    """Return the caller of each key, by the key's digest.

    Raises:
        ConfigError: the file of keys cannot be used, or a name or a key appears twice.
    """
    server = config.server
    file = None if server.keys_file is None else base / server.keys_file.expanduser()
    return callers_of(server.api_keys, server.keys, file)


def usable_specs(config: Config, base: Path, state_dir: Path, progress: "Progress | None" = None) -> list[WorkerSpec]:
    """Return the specifications of all workers; make or fetch the hub's and Roundhouse's own models that they use.

    Raises:
        ConfigError: a file or a program that the configuration names is not there.
        ModelUnavailable: the small model, or one of a hub, cannot be fetched.
    """
    specs = worker_specs(config, base, state_dir)
    if of_hub := hub_models(config):
        _fetch_of_hub(of_hub, progress)
        specs = worker_specs(config, base, state_dir)  # now that their files are there
    own = own_models(config)
    if SMALL in own:
        ensure_small_model(progress)
    if TINY in own:
        _make_tiny(state_dir)
    return specs


def _fetch_of_hub(names: Sequence[HubName], progress: "Progress | None") -> None:
    from workers.models.hub import ensure_hub_model  # noqa: PLC0415 - only a fetch needs it

    settings = hub_settings(os.environ, Path.home())
    for name in names:
        ensure_hub_model(name, settings, progress)


def _make_tiny(state_dir: Path) -> None:
    from workers.engine.embedded.tiny_model import ensure_tiny_model  # noqa: PLC0415 - it takes a while

    ensure_tiny_model(tiny_model_path(state_dir))

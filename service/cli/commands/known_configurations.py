"""Configurations that a person has used before: one found in a folder may be a stranger's, and runs commands."""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import typer

from service.cli.conventions import state_home
from service.cli.displays.console import part, plain
from service.config.schema import Config
from service.errors import ConfigError
from workers.files.atomic import replace_file

FILE: Final = "known-configurations"  # one hexadecimal digest per line, in the user's state folder
MOST: Final = 1000


def note_known(path: Path, config: Config) -> None:
    """Record that the user uses a configuration; one that is not a regular file is asked about each time."""
    if not path.is_file():
        return
    known, digest = _read(), _digest(path, config)
    if digest in known:
        return
    with suppress(OSError):  # a service may have no home
        folder = state_home()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = [*known, digest][-MOST:]
        replace_file(folder / FILE, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)


def ask_for(path: Path, config: Config) -> None:
    """Name a found configuration, and ask once whether to use it.

    Raises:
        ConfigError: the answer is no, or there is no terminal to ask on.
    """
    typer.echo(f"configuration: {plain(path)}", err=True)
    if _digest(path, config) in _read():
        return
    commands = [f"{name}: {' '.join(model.command)}" for name, model in config.models.items() if model.command]
    python = [f"{name}: the Python file of its tools" for name, model in config.models.items() if model.tools.python]
    servers = [
        f"{name}: {' '.join(server.command)}"
        for name, model in config.models.items()
        for server in model.tools.mcp.values()
        if server.command
    ]
    runs = "; ".join(plain(each) for each in (*commands, *servers, *python))
    what = f"{path} was not used before, and a configuration can run programs" + part(" ({})", runs)
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}; use it with --config {path}")
    typer.echo(f"{plain(what)}. Use it? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigError(f"{path} is not used; give another configuration with --config, or a service with --url")
    note_known(path, config)


def _digest(path: Path, config: Config) -> str:
    """Return one digest of a file, its path, and the Python files that it runs."""
    digest = hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + path.read_bytes())
    for model in config.models.values():
        for place in model.tools.python.values():
            code = path.parent / f"{place.partition(':')[0].removesuffix('.py').replace('.', '/')}.py"
            digest.update(b"\0" + (code.read_bytes() if code.is_file() else b""))
    return digest.hexdigest()


def _read() -> list[str]:
    try:
        return (state_home() / FILE).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []

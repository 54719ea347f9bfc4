"""The service that a command uses: a running one, or one of its own, which ends with it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console

from roundhouse_client import Client
from roundhouse_client.errors import Refused, RoundhouseError
from roundhouse_client.values.models import Model
from service.cli.commands.first_steps import HTTP_PORTS, is_reference, write_passing
from service.cli.commands.known_configurations import ask_for, note_known
from service.cli.connection import connect
from service.cli.conventions import FILE, PARENT
from service.cli.displays.console import can_draw, plain
from service.cli.displays.fetch_display import FetchBars
from service.config.load import STORE_URL, load_config, named_variables
from service.config.proposal import name_of
from service.config.schema import Config
from service.config.source import usable_specs
from service.config.workers import SMALL
from service.errors import ConfigError
from workers.errors import StartFailed
from workers.process.listeners import foreign_listener

LOOK_S: Final = 0.1
FIND_S: Final = 3.0  # time for an answer from a port
TAIL: Final = 10  # shown log lines of an engine or a service that could not be started
GRACE_S: Final = 20.0  # time to end after SIGTERM, which is sent twice; then SIGKILL
FAILED: Final = frozenset({"backoff", "failed"})
# A name goes to the terminal and into an agent's settings, which hold commands.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*")
SHOWN: Final = 100


FoundUrlOption = Annotated[
    str | None, typer.Option("--url", envvar="ROUNDHOUSE_URL", help="Address of a running service; none is started.")
]
StartConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", envvar="ROUNDHOUSE_CONFIG", help="Configuration of a service to start.")
]


class FoundService(msgspec.Struct, frozen=True, kw_only=True):
    """A service that answers, and the chosen model; ``is_own`` says whether it ends with this command."""

    url: str
    api_key: str | None
    model: Model
    models: tuple[Model, ...]
    is_own: bool = False


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The user's options for the service: its address, or the model and configuration to start one with.

    ``model`` is a model of a service, or a model's files; ``context`` is the context in tokens of a model that is
    started for this.
    """

    url: str | None = None
    api_key: str | None = None
    config: Path | None = None
    model: str | None = None
    context: int | None = None


@contextmanager
def open_service(wanted: Wanted) -> Iterator[FoundService]:
    """Find a service, or start one, which ends with the block in any case.

    Raises:
        ConfigError: there is no such model, or a service cannot be started with it.
        ServiceAway: no service answers at the given address.
        StartFailed: an engine of a started service cannot be started.
    """
    running = find_service(wanted)
    if running is not None:
        yield running
        return
    path = _own_configuration(wanted)
    config = None if path is None else load_config(path)
    is_used = path is not None and config is not None and (wanted.model is None or wanted.model in config.models)
    if path is not None and config is not None and is_used:
        if wanted.config is None:
            ask_for(path, config)
        else:
            note_known(path, config)
    with tempfile.TemporaryDirectory(prefix="roundhouse-") as name:
        path = _configuration(wanted, path, config, Path(name))
        with _started(wanted, path, Path(name)) as url:
            with connect(url, wanted.api_key) as client:
                models = client.list_models().data
            yield msgspec.structs.replace(_chosen(wanted, url, models), is_own=True)


def find_service(wanted: Wanted) -> FoundService | None:
    """Return the running service at the given address, or here; None where one has to be started.

    Raises:
        ConfigError: it has no such model.
        ServiceAway: none answers at the given address.
    """
    if wanted.url is not None:
        with connect(wanted.url, wanted.api_key) as client:
            models = client.list_models().data
        return _chosen(wanted, wanted.url, models)
    path = _own_configuration(wanted)
    port = HTTP_PORTS[0] if path is None else load_config(path).server.port
    if wanted.config is None and (owner := foreign_listener(port)) is not None:
        text = f"a program of another user ({owner}) listens at port {port}, and is not asked; use --url to ask it"
        typer.echo(text, err=True)
        return None
    return _running(f"http://127.0.0.1:{port}", wanted)


def _own_configuration(wanted: Wanted) -> Path | None:
    """Return the named configuration, or this folder's; None without either."""
    return wanted.config or (Path(FILE) if Path(FILE).is_file() else None)


def _running(url: str, wanted: Wanted) -> FoundService | None:
    """Return the service that runs at an address; None if none does, or it lacks the model of the given files."""
    with Client(url, api_key=wanted.api_key, patience_s=0.0, timeout_s=FIND_S) as client:
        try:
            client.get_readiness()
        except Refused as error:
            if not error.code:  # another program listens there
                return None
        except RoundhouseError:
            return None
    with connect(url, wanted.api_key) as client:
        models = client.list_models().data
    named = None if wanted.model is None else name_of(wanted.model)
    if named is not None and is_reference(wanted.model or "") and named not in {model.id for model in models}:
        return None
    return _chosen(wanted, url, models)


def _chosen(wanted: Wanted, url: str, models: Sequence[Model]) -> FoundService:
    for model in models:
        if NAME.fullmatch(model.id) is None:
            shown = plain(ascii(model.id))[:SHOWN]
            raise ConfigError(f"{url} has a model with an unusable name: {shown}; nothing is started")
    names = {wanted.model, None if wanted.model is None else name_of(wanted.model)}
    found = next((model for model in models if wanted.model is None or model.id in names), None)
    if found is None:
        known = ", ".join(model.id for model in models) or "none"
        raise ConfigError(f"{wanted.model}: the service at {url} has no such model; it has {known}")
    return FoundService(url=url.rstrip("/"), api_key=wanted.api_key, model=found, models=tuple(models))


def _configuration(wanted: Wanted, path: Path | None, config: Config | None, folder: Path) -> Path:
    """Return the configuration to start with: the user's own, or one made for a model."""
    if config is not None and path is not None and (wanted.model is None or wanted.model in config.models):
        return path
    if wanted.model is not None and not is_reference(wanted.model):
        known = "" if config is None else f"; {path} has {', '.join(config.models)}"
        raise ConfigError(f"{wanted.model}: no such model; give a GGUF file, hf:ORG/REPO or {SMALL}{known}")
    return write_passing(wanted.model or SMALL, folder, wanted.context)


@contextmanager
def _started(wanted: Wanted, path: Path, folder: Path) -> Iterator[str]:
    """Run a service for a block, and return its address once its models can be asked."""
    config = load_config(path)
    state_dir = (path.parent / config.server.state_dir).resolve()
    with FetchBars() as bars:
        usable_specs(config, path.parent, state_dir, bars.in_any_case())
    url, log = f"http://127.0.0.1:{config.server.port}", folder / "service.log"
    command = [sys.executable, "-P", "-m", "service.cli.main", "serve", "--config", str(path)]
    # A service for one command must not join the queue of a cluster.
    kept = {name: value for name, value in os.environ.items() if name != STORE_URL or name in named_variables(path)}
    options = ["--host", "127.0.0.1", "--port", str(config.server.port), "--state-dir", str(state_dir)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            env={**kept, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # only this command gets Ctrl-C
        )
    try:
        with Client(url, api_key=wanted.api_key, patience_s=0.0, timeout_s=FIND_S) as client:
            _wait_started(client, process, log, ", ".join(config.models))
        yield url
    finally:
        _end(process)


def _wait_started(client: Client, process: "subprocess.Popen[bytes]", log: Path, models: str) -> None:
    """Return when all models can be asked. An engine's own start limit bounds the wait: it is then failed."""
    console = Console(stderr=True)
    with console.status(f"starting {plain(models)}") if can_draw(console) else nullcontext():
        while True:
            if (code := process.poll()) is not None:
                for line in log.read_text(errors="replace").splitlines()[-TAIL:]:
                    typer.echo(plain(line), err=True)
                raise typer.Exit(code or 1)
            try:
                client.get_readiness()
            except RoundhouseError:
                _check_engines(client)
            else:
                return
            time.sleep(LOOK_S)


def _check_engines(client: Client) -> None:
    """Check that no engine has failed.

    Raises:
        StartFailed: one has.
    """
    with suppress(RoundhouseError):  # it does not listen yet
        for worker in client.list_workers().workers:
            if worker.state in FAILED:
                log = client.get_log(worker.id, tail=TAIL)
                raise StartFailed(worker.id, worker.because, tuple(line.text for line in log.lines))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a service and its engines; Ctrl-C is ignored meanwhile, so that the cleanup is complete."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(2):  # the first drains, the second stops at once
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
                return
        process.kill()  # its guardians end the engines
        process.wait()
    finally:
        signal.signal(signal.SIGINT, previous)

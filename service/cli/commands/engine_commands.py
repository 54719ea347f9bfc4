"""The commands that run engines in this process."""

import ctypes
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from importlib import resources
from itertools import compress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import anyio
import typer
from rich.console import Console

from service.cli.commands.first_steps import is_free, on_free_ports
from service.cli.commands.known_configurations import note_known
from service.cli.conventions import PARENT, Exit
from service.cli.displays.console import given_up_line, plain
from service.cli.displays.fetch_display import FetchBars
from service.config.environment import unknown_variables
from service.config.lane_plan import with_mig
from service.config.load import STORE_URL, build_config, load_config, naming_lines
from service.config.schema import Config
from service.config.source import ConfigSource, LoadedConfig, usable_specs
from service.config.workers import TINY, models_without_file, tiny_model_path
from service.conversations.job.states import JobState
from service.errors import ConfigError
from service.export import Export, failures_in, folder_for
from service.formats.documents import Place, parse_document, read_text
from service.formats.result_form import ResultForm
from service.node.jobs import JobView
from service.node.node import Node
from service.run import (
    STORE_FOLDER,
    JobFile,
    ended_before,
    read_job_file,
    result_file,
    run_jobs,
    with_models_of,
)
from service.serve import listen
from service.serve import serve as serve_until_stopped
from service.telemetry.logs import set_format
from service.upgrade.check import answer_check
from service.upgrade.handover import take_handover
from workers import distribution
from workers.errors import ModelUnavailable
from workers.models.small_model import ensure_small_model
from workers.spec import WorkerSpec

T = TypeVar("T")
logger = logging.getLogger(__name__)
DEMO: Final = resources.files("service.cli")
UVX_FOLDER: Final = "archive-v0"  # folder in uv's cache with the environments of uvx
DEMO_HTTP_PORT: Final = 9180
DEMO_PORT: Final = 9190
LOOKED_AT: Final = 100  # ports that are tried for the demo's engines
PR_SET_PDEATHSIG: Final = 1
MOST_FAILURES: Final = 5


def _end_with_parent(parent: str) -> None:
    """Get SIGTERM when the command that owns this service ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:  # it has ended before
        raise typer.Exit(Exit.INTERRUPTED)


def serve(  # noqa: PLR0913 - one for each option
    config: Path,
    *,
    host: str | None,
    port: int | None,
    state_dir: Path | None,
    address: str | None,
    port_offset: int | None,
    enable_mig: bool,
    is_check: bool = False,
) -> None:
    """Run the service until it is stopped; ``is_check`` only says whether it could replace a running one."""
    if (parent := os.environ.pop(PARENT, None)) is not None:
        _end_with_parent(parent)
    inherited = take_handover()  # before a child could keep copies of its descriptors
    os.umask(0o077)  # files hold prompts and answers
    overrides = {"host": host, "port": port, "state_dir": state_dir, "address": address, "port_offset": port_offset}
    overrides["store_url"] = os.environ.get(STORE_URL)
    source = ConfigSource(path=config, overrides=overrides, enable_mig=enable_mig)
    with FetchBars() as bars:
        loaded = source.load(bars.on_terminal())
    server = loaded.config.server
    if is_check:
        typer.echo(answer_check(loaded.config, loaded.specs))
        return
    if parent is None and inherited is None:
        note_known(config, loaded.config)
    set_format(server.log)
    for warning in unknown_variables(os.environ, loaded.variables):
        logger.warning("%s", warning)
    _tell_stand_ins(loaded.config, server.state_dir)
    listener = inherited.listener() if inherited else listen(server.host, server.port)
    run_async(serve_until_stopped, loaded, source.load, listener, inherited)


def run(  # noqa: PLR0913 - one for each option
    jobs: Sequence[Path],
    config: Path,
    output: Path,
    model: str | None = None,
    form: ResultForm | None = None,
    *,
    show_prompts: bool,
    words: bool,
    enable_mig: bool,
) -> None:
    """Run job files to their ends, with all agents on ``model`` if given."""
    settings = with_mig(load_config(config), enable_mig=enable_mig)
    files = [read_job_file(str(path), read_text(path), settings, model) for path in jobs]
    used = with_models_of(settings, [file.job for file in files])
    _check_writable(output)
    states = [ended_before(file, output) for file in files]
    ended = [(file.job.name, state) for file, state in zip(files, states, strict=True) if state is not None]
    is_over = len(ended) == len(files)
    looks = " and ".join(compress(("--show-prompts", "--words"), (show_prompts, words)))
    if is_over and looks:
        typer.echo(f"{looks}: every job has ended, so nothing is asked; give another folder with --output", err=True)
    if is_over and all(_has_result(file, output, form) for file in files):
        _tell_ends(ended, output, form, " already")
        return
    with naming_lines(config):
        if is_over and not (output / STORE_FOLDER).is_dir():
            raise ConfigError(
                f"{output / STORE_FOLDER} is gone, so no result can be written; the transcripts are there"
            )
        # An ended job needs no engine: its result is written from the store.
        specs = [] if is_over else on_free_ports(_specs(used, config.parent, used.server.state_dir))
    note_known(config, settings)
    views = _run(used, specs, files, output, form, show_prompts=show_prompts, words=words)
    _tell_ends([(view.stored.name, view.stored.state) for view in views], output, form)


def _has_result(file: JobFile, output: Path, form: ResultForm | None) -> bool:
    return form is None or (folder_for(output, file.job.name) / result_file(form)).is_file()


def _tell_ends(ends: Sequence[tuple[str, str]], output: Path, form: ResultForm | None, when: str = "") -> None:
    """Print the ends of jobs, by their names and states; exit where one did not complete."""
    for name, state in ends:
        _tell_end(name, state, output, when, form)
    if any(state != JobState.COMPLETED for _, state in ends):
        raise typer.Exit(Exit.FAILED)


def _tell_end(name: str, state: str, output: Path, when: str = "", form: ResultForm | None = None) -> None:
    """Print a job's end, the place of its transcripts, and why the first failed conversations failed."""
    folder = folder_for(output, name)
    failures = list(failures_in(folder))
    for failure in failures[:MOST_FAILURES]:
        typer.echo(plain(f"{failure.conversation}: {failure.reason}: {failure.detail}"), err=True)
    if len(failures) > MOST_FAILURES:
        typer.echo(f"{len(failures) - MOST_FAILURES} more; {folder / 'index.jsonl'} lists them", err=True)
    for each in cast("Sequence[Any]", Export(folder).manifest.get("given_up", ())):
        typer.echo(given_up_line(each), err=True)
    table = "" if form is None else f", result in {folder / result_file(form)}"
    typer.echo(f"{plain(name)}: {state}{when}; transcripts in {folder / 'transcripts'}{table}")


def demo(port: int | None, http_port: int | None, *, stays: bool) -> None:
    """Run the built-in debate, with an engine that is killed in the middle, and a tool call."""
    from service.cli.commands.demo import play  # noqa: PLC0415 - it needs the client, which a starting service does not

    document, lines = _demo_document("demo_config.yaml")
    small = document["models"]["small"]
    small["port"] = _demo_port(small["replicas"]) if port is None else port
    model = _demo_model(small)
    jobs = [_demo_document(file)[0] for file in ("demo.yaml", "demo_tool_call.yaml")]
    with tempfile.TemporaryDirectory(prefix="roundhouse-demo-") as name:
        listener = _demo_listener(http_port)
        overrides = {"state_dir": Path(name), "port": listener.getsockname()[1]}
        settings = build_config(document, overrides, "demo", lines)
        loaded = LoadedConfig(config=settings, specs=_specs(settings, Path(name), Path(name)))
        debates, agents = (len(jobs[0][part]) for part in ("conversations", "agents"))
        typer.echo(f"{debates} debates of {agents} agents on two supervised llama.cpp engines with {model}")
        logging.getLogger().setLevel(logging.CRITICAL)  # the demo itself reports on the engine
        is_well = run_async(play, loaded, listener, jobs, stays)
    if not stays:
        typer.echo("The dashboard has ended with the demo; roundhouse demo --open keeps it.")
    command = _own_command()
    typer.echo(f"One of your own: {command} init && {command} run job.yaml; {command} examples lists more")
    if not is_well:
        raise typer.Exit(Exit.FAILED)


def _own_command() -> str:
    """Return the command to type: uvx's environment is on the path only while it runs."""
    return f"uvx --from {distribution.NAME} roundhouse" if UVX_FOLDER in Path(sys.prefix).parts else "roundhouse"


def _demo_document(file: str) -> tuple[dict[str, Any], dict[Place, int]]:
    document, lines = parse_document((DEMO / file).read_text(), file)
    if not isinstance(document, dict):
        raise ConfigError(f"{file} is damaged")
    return document, lines


def _demo_listener(port: int | None) -> socket.socket:
    """Return a socket for the demo's service: at the given port, else at the default or a free one."""
    try:
        return listen("127.0.0.1", DEMO_HTTP_PORT if port is None else port)
    except ConfigError:
        if port is not None:
            raise
        listener = listen("127.0.0.1", 0)
        typer.echo(f"port {DEMO_HTTP_PORT} is taken, so the dashboard is at port {listener.getsockname()[1]}", err=True)
        return listener


def _demo_port(engines: int) -> int:
    """Return the first of a row of free ports, one per engine, from the default on."""
    for port in range(DEMO_PORT, DEMO_PORT + LOOKED_AT, engines):
        if all(map(is_free, range(port, port + engines))):
            if port != DEMO_PORT:
                typer.echo(f"port {DEMO_PORT} is taken, so the first engine is at port {port}", err=True)
            return port
    raise ConfigError(f"all ports from {DEMO_PORT} to {DEMO_PORT + LOOKED_AT} are taken; give another with --port")


def _demo_model(model: dict[str, object]) -> str:
    """Set the demo's model and return its label; a made model stands in if the small one cannot be fetched."""
    try:
        with FetchBars() as bars:
            path = ensure_small_model(bars.in_any_case())
    except ModelUnavailable as error:
        model["model"] = TINY
        typer.echo(f"the small model cannot be fetched, so a generated one stands in: {error}", err=True)
        return "a generated model, whose text is noise:"
    return f"{path.stem}:"


def run_async(main: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
    """Run ``main`` on uvloop, which all measurements use."""
    return anyio.run(main, *arguments, backend_options={"use_uvloop": True})


def _run(
    config: Config,
    specs: Sequence[WorkerSpec],
    files: Sequence[JobFile],
    output: Path,
    form: ResultForm | None = None,
    *,
    show_prompts: bool = False,
    words: bool = False,
) -> list[JobView]:
    from service.cli.displays.caller_prompt import CallerPrompt  # noqa: PLC0415 - only run needs it
    from service.cli.displays.run_display import PromptDisplay, display, progress_line  # noqa: PLC0415

    console, seen = Console(emoji=False), list[JobView]()
    prompts = PromptDisplay(console) if show_prompts else None
    try:
        with display(console, words=words) as shown:
            callers = CallerPrompt(console, shown)

            async def show(views: Sequence[JobView], node: Node) -> None:
                if prompts is not None:
                    await prompts.show(node, [view.stored.id for view in views])
                seen[:] = views
                shown.show(views, node)
                await callers.look(node, views)

            return run_async(_interruptible, run_jobs, config, specs, files, output, show, form)
    except KeyboardInterrupt:
        for view in seen:
            typer.echo(f"interrupted: {progress_line(view)}", err=True)
        typer.echo("stopped; run the same command again to continue", err=True)
        raise


async def _interruptible(main: Callable[..., Coroutine[Any, Any, T]], *arguments: object) -> T:
    """Run ``main``; SIGINT and SIGTERM cancel it, so that it cleans up."""
    results: list[T] = []
    async with anyio.create_task_group() as tasks:

        async def watch_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                await anext(signals)
                tasks.cancel_scope.cancel()

        tasks.start_soon(watch_signals)
        results.append(await main(*arguments))
        tasks.cancel_scope.cancel()
    if not results:
        raise KeyboardInterrupt
    return results[0]


def _specs(config: Config, base: Path, state_dir: Path) -> list[WorkerSpec]:
    with FetchBars() as bars:
        specs = usable_specs(config, base, state_dir, bars.in_any_case())
    _tell_stand_ins(config, state_dir)
    return specs


def _tell_stand_ins(config: Config, state_dir: Path) -> None:
    standing_in = models_without_file(config)
    if standing_in:
        names, path = ", ".join(standing_in), tiny_model_path(state_dir)
        typer.echo(f"{names}: no model is named, so {path} stands in; its text is noise", err=True)


def _check_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror}; give another folder") from error

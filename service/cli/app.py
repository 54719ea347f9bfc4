"""The command ``roundhouse``: its commands, and the printed form of their errors."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from service import __version__
from service.cli.conventions import Exit, FormOption, Panel
from service.cli.displays.console import plain
from service.errors import ConfigError, InvalidJob, ServiceError, StateUnusable
from service.telemetry.logs import set_format
from workers.errors import InvalidSpec, ModelUnavailable, StartFailed, WorkerError

UPGRADE_CHECK: Final = "--upgrade-check"  # given by a running service to its successor
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="ROUNDHOUSE_CONFIG", help="The configuration.", show_default="./roundhouse.yaml"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", help="Instead of a configuration: roundhouse:small, a GGUF file, or hf:ORG/REPO.", metavar="M"
    ),
]
HostOption = Annotated[str | None, typer.Option(envvar="ROUNDHOUSE_HOST", help="Overrides server.host.")]
PortOption = Annotated[int | None, typer.Option(envvar="ROUNDHOUSE_PORT", help="Overrides server.port.")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        envvar="ROUNDHOUSE_ADDRESS", help="Host at which other nodes reach this one; overrides server.address."
    ),
]
OffsetOption = Annotated[
    int | None,
    typer.Option(
        envvar="ROUNDHOUSE_PORT_OFFSET", min=0, help="Added to all ports, for another node on the same machine."
    ),
]
StateOption = Annotated[
    Path | None, typer.Option(envvar="ROUNDHOUSE_STATE_DIR", help="Folder of the database; overrides server.state_dir.")
]

MigOption = Annotated[bool, typer.Option("--enable-mig", help="Use slices of GPUs in MIG mode.")]


class Commands(TyperGroup):
    """Commands that run engines are loaded at once, the others when one of them or the list is needed.

    The others need the client, whose import would delay a service's start for nothing.
    """

    # The values are click's, which some versions of Typer bundle under another name.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401
        """Return a command by its name."""
        if cmd_name not in self.commands:
            self._complete()
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _name_no_type_of_flags(command.get_params(ctx))
        return command

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401
        """Return the names of all."""
        self._complete()
        return super().list_commands(ctx)

    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401
        """Return the options that all commands share."""
        params = super().get_params(ctx)
        _name_no_type_of_flags(params)
        return params

    def _complete(self) -> None:
        from service.cli.commands.other_commands import commands  # noqa: PLC0415 - see above

        self.commands.update(commands())


def _name_no_type_of_flags(params: Any) -> None:  # noqa: ANN401 - click's, see above
    """Show flags without ``<bool>``, which looks as if a value had to follow."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""


app = typer.Typer(
    name="roundhouse",
    cls=Commands,
    help="Keeps LLM engines running as supervised subprocesses and puts multi-agent conversation jobs on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    debug: bool = typer.Option(False, "--debug", envvar="ROUNDHOUSE_DEBUG", help="Log more, and show tracebacks."),
    _version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_print_version, help="Print the version."
    ),
) -> None:
    """Set what all commands share."""
    # A service logs its work; the other commands print for a person, and log only problems.
    calm = logging.INFO if context.invoked_subcommand == "serve" else logging.WARNING
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if debug else calm,
    )
    set_format("text")
    for chatty in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.INFO if debug else logging.WARNING)


# Each command imports its code when it is called, since that takes a second.


@app.command("run", rich_help_panel=Panel.RUN)
def run_command(  # noqa: PLR0913, PLR0917 - one for each option
    jobs: Annotated[list[Path], typer.Argument(help="Job files, YAML or JSON.", metavar="JOB...")],
    config: ConfigOption = None,
    model: ModelOption = None,
    output: Annotated[
        Path, typer.Option(envvar="ROUNDHOUSE_OUTPUT", help="Where transcripts go; a second run continues there.")
    ] = Path("output"),
    show_prompts: Annotated[
        bool, typer.Option("--show-prompts", help="Print the request of each attempt when it ends.")
    ] = False,
    words: Annotated[bool, typer.Option("--words", help="Show the latest words of turns as they come.")] = False,
    form: FormOption = None,
    enable_mig: MigOption = False,
) -> None:
    """Run job files in one process, without HTTP, and show progress."""
    from service.cli.commands import engine_commands, first_steps  # noqa: PLC0415 - see above
    from service.config.proposal import name_of  # noqa: PLC0415 - see above

    name = None if model is None else name_of(model)
    path = first_steps.config_path(config, model)
    looks = {"show_prompts": show_prompts, "words": words}
    engine_commands.run(jobs, path, output, name, form, **looks, enable_mig=enable_mig)


@app.command("demo", rich_help_panel=Panel.RUN)
def demo_command(
    port: Annotated[
        int | None, typer.Option(envvar="ROUNDHOUSE_DEMO_PORT", help="The first engine's port.", show_default="9190")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(envvar="ROUNDHOUSE_DEMO_HTTP_PORT", help="The dashboard's port.", show_default="9180")
    ] = None,
    *,
    stays: Annotated[bool, typer.Option("--open", help="Keep the service running until Ctrl-C.")] = False,
) -> None:
    """Run a built-in debate with a dashboard; midway an engine is killed, and the debate continues."""
    from service.cli.commands import engine_commands  # noqa: PLC0415 - see above

    engine_commands.demo(port, http_port, stays=stays)


@app.command("serve", rich_help_panel=Panel.OPERATE)
def serve_command(  # noqa: PLR0913 - one for each option
    config: ConfigOption = None,
    model: ModelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    state_dir: StateOption = None,
    address: AddressOption = None,
    port_offset: OffsetOption = None,
    *,
    enable_mig: MigOption = False,
    upgrade_check: Annotated[
        bool, typer.Option(UPGRADE_CHECK, hidden=True, help="Only report whether it could take over; facts on stdin.")
    ] = False,
) -> None:
    """Run the service. SIGTERM or Ctrl-C drains, then stops; a second one stops at once. SIGUSR2 upgrades it."""
    from service.cli.commands import engine_commands, first_steps  # noqa: PLC0415 - see above

    engine_commands.serve(
        first_steps.config_path(config, model),
        host=host,
        port=port,
        state_dir=state_dir,
        address=address,
        port_offset=port_offset,
        enable_mig=enable_mig,
        is_check=upgrade_check,
    )


@app.command("check", rich_help_panel=Panel.OPERATE)
def check_command(  # noqa: PLR0913 - one for each option
    config: ConfigOption = None,
    model: ModelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    state_dir: StateOption = None,
    address: AddressOption = None,
    port_offset: OffsetOption = None,
    *,
    enable_mig: MigOption = False,
) -> None:
    """Validate a configuration and print the effective one, with secrets masked."""
    from service.cli.commands import first_steps  # noqa: PLC0415 - see above
    from service.cli.commands.configuration_check import check  # noqa: PLC0415 - see above

    overrides = {"host": host, "port": port, "state_dir": state_dir, "address": address, "port_offset": port_offset}
    overrides["store_url"] = os.environ.get("ROUNDHOUSE_STORE_URL")
    check(first_steps.config_path(config, model), overrides, enable_mig=enable_mig)


@app.command("init", rich_help_panel=Panel.RUN)
def init_command(
    model: Annotated[
        str, typer.Option("--model", "-m", help="roundhouse:small, a GGUF file, or hf:ORG/REPO.", metavar="M")
    ] = ("roundhouse:small"),
    folder: Annotated[Path, typer.Option("--dir", help="Where the files go.")] = Path(),
) -> None:
    """Write a configuration for this machine and a first job; both run unchanged."""
    from service.cli.commands import first_steps  # noqa: PLC0415 - see above

    first_steps.write_files(model, folder)


errors = Console(stderr=True, emoji=False)


@app.command(rich_help_panel=Panel.OPERATE)
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run_app() -> None:
    """Run the command line; an error is one or two plain lines, and the exit code gives its kind."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)
    except (Exception, BaseExceptionGroup) as error:
        cause = _cause(error)
        if isinstance(cause, SystemExit):  # rich ends so when the output is not read any more
            sys.exit(cause.code)
        code = _exit_code(cause)
        if code is None or logging.getLogger().level == logging.DEBUG:
            raise
        errors.print(f"roundhouse: {plain(cause)}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(code)


def _cause(error: BaseException) -> BaseException:
    """Return the one error of a group that matters."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup):
        cause = next((each for each in cause.exceptions if _exit_code(each) is not None), cause.exceptions[0])
    return cause


def _exit_code(error: BaseException) -> int | None:
    if isinstance(error, BaseExceptionGroup):
        return next((code for each in error.exceptions if (code := _exit_code(each)) is not None), None)
    return next((code for kinds, code in _exits() if isinstance(error, kinds)), None)


def _exits() -> Iterator[tuple[tuple[type[BaseException], ...], Exit]]:
    """Yield the exit codes of errors; the first that fits counts."""
    yield (ConfigError, StateUnusable, InvalidSpec, InvalidJob), Exit.USAGE
    yield (StartFailed, ModelUnavailable), Exit.ENGINE
    from roundhouse_client import RoundhouseError  # noqa: PLC0415 - only the other commands need it
    from service.cli.connection import AnswerRefused, ServiceAway  # noqa: PLC0415 - likewise

    yield (RoundhouseError, ServiceAway, AnswerRefused), Exit.SERVICE
    from service.cluster.failure import ClusterFailed  # noqa: PLC0415 - likewise

    yield (ServiceError, WorkerError, ClusterFailed, OSError), Exit.FAILED  # a full disk, say

"""The commands that run engines here: serve, run, demo, check.

Only their forms: what they do is imported when one of them is called (``engine_commands``), since that takes a second.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from service.cli.panels import Panel

DEMO_PORT: Final = 9190
UPGRADE_CHECK: Final = "--upgrade-check"  # given by a running service to the program that is to follow it
ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", envvar="ROUNDHOUSE_CONFIG", help="The configuration, a YAML file.")
]
StateOption = Annotated[
    Path | None, typer.Option(envvar="ROUNDHOUSE_STATE_DIR", help="Database, made models; over server.state_dir.")
]

MigOption = Annotated[bool, typer.Option("--enable-mig", help="Use MIG slices; over gpus.enable_mig.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("run", rich_help_panel=Panel.RUN)(run_command)
    app.command("demo", rich_help_panel=Panel.RUN)(demo_command)
    app.command("serve", rich_help_panel=Panel.OPERATE)(serve_command)
    app.command("check", rich_help_panel=Panel.OPERATE)(check_command)


def serve_command(
    config: ConfigOption,
    host: Annotated[str | None, typer.Option(envvar="ROUNDHOUSE_HOST", help="Over server.host.")] = None,
    port: Annotated[int | None, typer.Option(envvar="ROUNDHOUSE_PORT", help="Over server.port.")] = None,
    state_dir: StateOption = None,
    *,
    enable_mig: MigOption = False,
    upgrade_check: Annotated[
        bool, typer.Option(UPGRADE_CHECK, hidden=True, help="Only say whether it could take over; facts on stdin.")
    ] = False,
) -> None:
    """Run the service. SIGTERM or Ctrl-C once drains and stops; a second time stops at once. SIGUSR2 upgrades it."""
    from service.cli.commands import engine_commands  # noqa: PLC0415 - see above

    engine_commands.serve(
        config, host=host, port=port, state_dir=state_dir, enable_mig=enable_mig, is_check=upgrade_check
    )


def run_command(
    jobs: Annotated[list[Path], typer.Argument(help="Job files, YAML or JSON.", metavar="JOB...")],
    config: ConfigOption,
    output: Annotated[
        Path, typer.Option(envvar="ROUNDHOUSE_OUTPUT", help="Where transcripts go; run again, it goes on there.")
    ] = Path("output"),
    show_prompts: Annotated[
        bool, typer.Option("--show-prompts", help="Print what is really asked, as each attempt ends.")
    ] = False,
    words: Annotated[bool, typer.Option("--words", help="Show the last words of turns as they come.")] = False,
    enable_mig: MigOption = False,
) -> None:
    """Run job files in one process, without HTTP, with progress."""
    from service.cli.commands import engine_commands  # noqa: PLC0415 - see above

    engine_commands.run(jobs, config, output, show_prompts=show_prompts, words=words, enable_mig=enable_mig)


def demo_command(
    port: Annotated[int, typer.Option(envvar="ROUNDHOUSE_DEMO_PORT", help="The first engine's port.")] = DEMO_PORT,
    http_port: Annotated[
        int | None, typer.Option(envvar="ROUNDHOUSE_DEMO_HTTP_PORT", help="The dashboard's port.", show_default="9180")
    ] = None,
    *,
    stays: Annotated[bool, typer.Option("--open", help="Leave the service running until Ctrl-C.")] = False,
) -> None:
    """Run a built-in debate with a dashboard; an engine is killed in the middle, and the debate goes on."""
    from service.cli.commands import engine_commands  # noqa: PLC0415 - see above

    engine_commands.demo(port, http_port, stays=stays)


def check_command(config: ConfigOption, state_dir: StateOption = None) -> None:
    """Validate a configuration and print the effective one, secrets masked."""
    from service.cli.commands.configuration_check import check  # noqa: PLC0415 - see above

    check(config, state_dir)

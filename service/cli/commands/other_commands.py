"""The table of commands that run no engine: they ask a running service, or describe this machine."""

import secrets
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from service.cli.commands import conversing, remote
from service.cli.commands.chat import chat
from service.cli.commands.cluster_commands import cluster
from service.cli.commands.examples import examples
from service.cli.commands.gpus import gpus
from service.cli.commands.launch import launch
from service.cli.commands.remote import reload, tools
from service.cli.commands.show_timeline import timeline
from service.cli.commands.upgrade import upgrade
from service.cli.commands.watch_engine import probe, watch_engine
from service.cli.conventions import Panel
from service.cli.displays.top import top
from service.conversations.callers import USUAL_SCOPES, KeyScope

KEY_BYTES: Final = 32  # too many to guess, so a plain hash is enough


def key(
    name: Annotated[str, typer.Argument(help="The key's name.", metavar="NAME")],
    scope: Annotated[
        list[KeyScope] | None,
        typer.Option(help="A scope; may be repeated. Default: read and submit.", metavar="SCOPE"),
    ] = None,
) -> None:
    """Make a key: print it, and its entry for server.keys or a keys_file. Nothing is stored."""
    from service.config.keys import digest_of, named_key  # noqa: PLC0415 - its imports take a second

    made = f"rh-{secrets.token_urlsafe(KEY_BYTES)}"
    entry = named_key(name, digest_of(made), dict.fromkeys(scope or USUAL_SCOPES))
    typer.echo(made)
    typer.echo(f"- {{name: {entry.name}, sha256: {entry.sha256}, scopes: [{', '.join(entry.scopes)}]}}")


_TABLE: Final[Mapping[Panel, tuple[Any, ...]]] = {
    Panel.RUN: (chat, launch, examples),
    Panel.LOOK: (top, timeline, tools, gpus),
    Panel.OPERATE: (reload, upgrade, key, probe, watch_engine),
}


@cache
def commands() -> Mapping[str, Any]:
    """Return Typer's commands by name."""
    app = typer.Typer(add_completion=False)
    remote.add_commands(app)
    conversing.add_commands(app)
    for panel, those in _TABLE.items():
        for command in those:
            app.command(rich_help_panel=panel)(command)
    app.add_typer(cluster, name="cluster", rich_help_panel=Panel.OPERATE)
    group = get_command(app)
    assert isinstance(group, TyperGroup)  # noqa: S101 - several commands make a group
    return group.commands

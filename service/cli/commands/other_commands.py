"""The commands that run no engine: they ask a running service, or tell of this machine."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from service.cli.commands import remote
from service.cli.commands.gpus import gpus
from service.cli.commands.key import key
from service.cli.commands.remote import reload, tools
from service.cli.commands.show_timeline import timeline
from service.cli.commands.upgrade import upgrade
from service.cli.displays.top import top
from service.cli.panels import Panel


@cache
def commands() -> Mapping[str, Any]:
    """Return them by their names, as Typer has made them."""
    app = typer.Typer(add_completion=False)
    remote.add_commands(app)
    for panel, those in {Panel.LOOK: (top, timeline, tools, gpus), Panel.OPERATE: (reload, upgrade, key)}.items():
        for command in those:
            app.command(rich_help_panel=panel)(command)
    group = get_command(app)
    assert isinstance(group, TyperGroup)  # noqa: S101 - of several commands it is one
    return group.commands

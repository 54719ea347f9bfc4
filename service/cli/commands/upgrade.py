"""The command that makes a running service replace its own program, and reports the result."""

import json
import time
from typing import Annotated, Final

import typer

from roundhouse_client import AnswerLost, Client, Unreachable
from roundhouse_client.values.node import AgreedUpgrade, ServiceProgram
from service.cli.connection import JsonOption, KeyOption, UrlOption, connect
from service.cli.conventions import Exit
from service.cli.displays.console import plain

POLL_S: Final = 0.1


def upgrade(
    *,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the new program must serve.")] = 120.0,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the running service's program with the one now installed; its engines stay loaded."""
    with connect(url, api_key) as service:
        agreed = service.upgrade()
        if not as_json:
            for line in _plan(agreed):
                typer.echo(line)
        now = _wait(service, agreed, timeout)
    if now is None:
        typer.echo(f"the new program does not serve after {timeout:g} s; see the service's log", err=True)
        raise typer.Exit(Exit.SERVICE)
    if as_json:
        typer.echo(json.dumps(now.document))
    end = now.last
    if now.upgrades == agreed.upgrades:
        detail = end.detail if end is not None and end.detail else "it was given up"
        typer.echo(f"not upgraded, {now.version} keeps running: {plain(detail)}", err=True)
        raise typer.Exit(Exit.SERVICE)
    if not as_json:
        seconds = f"; no program served for {end.seconds:.1f} s" if end is not None and end.seconds is not None else ""
        typer.echo(f"upgraded: {agreed.version} -> {now.version}, process {now.pid}{seconds}")
        for server, why in (end.ended_servers if end is not None else {}).items():
            typer.echo(f"MCP server {server} was ended: {why}")


def _plan(agreed: AgreedUpgrade) -> list[str]:
    lines = [f"{agreed.version} -> {agreed.to_version}; engines that stay: {_listed(agreed.kept)}"]
    lines += [f"engine of {worker} is ended: {why}" for worker, why in agreed.ended.items()]
    return [*lines, f"engines that are started: {_listed(agreed.started)}"] if agreed.started else lines


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _wait(service: Client, agreed: AgreedUpgrade, limit_s: float) -> ServiceProgram | None:
    """Return the serving program once the upgrade is over; None if that takes too long."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            now = service.get_upgrade()
        except (Unreachable, AnswerLost):  # between two programs, or on a connection of the first
            now = None
        if now is not None and (now.upgrades > agreed.upgrades or now.phase == "idle"):
            return now
        time.sleep(POLL_S)
    return None

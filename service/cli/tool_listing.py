"""The command that lists the tools of models."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from roundhouse_client.drivers.exchange import DEFAULT_URL
from roundhouse_client.values.models import Tools
from service.cli.plain import plain
from service.cli.remote import JsonOption, KeyOption, UrlOption, connect
from workers.requests.prompts.signature import signature_text


def tools(
    model: Annotated[str | None, typer.Argument(help="Without one, those of all models.")] = None,
    *,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the tools that agents of a model may ask for, and the MCP servers that are down."""
    with connect(url, api_key) as service:
        names = [model] if model else list(dict.fromkeys(each.model for each in service.list_workers().workers))
        listings = [service.get_tools(name) for name in names]
    if as_json:
        documents = [listing.document for listing in listings]
        typer.echo(json.dumps(documents[0] if model else documents))
        return
    console = Console(emoji=False)
    for listing in listings:
        _print(console, listing)


def _print(console: Console, listing: Tools) -> None:
    table = Table("tool", "from", "what it does", title=plain(listing.model), title_justify="left", box=None)
    for tool in listing.tools:
        first = plain(tool.description).strip().partition("\n")[0]
        source = f"mcp: {tool.server}" if tool.server else "python"
        table.add_row(plain(signature_text(tool.name, dict(tool.parameters))), plain(source), first)
    console.print(table, markup=False)
    for server in listing.servers:
        if server.trouble:
            known = f"; its last {server.tools} tools stand" if server.tools is not None else ""
            console.print(f"mcp {plain(server.name)} is down: {plain(server.trouble)}{known}", markup=False)

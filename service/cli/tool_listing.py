"""The command that lists the tools of models."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from service.cli.plain import plain
from service.cli.remote import DEFAULT_URL, JsonOption, KeyOption, UrlOption, ask, connect
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
        names = [model] if model else list(dict.fromkeys(each["model"] for each in _workers(service)))
        listings = [ask(service, "GET", f"/v1/models/{name}/tools") for name in names]
    if as_json:
        typer.echo(json.dumps(listings[0] if model else listings))
        return
    console = Console(emoji=False)
    for listing in listings:
        _print(console, listing)


def _workers(service: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - an httpx client, imported late
    workers: list[dict[str, Any]] = ask(service, "GET", "/v1/workers")["workers"]
    return workers


def _print(console: Console, listing: dict[str, Any]) -> None:
    table = Table("tool", "from", "what it does", title=plain(listing["model"]), title_justify="left", box=None)
    for tool in listing["tools"]:
        first = plain(tool["description"]).strip().partition("\n")[0]
        source = f"mcp: {tool['server']}" if tool["server"] else "python"
        table.add_row(plain(signature_text(tool["name"], tool["parameters"])), plain(source), first)
    console.print(table, markup=False)
    for server in listing["servers"]:
        if server["trouble"]:
            known = f"; its last {server['tools']} tools stand" if server["tools"] is not None else ""
            console.print(f"mcp {plain(server['name'])} is down: {plain(server['trouble'])}{known}", markup=False)

"""``launch``: an agent's command line on the local service, with its own settings and none of a provider's."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer

from service.cli.commands.agent_table import (
    AgentRow,
    AgentStart,
    AgentTable,
    LaunchFacts,
    prepare,
    read_table,
    shown,
    too_small,
)
from service.cli.commands.own_service import (
    FoundService,
    FoundUrlOption,
    StartConfigOption,
    Wanted,
    find_service,
    open_service,
)
from service.cli.connection import KeyOption
from service.cli.conventions import state_home
from service.cli.displays.console import part, plain
from service.config.proposal import name_of
from service.errors import ConfigError
from service.formats.documents import read_text
from workers.files.atomic import replace_file

TABLE: Final = "agents.yaml"
SESSION_BYTES: Final = 4
GRACE_S: Final = 10.0
ASKED_S: Final = 5.0
MOST_BYTES: Final = 64 * 1024
MOST_CHARS: Final = 500  # printed characters of a refusal
RESPONSES: Final = "/v1/responses"
PRINTED: Final = "MODEL"  # placeholder for the model where no service runs


def launch(
    agent: Annotated[
        str | None,
        typer.Argument(help="claude, codex, opencode, aider, pi, or one of yours; without it, list them."),
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Passed to the agent.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="As for chat; default: the first model.", metavar="M")
    ] = None,
    url: FoundUrlOption = None,
    api_key: KeyOption = None,
    config: StartConfigOption = None,
    *,
    only_print: Annotated[bool, typer.Option("--print", help="Only show what would run, with keys masked.")] = False,
) -> None:
    """Start an agent's command line on the service here, or on one that starts and ends with it."""
    table = _table()
    if agent is None and only_print:
        raise ConfigError("--print: name the agent to show")
    if agent is None:
        _list_agents(table)
        return
    if agent not in table.agents:
        known = ", ".join(table.agents)
        raise ConfigError(f"{agent}: no such agent; known are {known}; add your own to {_own_table()}")
    row = table.agents[agent]
    wanted = Wanted(url=url, api_key=api_key, config=config, model=model, context=row.context)
    if only_print:
        _print(table, agent, find_service(wanted), wanted, tuple(arguments or ()))
        return
    if shutil.which(row.program) is None:
        raise ConfigError(f"{row.program} is not on the path{part(': {}', row.install)}")
    with open_service(wanted) as service:
        facts = _facts(agent, service)
        start = prepare(table, agent, facts, os.environ, tuple(arguments or ()))
        if (warning := too_small(agent, row, facts)) is not None:
            typer.echo(warning, err=True)
        if (missing := _missing(agent, row, facts)) is not None:
            typer.echo(missing, err=True)
        _write(start, Path(facts.folder))
        code = _run(start)
    raise typer.Exit(code)


def _table() -> AgentTable:
    table = read_table((resources.files("service.cli") / TABLE).read_text(), TABLE)
    own = _own_table()
    if not own.is_file():
        return table
    return table.with_rows(read_table(read_text(own), str(own)))


def _own_table() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "roundhouse" / TABLE


def _list_agents(table: AgentTable) -> None:
    for name, row in table.agents.items():
        place = shutil.which(row.program) or f"not installed: {row.install}"
        typer.echo(f"{name:<12} {place}")
    typer.echo(f"Add your own to {_own_table()}; roundhouse launch --print NAME shows what an agent would run.")


def _facts(agent: str, service: FoundService) -> LaunchFacts:
    return LaunchFacts(
        url=service.url,
        key=service.api_key,
        model=service.model.id,
        context=service.model.max_model_len,
        session=f"{agent}-{secrets.token_hex(SESSION_BYTES)}",
        folder=state_home() / "agents" / agent,
    )


def _missing(agent: str, row: AgentRow, facts: LaunchFacts) -> str | None:
    """Return the refusal of the path that the agent requests, if the model's engine lacks it.

    A slow engine, or one that fails otherwise, is left to the agent.
    """
    if not row.asks:
        return None
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {facts.key}"} if facts.key else {})}
    message = {"role": "user", "content": "Hi."}
    body = {"model": facts.model, "max_tokens": 1, "messages": [message]}
    if row.asks == RESPONSES:
        body = {"model": facts.model, "max_output_tokens": 1, "input": [message]}
    try:
        with httpx.stream(
            "POST", facts.url + row.asks, json=body, headers=headers, timeout=ASKED_S, trust_env=False
        ) as answer:
            if answer.status_code != HTTPStatus.NOT_FOUND:
                return None
            text = _beginning(answer)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    try:
        reason = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):  # the service itself has no such path
        reason = f"{facts.url} has no {row.asks}"
    return f"{agent} will not work: {plain(reason[:MOST_CHARS])}"


def _beginning(answer: httpx.Response) -> bytes:
    """Return the beginning of a body, which may never end."""
    text, until = b"", time.monotonic() + ASKED_S
    for piece in answer.iter_raw():
        text += piece
        if len(text) > MOST_BYTES or time.monotonic() > until:
            break
    return text


def _print(
    table: AgentTable, agent: str, service: FoundService | None, wanted: Wanted, arguments: tuple[str, ...]
) -> None:
    if service is None:
        typer.echo("# no service runs here, so one would be started; its address and model would be shown here")
        facts = LaunchFacts(
            url="http://127.0.0.1:PORT",
            key=wanted.api_key,
            model=PRINTED if wanted.model is None else name_of(wanted.model),
            context=None,
            session=f"{agent}-SESSION",
            folder=state_home() / "agents" / agent,
        )
    else:
        facts = _facts(agent, service)
    typer.echo(shown(prepare(table, agent, facts, os.environ, arguments), facts.key))
    if (warning := too_small(agent, table.agents[agent], facts)) is not None:
        typer.echo(f"# {warning}")


def _write(start: AgentStart, folder: Path) -> None:
    """Write the agent's files, readable by their owner only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    once = {name: text for name, text in start.once.items() if not (folder / name).exists()}
    for name, text in {**start.files, **once}.items():
        replace_file(folder / name, text.encode(), mode=0o600)


def _run(start: AgentStart) -> int:
    """Run the agent in this terminal, and return its exit status; a signal that ends this command ends it too."""
    environment = {name: value for name, value in os.environ.items() if name not in start.unset}
    # Ctrl-C is for the agent. A handler, not SIG_IGN: the agent would inherit an ignored signal.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        process = subprocess.Popen(start.argv, env={**environment, **start.environment})
        try:
            return process.wait()
        finally:
            _end(process)
    except ValueError as error:  # a NUL, or a name with an equals sign
        raise ConfigError(f"{start.argv[0]} cannot be started with this row: {error}") from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        process.wait()

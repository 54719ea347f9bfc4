"""The commands that take part in conversations of a running service, and go on with those that are recorded."""

import json
import sys
from collections.abc import Callable
from typing import Annotated, cast

import typer
from rich.table import Column, Table

from roundhouse_client import NothingAwaited, NothingToFork
from roundhouse_client.drivers.exchange import DEFAULT_URL
from service.cli.connection import JsonOption, KeyOption, UrlOption, connect, print_document
from service.cli.conventions import Panel
from service.cli.displays.console import plain
from service.errors import ConfigError


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for each in cast("tuple[Callable[..., None], ...]", (say, awaited, fork)):
        app.command(rich_help_panel=Panel.JOBS)(each)


def say(  # noqa: PLR0913 - one for each option
    job_id: str,
    conversation_id: str,
    text: Annotated[str, typer.Argument(help="The words; - reads them from the standard input.")],
    agent: Annotated[str | None, typer.Option(help="Whose turn it is, where several are awaited.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="The round, from 0.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Speak a turn that is awaited, of an agent with by: caller."""
    words = sys.stdin.read().rstrip("\n") if text == "-" else text
    with connect(url, api_key) as service:
        try:
            turn = service.say(job_id, conversation_id, words, agent=agent, round_number=round_number)
        except NothingAwaited as error:
            raise ConfigError(plain(str(error))) from error
    print_document(turn.document, f"{turn.agent} has spoken in round {turn.round}", as_json=as_json)


def awaited(
    job_id: Annotated[str | None, typer.Argument(help="Without one, the turns of all jobs.")] = None,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the turns that callers are to speak, the oldest first."""
    with connect(url, api_key) as service:
        answer = service.awaited(job_id, limit=1000)
    listing = Table(Column("job", no_wrap=True), "conversation", "agent", "round", "since", "until", box=None)
    for turn in answer.awaited:
        since, until = turn.since.isoformat(" ", "seconds"), turn.until and turn.until.isoformat(" ", "seconds")
        listing.add_row(turn.job, turn.conversation, turn.agent, str(turn.round), since, until or "for ever")
    print_document(answer.document, listing, as_json=as_json)


def fork(  # noqa: PLR0913 - one for each option
    job_id: str,
    conversation_id: Annotated[str | None, typer.Argument(help="Without one, all conversations of the job.")] = None,
    *,
    rounds: Annotated[int | None, typer.Option(min=1, help="Take so many rounds of it, in place of all.")] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="AGENT:ROUND", help="What was said before this turn; rounds count from 0."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the job, as agents.pro.params.seed=7."),
    ] = None,
    more: Annotated[int, typer.Option(min=0, help="So many more rounds than it had.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="So many conversations of each.")] = 1,
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a job that goes on with what another has recorded: longer, from an earlier turn, or changed."""
    changes = dict(map(_change_of, set_ or ()))
    with connect(url, api_key) as service:
        try:
            posted = service.fork(
                job_id,
                conversation_id,
                rounds=rounds,
                before=None if before is None else _turn_of(before),
                more=more,
                changes=changes,
                times=times,
            )
        except NothingToFork as error:
            raise ConfigError(plain(str(error))) from error
    print_document(posted.document, posted.id, as_json=as_json)


def _change_of(text: str) -> tuple[str, object]:
    path, is_given, value = text.partition("=")
    if not is_given:
        raise ConfigError(f"--set {plain(text)}: write PATH=VALUE, as agents.pro.model=m")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value


def _turn_of(text: str) -> tuple[str, int]:
    agent, _, number = text.rpartition(":")
    if not agent or not number.isdecimal():
        raise ConfigError(f"--before {plain(text)}: write AGENT:ROUND, as pro:2")
    return agent, int(number)

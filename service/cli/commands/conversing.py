"""The commands that take part in a running service's conversations, and continue recorded ones."""

import json
import sys
from collections.abc import Callable
from itertools import chain, repeat
from typing import Annotated, Final, cast

import typer
from rich.markup import escape
from rich.table import Column, Table

from roundhouse_client import Client, InvalidRequest, NotFound, NothingAwaited, NothingToFork
from roundhouse_client.flows.asking import PATIENCE_S
from roundhouse_client.values.transcripts import AwaitedTurn
from service.cli.commands.remote import follow_posted
from service.cli.connection import JsonOption, KeyOption, UrlOption, connect, print_document
from service.cli.conventions import Panel
from service.cli.displays.console import plain
from service.errors import ConfigError

MOST_LAST: Final = 100  # turns whose last words are shown; each costs a request to the service
LAST_CHARS: Final = 200
NOTHING_LEFT: Final = "nothing is left to say"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    for each in cast("tuple[Callable[..., None], ...]", (say, awaited, fork)):
        app.command(rich_help_panel=Panel.JOBS)(each)


def say(  # noqa: PLR0913 - one for each option
    job_id: str,
    conversation_id: str,
    text: Annotated[str, typer.Argument(help="The words; - reads them from standard input.")],
    agent: Annotated[str | None, typer.Option(help="The agent whose turn it is, if several wait.")] = None,
    round_number: Annotated[int | None, typer.Option("--round", min=0, help="The round, from 0.")] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Speak a turn that waits for a caller, of an agent with by: caller."""
    words = sys.stdin.read().rstrip("\n") if text == "-" else text
    if not words.strip():
        raise ConfigError("the words are empty, and a turn cannot be taken back")
    with connect(url, api_key) as service:
        service.get_health()  # fails at once for a service that is not there
        try:
            turn = service.say(
                job_id, conversation_id, words, agent=agent, round_number=round_number, patience_s=PATIENCE_S
            )
        except NothingAwaited as error:
            raise ConfigError(plain(str(error))) from error
    print_document(turn.document, f"{turn.agent} has spoken in round {turn.round}", as_json=as_json)


def awaited(
    job_id: Annotated[str | None, typer.Argument(help="Default: the turns of all jobs.")] = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the turns that wait for a caller, the oldest first."""
    with connect(url, api_key) as service:
        answer = service.awaited(job_id, limit=1000)
        last = [] if as_json else [_last_said(service, turn) for turn in answer.awaited[:MOST_LAST]]
    columns = (Column("job", no_wrap=True), "conversation", "agent", "round", "since", "until", "last said")
    listing = Table(*columns, box=None)
    for turn, said in zip(answer.awaited, chain(last, repeat("")), strict=False):
        since, until = turn.since.isoformat(" ", "seconds"), turn.until and turn.until.isoformat(" ", "seconds")
        listing.add_row(turn.job, turn.conversation, turn.agent, str(turn.round), since, until or "for ever", said)
    print_document(answer.document, listing, as_json=as_json)


def _last_said(service: Client, awaited: AwaitedTurn) -> str:
    """Return the last words of an awaited turn's conversation, with their speaker."""
    try:
        turns = service.get_conversation(awaited.job, awaited.conversation).turns
    except NotFound:  # deleted since it was listed
        return ""
    said = next((turn for turn in reversed(turns) if turn.text), None)
    return "" if said is None else escape(plain(f"{said.agent}: {' '.join(said.text.split())[-LAST_CHARS:]}"))


def fork(  # noqa: PLR0913 - one for each option
    job_id: str,
    conversation_id: Annotated[str | None, typer.Argument(help="Default: all conversations of the job.")] = None,
    *,
    rounds: Annotated[int | None, typer.Option(min=1, help="Take the first N rounds instead of all.")] = None,
    before: Annotated[
        str | None,
        typer.Option(metavar="AGENT:ROUND", help="Take what was said before this turn; rounds count from 0."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the job, e.g. agents.pro.params.seed=7."),
    ] = None,
    more: Annotated[int, typer.Option(min=0, help="Add N rounds to those of the job.")] = 0,
    times: Annotated[int, typer.Option(min=1, help="Make N conversations from each.")] = 1,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the new job to its end.")] = False,
    url: UrlOption = None,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a job that continues another job's record: longer, from an earlier turn, or changed."""
    changes = dict(map(_change_of, set_ or ()))
    with connect(url, api_key) as service:
        service.get_health()
        try:
            posted = service.fork(
                job_id,
                conversation_id,
                rounds=rounds,
                before=None if before is None else _turn_of(before),
                more=more,
                changes=changes,
                times=times,
                patience_s=PATIENCE_S,
            )
        except NothingToFork as error:
            raise ConfigError(plain(str(error))) from error
        except InvalidRequest as refused:
            raise ConfigError(plain(_grouped(refused))) from refused
        print_document(posted.document, posted.id, as_json=as_json)
        if wait:
            follow_posted(service, posted.id, as_json=as_json)


def _grouped(refused: InvalidRequest) -> str:
    """Return a refusal with one line for all conversations that have the same fault."""
    places: dict[str, list[str]] = {}
    for fault in refused.faults:
        places.setdefault(fault.message, []).append(fault.path)
    lines = [refused.title if places else refused.detail]
    for message, paths in places.items():
        conversations = {path.partition("]")[0] for path in paths if path.startswith("conversations[")}
        is_one_line = len(paths) > 1 and len(conversations) == len(paths)
        lines += [f"  {place}: {message}" for place in ([f"{len(paths)} conversations"] if is_one_line else paths)]
    if any(NOTHING_LEFT in message for message in places):
        lines.append("  --more N adds N rounds; --rounds or --before takes less of the source")
    return "\n".join(lines)


def _change_of(text: str) -> tuple[str, object]:
    path, is_given, value = text.partition("=")
    if not is_given:
        raise ConfigError(f"--set {plain(text)}: write PATH=VALUE, e.g. agents.pro.model=m")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value


def _turn_of(text: str) -> tuple[str, int]:
    agent, _, number = text.rpartition(":")
    if not agent or not number.isdecimal():
        raise ConfigError(f"--before {plain(text)}: write AGENT:ROUND, e.g. pro:2")
    return agent, int(number)

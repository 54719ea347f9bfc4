"""The connection of commands to a running service, and the printing of its answers."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Final, Self

import typer
from rich.console import Console

from roundhouse_client import AnswerLost, AnswerMalformed, Client, Refused, Unreachable
from roundhouse_client.flows.steps import Pause
from roundhouse_client.request import EmptyId
from service.cli.conventions import FILE
from service.errors import ConfigError
from service.formats.documents import parse_document
from workers.process.listeners import foreign_listener

DEFAULT_PORT: Final = 8080
MOST_FILE_BYTES: Final = 1024 * 1024  # bytes read of a configuration that may be a stranger's
SHOWN: Final = 80
MOST_PORTS: Final = 1 << 16
FIRST_PERSON: Final = 1000  # lower ids are system users, which may run a service for all (login.defs(5), UID_MIN)
PIPE_WIDTH: Final = 1000  # width for a pipe, which has none of its own
UrlOption = Annotated[
    str | None,
    typer.Option(envvar="ROUNDHOUSE_URL", help=f"The service; default: this machine, port of ./{FILE} or 8080."),
]
KeyOption = Annotated[str | None, typer.Option(envvar="ROUNDHOUSE_API_KEY", help="One of the service's api_keys.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class ServiceAway(Exception):
    """The service does not answer, or its URL is not valid."""

    @classmethod
    def at(cls, error: Unreachable | AnswerLost, after: str = "") -> Self:
        """Return the error for a service that does not answer."""
        return cls(f"no service at {error.url}: {error.cause}; start one with 'roundhouse serve'{after}")


class AnswerRefused(Exception):
    """The service, or the engine behind it, refused to answer a chat."""


@contextmanager
def connect(url: str | None, api_key: str | None) -> Iterator[Client]:
    """Return a client of the service, not yet connected; without a URL, of the one for this folder.

    Raises:
        ConfigError: an id is empty.
        ServiceAway: the service does not answer, what answers is not Roundhouse, the URL is not HTTP, or without a
            URL another person's program listens there.
    """
    if url is None:
        port = port_here()
        url, owner = f"http://127.0.0.1:{port}", foreign_listener(port)
        if owner is not None and owner >= FIRST_PERSON:
            raise ServiceAway(f"a program of another user ({owner}) listens at {url}; use --url {url} to ask it anyway")
    try:
        client = Client(url, api_key=api_key, patience_s=0.0, on_pause=partial(_tell, url))
    except Unreachable as error:
        raise ServiceAway(f"--url {url}: {error.cause}; it must begin with http:// or https://") from error
    try:
        with client as service:
            yield service
    except (Unreachable, AnswerLost) as error:
        raise ServiceAway.at(error) from error
    except Refused as error:
        if error.status == HTTPStatus.UNAUTHORIZED and api_key is None:
            raise ServiceAway(f"{url} needs a key; give --api-key, or set ROUNDHOUSE_API_KEY") from error
        if not error.code:
            raise ServiceAway(f"{url} does not answer like Roundhouse: {error}") from error
        raise
    except EmptyId as error:
        raise ConfigError(str(error)) from error
    except AnswerMalformed as error:
        raise ServiceAway(f"{url} is not Roundhouse: {error}") from error


def port_here() -> int:
    """Return the port of this folder's configuration, or of the one that ``ROUNDHOUSE_CONFIG`` names.

    Raises:
        ServiceAway: the port comes from a variable of the service's environment.
    """
    path = Path(os.environ.get("ROUNDHOUSE_CONFIG") or FILE)
    try:
        with path.open("rb") as file:
            document, _ = parse_document(file.read(MOST_FILE_BYTES).decode("utf-8"), str(path))
    except (OSError, ValueError, ConfigError):
        return DEFAULT_PORT  # a running service may have read the file when it was valid
    server = document.get("server") if isinstance(document, dict) else None
    port = server.get("port") if isinstance(server, dict) else None
    if isinstance(port, str):
        raise ServiceAway(f"{path}: server.port is {ascii(port)[:SHOWN]}; name the service with --url")
    return port if type(port) is int and 0 < port < MOST_PORTS else DEFAULT_PORT


def _tell(url: str, pause: Pause) -> None:
    """Report a service that is starting or restarting, once each time."""
    if pause.because is not None and pause.number == 1:
        typer.echo(f"the service at {url} does not answer; waiting for it", err=True)


def print_document(document: object, shown: object, *, as_json: bool) -> None:
    """Print for machines, or for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = Console(emoji=False)
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH, emoji=False)
        console.print(shown, highlight=False)

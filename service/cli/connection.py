"""The connection of commands to a running service, and the printing of its answers."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Annotated, Final, Self

import typer
from rich.console import Console

from roundhouse_client import AnswerLost, AnswerMalformed, Client, Refused, Unreachable
from roundhouse_client.drivers.exchange import DEFAULT_URL
from roundhouse_client.flows.steps import Pause
from workers.process.listeners import foreign_listener

DEFAULT_PORT: Final = 8080
FIRST_PERSON: Final = 1000  # users below are the system's, which may keep a service for all (login.defs(5), UID_MIN)
PIPE_WIDTH: Final = 1000  # a pipe has no width that anything would have to fit
UrlOption = Annotated[str, typer.Option(envvar="ROUNDHOUSE_URL", help="Where the service is.")]
KeyOption = Annotated[str | None, typer.Option(envvar="ROUNDHOUSE_API_KEY", help="One of the service's api_keys.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


class ServiceAway(Exception):
    """The service does not answer, or its URL is none."""

    @classmethod
    def at(cls, error: Unreachable | AnswerLost, after: str = "") -> Self:
        """Return the error for a service that does not answer."""
        return cls(f"no service at {error.url}: {error.cause}; start one with 'roundhouse serve'{after}")


class AnswerRefused(Exception):
    """The service, or the engine behind it, gives no answer to a chat."""


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[Client]:
    """Return a client of the service; it does not speak to it yet.

    Raises:
        ServiceAway: the service does not answer, what answers is not Roundhouse, or the URL is none of HTTP. Nor does a
            key go to the default address where another person's program listens: nobody has named that.
    """
    owner = foreign_listener(DEFAULT_PORT) if url == DEFAULT_URL and api_key is not None else None
    if owner is not None and owner >= FIRST_PERSON:
        text = f"a program of another user ({owner}) listens at {url}, and does not get your key"
        raise ServiceAway(f"{text}; --url http://localhost:{DEFAULT_PORT} asks it all the same")
    try:
        client = Client(url, api_key=api_key, patience_s=0.0, on_pause=partial(_tell, url))
    except Unreachable as error:
        raise ServiceAway(f"--url {url}: {error.cause}; it begins with http:// or https://") from error
    try:
        with client as service:
            yield service
    except (Unreachable, AnswerLost) as error:
        raise ServiceAway.at(error) from error
    except Refused as error:
        if error.status == HTTPStatus.UNAUTHORIZED and api_key is None:
            raise ServiceAway(f"{url} asks for a key; give --api-key, or set ROUNDHOUSE_API_KEY") from error
        raise
    except AnswerMalformed as error:
        raise ServiceAway(f"{url} is not Roundhouse: {error}") from error


def _tell(url: str, pause: Pause) -> None:
    """Say that a service is starting or restarting, once each time."""
    if pause.because is not None and pause.number == 1:
        typer.echo(f"the service at {url} is away; waiting for it", err=True)


def print_document(document: object, shown: object, *, as_json: bool) -> None:
    """Print for machines, or for people."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        console = Console(emoji=False)
        if not console.is_terminal:
            console = Console(width=PIPE_WIDTH, emoji=False)
        console.print(shown, highlight=False)

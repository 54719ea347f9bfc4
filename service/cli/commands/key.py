"""The command that makes a key of the HTTP surface."""

import secrets
from typing import Annotated, Final

import typer

from service.conversations.callers import USUAL_SCOPES, KeyScope

KEY_BYTES: Final = 32  # none can be guessed, so a plain hash of one keeps it


def key(
    name: Annotated[str, typer.Argument(help="The key's name.", metavar="NAME")],
    scope: Annotated[
        list[KeyScope] | None,
        typer.Option(help="What it is for; may be given several times. Without it: read and submit.", metavar="SCOPE"),
    ] = None,
) -> None:
    """Make a key: print it, for its holder, and its entry of server.keys or of a keys_file. Nothing is kept."""
    from service.config.keys import digest_of, named_key  # noqa: PLC0415 - what it imports takes a second

    made = f"rh-{secrets.token_urlsafe(KEY_BYTES)}"
    entry = named_key(name, digest_of(made), dict.fromkeys(scope or USUAL_SCOPES))
    typer.echo(made)
    typer.echo(f"- {{name: {entry.name}, sha256: {entry.sha256}, scopes: [{', '.join(entry.scopes)}]}}")

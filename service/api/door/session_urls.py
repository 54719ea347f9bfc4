"""Base URLs of sessions: the paths of the front door below ``/sessions/{id}``."""

from typing import Final

from starlette.types import Scope

from service.api.errors.forms import is_of_surface

SESSION: Final = "roundhouse.session"  # key in an ASGI scope
SESSIONS: Final = "/sessions/"
VERSION: Final = "/version"


def take_session(scope: Scope) -> None:
    """Note the session of a request and take it out of the path.

    A path that is none of the front door's stays as it is, and is not found.
    """
    before, _, after = scope["path"].partition(SESSIONS)
    session, slash, rest = after.partition("/")
    path = slash + rest
    if not before and session and (path == VERSION or is_of_surface(path)):
        scope[SESSION], scope["path"] = session, path


def asked_path(scope: Scope) -> str:
    """Return the path of a request as its client has sent it."""
    session = scope.get(SESSION)
    return str(scope["path"] if session is None else f"{SESSIONS}{session}{scope['path']}")

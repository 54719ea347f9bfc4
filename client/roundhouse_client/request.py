"""Requests, answers and calls as values, independent of the driver that sends them."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, Generic, Literal, TypeVar
from urllib.parse import quote

from roundhouse_client.decoding import decode, parse
from roundhouse_client.errors import AnswerMalformed, refusal

T = TypeVar("T")
Nodes = Literal["all", "this"]
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
SHOWN: Final = 100  # shown characters of a foreign answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request; ``path`` is already quoted.

    ``limit_s`` is the longest silence of its answer, None for the client's own; ``wait_s``, which adds to it, is how
    long the service was asked to wait.
    """

    method: str = "GET"
    path: str
    query: Mapping[str, str | float | bool] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    limit_s: float | None = None
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; a stream's body is empty here, and is read in pieces."""

    status: int
    body: bytes = b""
    retry_after: str | None = None


class EmptyId(ValueError):
    """A given id or name is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """A request, the reader of its answer, and whether it may be sent twice without doubling anything."""

    request: Request
    read: Callable[[bytes], T]
    is_repeatable: bool = False


def checked(reply: Reply) -> bytes:
    """Return the body of a successful answer.

    Raises:
        Refused: the service said no.
        AnswerMalformed: another program answered.
    """
    if reply.status < HTTPStatus.MULTIPLE_CHOICES:
        return reply.body
    try:
        document = json.loads(reply.body) if reply.body else {}
    except ValueError:
        shown = reply.body[:SHOWN].decode(errors="replace")
        document = {"detail": f"not an answer of Roundhouse: {shown!r}"}
    if reply.status < HTTPStatus.BAD_REQUEST:
        raise AnswerMalformed(f"an answer of status {reply.status}; Roundhouse sends no redirects")
    raise refusal(reply.status, document, reply.retry_after)


def into(kind: type[T]) -> Callable[[bytes], T]:
    """Return a decoder of answers into values of ``kind``."""
    return lambda body: decode(kind, parse(body))


def as_text(body: bytes) -> str:
    """Read an answer as text."""
    return body.decode(errors="replace")


def as_nothing(_body: bytes) -> None:
    """Ignore the body of an answer."""


def get(path: str, read: Callable[[bytes], T], **query: str | float | bool | None) -> Call[T]:
    """Return a call that only reads; None is left out of the query. ``wait_s`` makes the service wait."""
    given = {name: value for name, value in query.items() if value is not None}
    request = Request(path=path, query=given, wait_s=float(given.get("wait_s", 0.0)))
    return Call(request=request, read=read, is_repeatable=True)


def post(path: str, read: Callable[[bytes], T], document: object = None, limit_s: float | None = None) -> Call[T]:
    """Return a call that changes something, and so is sent once."""
    body = None if document is None else encoded(document)
    headers = {} if body is None else {"Content-Type": JSON}
    return Call(request=Request(method="POST", path=path, headers=headers, body=body, limit_s=limit_s), read=read)


def on_nodes(call: Call[T], nodes: Nodes | None) -> Call[T]:
    """Return a call that is for ``all`` nodes of a cluster or only for ``this`` one, which answers."""
    if nodes is None:
        return call
    return replace(call, request=replace(call.request, query={**call.request.query, "nodes": nodes}))


def encoded(document: object) -> bytes:
    """Return a document as JSON on one line."""
    try:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()
    except UnicodeEncodeError:  # a lone surrogate: the service reports the fault
        return json.dumps(document, separators=(",", ":"), default=_plain).encode()


def place(*parts: str | int) -> str:
    """Return a path of parts with any characters; a slash in a part is quoted.

    Raises:
        EmptyId: a part is empty, which would change the path's meaning.
    """
    return "".join(f"/{quote(str(part), safe='')}" for part in _given(parts))


def model_place(model: str) -> str:
    """Return the path of a model, whose name may have slashes.

    Raises:
        EmptyId: it is empty.
    """
    return "/v1/models" + slashed(model)


def slashed(name: str) -> str:
    """Return a name that may have slashes as the end of a path.

    Raises:
        EmptyId: it is empty.
    """
    return "".join(f"/{quote(str(part), safe='/')}" for part in _given([name]))


def _given(parts: Collection[str | int]) -> Collection[str | int]:
    if "" in parts:
        raise EmptyId("an id is empty, and the path would be another one's")
    return parts


def _plain(value: Any) -> Any:  # noqa: ANN401 - json's hook
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a document holds {type(value).__name__}, which JSON has not")

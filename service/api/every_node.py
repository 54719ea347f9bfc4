"""Changes by operators and trainers on every node of a cluster: asked of one node, made by all, each with a result."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import anyio
import httpx
import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roundhouse_client.values.node import NodeResult
from service.api.body import decode_soon, read_body
from service.api.door.parameters import OF_NODES as PASSED
from service.api.errors.problems import MEDIA_TYPE, refusal, refused
from service.api.openai.elsewhere import OURS, Elsewhere
from service.conversations.document.limits import Limits
from service.errors import (
    Fault,
    InvalidParameter,
    NodesFailed,
    NodesUnnamed,
    ServiceError,
    UpdateInvalid,
)
from service.node.node import Node
from service.store.seats import Seat

NODES: Final = "nodes"
ALL: Final = "all"
THIS: Final = "this"
_PLACES: Final = (
    ("POST", re.compile(r"/v1/config/reload")),
    ("POST", re.compile(r"/v1/models/(?P<model>.+)/weights/(?P<weights>init|update)")),
    ("GET", re.compile(r"/v1/models/(?P<model>.+)/weights")),  # only nodes ask each other
    ("POST", re.compile(r"/v1/models/(?P<model>.+)/(adapters|load|unload)")),
    ("DELETE", re.compile(r"/v1/models/(?P<model>.+)/adapters/.+")),
    ("POST", re.compile(r"/v1/workers/(?P<worker>.+)/(drain|resume|restart)")),
)
SENT: Final = frozenset({"authorization", "x-api-key", "content-type", "accept"})
MOST_DETAIL: Final = 500


def describe_nodes(paths: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
    """Add ``nodes`` to the description of each route that takes it."""
    schema = {"type": "string", "enum": [ALL, THIS], "default": THIS}
    parameter = {"name": NODES, "in": "query", "required": False, "schema": schema}
    for path, methods in paths.items():
        for method, route in methods.items():
            if method != "get" and _place_of({"type": "http", "method": method.upper(), "path": path}) is not None:
                route.setdefault("parameters", []).append(parameter)
                added = {str(status): answer for status, answer in refused(400, 502).items()}
                route["responses"] = {**added, **route["responses"]}


class EveryNode:
    """ASGI middleware that makes a change on all nodes if ``nodes=all`` asks for it; ``app`` makes it on this one."""

    def __init__(self, app: ASGIApp, node: Node, elsewhere: Elsewhere, limits: Limits) -> None:
        self._app = app
        self._node = node
        self._elsewhere = elsewhere
        self._limits = limits

    def __repr__(self) -> str:
        return f"<EveryNode before {self._app!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make the change here, or on all nodes; any other request passes."""
        place = _place_of(scope)
        if place is None:
            await self._app(scope, receive, send)
            return
        try:
            answer = await self._answer(Request(scope, receive), place)
        except ServiceError as error:
            answer = refusal(error, scope["path"])
        await answer(scope, receive, send)

    async def _answer(self, request: Request, place: Mapping[str, str | None]) -> ASGIApp:
        path, worker = request.scope["path"], place.get("worker")
        model = place.get("model") if worker is None else worker.rpartition("-")[0]
        if request.method == "GET" and PASSED not in request.headers:
            return self._app
        wanted = request.query_params.getlist(NODES)
        if len(wanted) > 1 or not {*wanted} <= {ALL, THIS}:
            raise InvalidParameter(f"nodes: give all or this, not {', '.join(wanted)[:MOST_DETAIL]!r}")
        others = self._elsewhere.known(model)
        is_passed = PASSED in request.headers
        if place.get("weights") and others and not wanted and not is_passed and model in self._node.live.models:
            raise NodesUnnamed(str(model), len(others))
        if not is_passed and ALL not in wanted:
            return _Here(self._app, _without(request.scope), None)
        if not is_passed:
            _check_alone(request)
        body = await read_body(request, self._limits)
        if is_passed:
            if (fault := self._elsewhere.refusal(request, path, body)) is not None:
                raise InvalidParameter(fault)
            return _Here(self._app, _without(request.scope), body)
        is_here = model is None or model in self._node.live.models or not others
        targets: list[Seat | None] = [*([None] if is_here else []), *others]
        with self._elsewhere.counted():
            if not place.get("weights") or len(targets) == 1:
                answers = await self._ask(request, request.method, request.scope, body, targets)
                return _together(answers, self._elsewhere.own_url)
            body = await self._weights_body(request, str(model), body, place, targets)
            # All changes begin with the same node. Of two at once the second is refused there, and changes nothing.
            targets.sort(key=lambda seat: self._elsewhere.own_url if seat is None else seat.url)
            answers = await self._ask(request, request.method, request.scope, body, targets[:1])
            if answers[0].is_done:
                answers += await self._ask(request, request.method, request.scope, body, targets[1:])
            return _together(answers, self._elsewhere.own_url, len(targets))

    async def _weights_body(
        self, request: Request, model: str, body: bytes, place: Mapping[str, str | None], targets: Sequence[Seat | None]
    ) -> bytes:
        """Return the body of an update for several nodes: all of them get the same version.

        Raises:
            UpdateInvalid: a trainer's group has the engines of one node.
            NodesFailed: a node does not say which version it has; nothing has been changed.
        """
        document = await decode_soon(body, self._limits)
        if not isinstance(document, dict):
            return body  # the nodes say what is wrong with it
        if place["weights"] == "init" or document.get("tensors"):
            text = (
                f"{len(targets)} nodes serve {model}, and a trainer's group has the engines of one: make a group with"
                " each node (?nodes=this), or give all of them a checkpoint"
            )
            raise UpdateInvalid([Fault(path=NODES, message=text)])
        if document.get("version") is None:
            scope = {**request.scope, "path": f"/v1/models/{model}/weights"}
            answers = await self._ask(request, "GET", scope, b"", targets)
            if any(not answer.is_done for answer in answers):
                raise _failed(answers, self._elsewhere.own_url, [])
            document["version"] = 1 + max(int(answer.document["version"]) for answer in answers)
            return json.dumps(document).encode()
        return body

    async def _ask(
        self, request: Request, method: str, scope: Scope, body: bytes, targets: Sequence[Seat | None]
    ) -> list["NodeAnswer"]:
        """Ask this node (None) and others at once; return their answers in the same order."""
        answers: list[NodeAnswer | None] = [None] * len(targets)
        headers = {name: value for name, value in request.headers.items() if name in SENT}

        async def ask(number: int, seat: Seat | None) -> None:
            if seat is None:
                answers[number] = await _ask_here(self._app, _without({**scope, "method": method}), body)
            else:
                answers[number] = await self._ask_other(seat, method, scope["path"], body, headers)

        async with anyio.create_task_group() as tasks:
            for number, seat in enumerate(targets):
                tasks.start_soon(ask, number, seat)
        return [answer for answer in answers if answer is not None]

    async def _ask_other(
        self, seat: Seat, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> "NodeAnswer":
        try:
            async with self._elsewhere.passing_to(seat, path, body, headers, method) as response:
                return NodeAnswer(seat=seat, status=response.status_code, body=await response.aread())
        except* (httpx.HTTPError, OSError) as group:
            trouble = str(group.exceptions[0])
        return NodeAnswer(seat=seat, status=None, body=b"", trouble=trouble)


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of this node, or of the one with ``seat``; ``status`` is None where none came."""

    seat: Seat | None
    status: int | None
    body: bytes
    trouble: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the node has made the change."""
        return self.status is not None and 200 <= self.status < 300  # noqa: PLR2004 - success (RFC 9110)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object of the answer; empty without one."""
        return _document(self.body)

    @property
    def detail(self) -> str:
        """Why the change was not made."""
        return (self.trouble or str(self.document.get("detail", "")) or f"it answered {self.status}")[:MOST_DETAIL]


def _together(answers: Sequence[NodeAnswer], own: str, asked: int | None = None) -> Response:
    """Return one answer for all: that of the first node, with the result of each.

    With fewer answers than nodes ``asked``, the others have not been asked, since the first has refused.

    Raises:
        NodesFailed: a node did not make the change; the message says which did.
    """
    first = answers[0]
    if len(answers) == 1 and asked in {None, 1} and not first.is_done and first.status is not None:
        return Response(first.body, first.status, media_type=MEDIA_TYPE)  # its own words say it best
    if not all(answer.is_done for answer in answers):
        raise _failed(answers, own, [_url(answer, own) for answer in answers if answer.is_done])
    results = [NodeResult(url=_url(answer, own), status=answer.status or 0) for answer in answers]
    content = {**first.document, NODES: msgspec.to_builtins(results)}
    return JSONResponse(content, 200 if first.status == 204 else first.status or 200)  # noqa: PLR2004 - no content


def _failed(answers: Sequence[NodeAnswer], own: str, done: Sequence[str]) -> NodesFailed:
    failed = [answer for answer in answers if not answer.is_done]
    statuses = {answer.status for answer in answers}
    faults = [Fault(path=_url(answer, own), message=answer.detail) for answer in failed]
    return NodesFailed(faults, done, statuses.pop() if len(statuses) == 1 else None)


def _url(answer: NodeAnswer, own: str) -> str:
    return own if answer.seat is None else answer.seat.url


def _check_alone(request: Request) -> None:
    """Check that nothing stands beside ``nodes``: the other nodes would not get it.

    Raises:
        InvalidParameter: something does.
    """
    beside = [name for name in request.query_params if name != NODES]
    beside += [name for name in request.headers if name.startswith(OURS)]
    if beside:
        raise InvalidParameter(f"{beside[0][:MOST_DETAIL]}: this request takes it not, or not beside nodes=all")


class _Here:
    """An answer of this node, whose body may have been read before."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes | None) -> None:
        self._app = app
        self._scope = scope
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the application of this node."""
        del scope
        await self._app(self._scope, receive if self._body is None else _given(self._body, receive), send)


async def _ask_here(app: ASGIApp, scope: Scope, body: bytes) -> NodeAnswer:
    status, parts = 500, bytearray()

    async def keep(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.extend(message.get("body", b""))

    async def never() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    await app(scope, _given(body, never), keep)
    return NodeAnswer(seat=None, status=status, body=bytes(parts))


def _given(body: bytes, after: Receive) -> Receive:
    """Return a channel that gives a whole body, and then what comes ``after``."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await after()

    return receive


def _place_of(scope: Scope) -> Mapping[str, str | None] | None:
    """Return the parts of a path at which a change may be made on all nodes; None for any other request."""
    if scope["type"] != "http":
        return None
    for method, pattern in _PLACES:
        if scope["method"] == method and (match := pattern.fullmatch(scope["path"])) is not None:
            return match.groupdict()
    return None


def _without(scope: Scope) -> Scope:
    """Return a request's scope without what is for this middleware."""
    query = [pair for pair in parse_qsl(scope["query_string"].decode("latin-1"), True) if pair[0] != NODES]
    kept = {**scope, "query_string": urlencode(query).encode(), "raw_path": quote(scope["path"]).encode()}
    headers = MutableHeaders(raw=[pair for pair in scope["headers"] if pair[0].lower() != PASSED.encode()])
    return {**kept, "headers": headers.raw}


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}

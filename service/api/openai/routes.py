"""The routes of OpenAI's and Anthropic's APIs."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import anyio.to_thread
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from roundhouse_client.values.models import Models as ModelList
from service.api.body import check_depth, check_nodes, read_body
from service.api.door.access import AccessCheck, caller_of
from service.api.door.session_urls import SESSION
from service.api.errors.forms import (
    ALIASES,
    NEEDS,
    PATHS,
    SERVED,
    SLOTLESS,
    WRITING,
    ClientError,
)
from service.api.errors.problems import ANSWERS, problem, refusal, refused
from service.api.openai.answer import RelayedAnswer
from service.api.openai.elsewhere import Elsewhere
from service.api.openai.envelope import SMALL_BYTES, Envelope, fill_body, may_continue, open_envelope
from service.api.openai.model_names import Models, unknown_model
from service.api.openai.responses import ANSWERED, JSON, REFUSED_EARLY
from service.api.openai.session_requests import SessionRecorder, read_as_chat, rename_model
from service.config.schema import ServerConfig, unable_to_record
from service.conversations.callers import Caller
from service.conversations.document.limits import Limits
from service.conversations.job.client_request import PostedRequest
from service.errors import BodyMalformed, InvalidParameter, ModelNotFound, NoLeader, PathNotFound, ServiceError
from service.node.node import Node
from service.scheduling.keeping.request import RelayedRequest
from service.scheduling.keeping.token_counts import TokenCounts
from transport.answer_bound import laid_over
from transport.errors import EngineRejected
from workers.errors import NoEngineReady
from workers.spec import LLAMA_CPP
from workers.states import LEASABLE

MOST_PRIORITY: Final = 1_000_000
MOST_SECONDS: Final = 1e9
SUMMARIES: Final = {
    "/v1/chat/completions": "Chat with a model",
    "/v1/completions": "Complete a text",
    "/v1/embeddings": "Embed texts",
    "/v1/responses": "Ask by OpenAI's Responses",
    "/v1/messages": "Ask by Anthropic's Messages",
    "/completion": "Complete a text with llama.cpp's own route",
    "/v1/rerank": "Rank texts by how well they fit a question",
    "/v1/score": "Score pairs of texts",
    "/pooling": "Get an embedding model's output for each token",
    "/tokenize": "Count or list the tokens of a text",
    "/detokenize": "Turn tokens into text",
    "/apply-template": "Render a chat with the model's template",
    "/v1/chat/completions/input_tokens": "Count the tokens of a chat",
    "/v1/responses/input_tokens": "Count the tokens of a request of OpenAI's Responses",
    "/v1/messages/count_tokens": "Count the tokens of a request of Anthropic's Messages",
}


def openai_router(relays: "Relays") -> APIRouter:
    """Return the routes beside the relayed paths, which ``RelayedPaths`` serves."""
    router, models = APIRouter(tags=["openai"]), Models(relays.node, relays.elsewhere)

    @router.get("/version", summary="Ask an engine for its version", responses=refused(400, 401, 404, 502, 503))
    async def read_version(model: str | None = None) -> Response:
        return Response(await relays.read_version(model), media_type="application/json")

    @router.get("/v1/models", summary="List models and adapters", responses=REFUSED_EARLY)
    async def list_models() -> ModelList:
        return ModelList(object="list", data=tuple(models.listed()))

    return router


class Relays:
    """Takes posted bodies to the queue; errors are answered in the form of the path's API."""

    def __init__(self, node: Node, limits: Limits, server: ServerConfig, *, has_several_keys: bool) -> None:
        self.node = node
        self._has_several_keys = has_several_keys
        self._limits = limits
        self._server = server
        self._counts = TokenCounts(node.fleet, node.scheduler.requests)
        self.elsewhere = None if node.seats is None else Elsewhere(node, node.seats)

    def __repr__(self) -> str:
        return f"<Relays {self.node.scheduler.requests!r}>"

    async def answer(self, request: Request, path: str) -> ASGIApp:
        """Take a posted body to the queue; return its answer as an application.

        Raises:
            ServiceError: it is refused.
        """
        body = await read_body(request, self._limits)
        if self.elsewhere is not None and (claim := self.elsewhere.refusal(request, path, body)) is not None:
            raise InvalidParameter(claim)
        try:
            taken = await self._take(request, path, body)
        except ModelNotFound as missing:
            return self._pass_on(request, path, body, missing)
        requests = self.node.scheduler.requests
        return RelayedAnswer(
            taken,
            requests.withdraw,
            self._server.heartbeat_s,
            trouble=partial(self._trouble_of, taken.posted.model),
            place=requests.queue.place_in_queue,
            recorder=None if taken.posted.records is None else SessionRecorder(self.node.sessions),
        )

    def _pass_on(self, request: Request, path: str, body: bytes, missing: ModelNotFound) -> ASGIApp:
        """Return the answer of another node.

        Raises:
            ModelNotFound: no node has the model.
            NoLeader: it spans nodes, and none of them leads it; or the nodes that have it are away.
        """
        if self.elsewhere is None:
            raise missing
        passed = self.elsewhere.answer(request, path, body, missing.model)
        if passed is not None:
            return passed
        if missing.model in self.node.fleet.models():
            raise NoLeader(self.node.fleet.trouble_of(missing.model))
        if missing.model in self.node.neighbours.known_models():
            raise NoLeader(f"no node serves {missing.model} now")
        raise missing

    def _trouble_of(self, model: str) -> str | None:
        """Return why no worker serves a model now; None where one does."""
        fleet = self.node.fleet
        return fleet.trouble_of(model) if model in fleet.models_without_ready_worker() else None

    async def _take(self, request: Request, path: str, body: bytes) -> RelayedRequest:
        caller, program = caller_of(request), request.headers.get("x-session-id")
        session = (
            await self.node.sessions.find_own(request.scope[SESSION], caller) if SESSION in request.scope else None
        )
        envelope = await self._open(body, path, program, caller.name)
        wanted = envelope.model if session is None or session.model is None else session.model
        name, model, adapter = self._find(wanted)
        filled = await self._fill(body, path, model)
        if filled is not body:
            body, envelope = filled, await self._open(filled, path, program, caller.name)
        records = None if session is None or path not in WRITING else session.records
        if records is not None:
            body = await self._chat_of(body, path, name, model)
        elif wanted != envelope.model and path in SERVED:
            body = rename_model(body, name)
        posted = PostedRequest(
            path=path,
            body=body,
            name=name,
            model=model,
            adapter=adapter,
            is_streamed=envelope.is_streamed,
            answers=envelope.answers,
            most_tokens=envelope.most_tokens,
            chars=envelope.chars,
            priority=_priority(request, caller),
            owner=caller.name,
            marks=envelope.marks,
            limit_s=_seconds(request, "x-roundhouse-deadline-s"),
            wait_s=_least(_seconds(request, "x-roundhouse-wait-s"), self._server.wait_s),
            trace_parent=request.headers.get("traceparent"),
            is_apart=self._has_several_keys and caller.name is not None,
            continues=envelope.is_streamed and may_continue(request.headers.get("x-roundhouse-continue")),
            session=None if session is None else session.id,
            records=records,
        )
        counted = await self._counts.ask(posted) if path in SLOTLESS else None
        if counted is not None:
            return counted
        await self.node.door.bounds.check_request(caller)
        slots = self.node.scheduler.view.slots(model) or self.node.fleet.lanes.slots_on_demand(model)
        return self.node.scheduler.requests.submit(posted, slots)

    async def _chat_of(self, body: bytes, path: str, name: str, model: str) -> bytes:
        """Return a body as that of a chat, whose answer's tokens can be recorded.

        Raises:
            BodyMalformed: it cannot be one, or the model's engine does not tell tokens.
        """
        config = self.node.live.config.models.get(model)
        if config is not None and (why := unable_to_record(config)) is not None:
            raise BodyMalformed(f"{name} cannot be recorded: {why}")
        return await anyio.to_thread.run_sync(read_as_chat, body, path, name)

    async def _open(self, body: bytes, path: str, session: str | None, owner: str | None) -> Envelope:
        """Open the envelope of a body within its bounds; a large body is read in a thread.

        Raises:
            BodyMalformed: it exceeds its bounds, or cannot be used.
        """
        if len(body) <= SMALL_BYTES:
            return self._open_now(body, path, session, owner)
        await check_nodes(body, self._limits)
        return await anyio.to_thread.run_sync(self._open_now, body, path, session, owner)

    def _open_now(self, body: bytes, path: str, session: str | None, owner: str | None) -> Envelope:
        check_depth(body, self._limits)
        is_apart = self._has_several_keys and owner is not None
        return open_envelope(body, path, session, owner, is_apart=is_apart)

    async def _fill(self, body: bytes, path: str, model: str) -> bytes:
        """Return a body with those of the model's parameters that it lacks."""
        params = self._params_of(model) if path in WRITING else {}
        if not params:
            return body
        fill = partial(fill_body, reads_all=self.node.live.config.models[model].engine in LLAMA_CPP)
        if len(body) <= SMALL_BYTES:
            return fill(body, path, params)
        return await anyio.to_thread.run_sync(fill, body, path, params)

    def _params_of(self, model: str) -> Mapping[str, object]:
        """Return the parameters that apply to requests: the author's ``params`` and ``max_answer``."""
        config = self.node.live.config.models.get(model)
        if config is None or not config.door.params:
            return {}
        if config.max_answer is None:
            return config.params
        return laid_over({"max_tokens": config.max_answer}, config.params)

    async def read_version(self, model: str | None) -> bytes:
        """Return an engine's answer to ``/version``, unchanged.

        Raises:
            NoEngineReady: no engine of the model answers now.
            PathNotFound: the engine has no such path.
        """
        _, name, _ = self._find(model)
        for worker in self.node.fleet.workers_of(name):
            if worker.now.state in LEASABLE:
                try:
                    return await worker.read_version()
                except EngineRejected as error:
                    raise PathNotFound(f"the engine of {name} has no /version: {error}") from error
        raise NoEngineReady(f"no engine of {name} is ready")

    def _find(self, name: str | None) -> tuple[str, str, str | None]:
        """Return a request's name, the model behind it, and the adapter if it names one."""
        models = self.node.fleet.models()
        if name is None:
            if len(models) > 1:
                raise InvalidParameter(f"model is required; one of {', '.join(models)}")
            name = models[0]
        if name in models and (self.elsewhere is None or name in self.node.live.models):
            return name, name, None
        model = self.node.adapters.names().get(name)
        if model is None:
            raise unknown_model(name, self.node)
        return name, model, name


class RelayedPath(NamedTuple):
    """A relayed path, used as the label of measurements."""

    path: str


class RelayedPaths:
    """ASGI middleware behind the gate that serves relayed paths, where a framework would cost more than all else.

    ``app`` serves all other paths.
    """

    def __init__(self, app: ASGIApp, relays: Relays, access: AccessCheck) -> None:
        self._app = app
        self._relays = relays
        self._access = access
        self._paths = {path: RelayedPath(path) for path in SERVED}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        route = self._paths.get(scope["path"]) if scope["type"] == "http" else None
        if route is None and SESSION not in scope:
            await self._app(scope, receive, send)
            return
        if route is None:
            await self._pass_to_session(scope, receive, send)
            return
        scope["route"] = route
        path = ALIASES.get(route.path, route.path)
        response = await self._respond(Request(scope, receive), path)
        await response(scope, receive, send)

    async def _pass_to_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request of a session that is not relayed."""
        request = Request(scope, receive)
        try:
            await self._relays.node.sessions.find_own(scope[SESSION], caller_of(request))
        except ServiceError as error:
            await refusal(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _respond(self, request: Request, path: str) -> ASGIApp:
        if request.method != "POST":
            detail = f"{request.url.path} does not take {request.method}; it takes POST"
            error = ClientError(status=405, code="method_not_allowed", message=detail)
            return error.response(path, {"Allow": "POST"})
        try:
            await self._access(request)
            return await self._relays.answer(request, path)
        except ServiceError as error:
            return refusal(error, path, "model" if isinstance(error, ModelNotFound) else None)
        except tuple(ANSWERS) as error:
            return problem(error)


def describe_relayed() -> dict[str, Any]:
    """Return the relayed paths as OpenAPI describes them."""
    return {
        path: {
            "post": {
                "tags": ["openai"],
                "summary": SUMMARIES[ALIASES.get(path, path)],
                "operationId": "relay" + re.sub(r"\W", "_", path) + "_post",
                **_request_body(ALIASES.get(path, path)),
                "responses": {str(status): answer for status, answer in ANSWERED.items()},
            }
        }
        for path in (*PATHS, *ALIASES)
    }


def _request_body(path: str) -> dict[str, Any]:
    needed = NEEDS.get(path, ())
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"model": {"type": ["string", "null"]}, **{name: {"type": "array"} for name in needed}},
    }
    if needed:
        schema["required"] = list(needed)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def _priority(request: Request, caller: Caller) -> int:
    """Return the priority that a request asks for.

    Raises:
        InvalidParameter: it is not a number that a job may have, or is more than the caller may give.
    """
    given = request.headers.get("x-roundhouse-priority", "0").strip()
    try:
        priority = int(_plain_number(given))
    except ValueError:
        priority = MOST_PRIORITY + 1
    if abs(priority) > MOST_PRIORITY:
        raise InvalidParameter(f"X-Roundhouse-Priority: {given[:50]!r} is not a whole number from -1000000 to 1000000")
    if caller.max_priority is not None and priority > caller.max_priority:
        most = f"this key's max_priority, {caller.max_priority}"
        raise InvalidParameter(f"X-Roundhouse-Priority: {priority} is above {most}")
    return priority


def _seconds(request: Request, name: str) -> float | None:
    given = request.headers.get(name)
    if given is None:
        return None
    try:
        seconds = float(_plain_number(given))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise InvalidParameter(f"{name}: {given[:50]!r} is not a time in seconds")
    return seconds


def _plain_number(given: str) -> str:
    """Return a number, or '' if only Python would read it as one (``1_0``)."""
    return "" if "_" in given else given


def _least(*limits: float | None) -> float | None:
    return min((limit for limit in limits if limit is not None), default=None)

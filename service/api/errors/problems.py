"""Errors as ``application/problem+json`` (RFC 9457), rendered in one place."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from service.api.errors.forms import ClientError, error_of_service, is_of_surface, not_served
from service.errors import AdapterInvalid, Fault, ServiceError, UpdateInvalid
from service.formats.faults import path_of, phrase
from transport.errors import EngineError
from workers.errors import (
    AdapterError,
    AdaptersFull,
    AdapterTaken,
    GroupMissing,
    InvalidAdapter,
    InvalidUpdate,
    NoEngineReady,
    NoWorkerReady,
    OffloadCrowded,
    UpdateRunning,
    VersionNotNewer,
)

MEDIA_TYPE: Final = "application/problem+json"
DOOR: Final = (401, 403, 408, 431)  # statuses of any request that is refused before its route is known
TOO_LARGE: Final = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
logger = logging.getLogger(__name__)


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an error of workers; ``path`` is that of its one fault, if any."""

    status: int
    code: str
    title: str
    retry_after_s: int | None = None
    path: str | None = None


def _like(kind: type[ServiceError], path: str) -> ErrorAnswer:
    return ErrorAnswer(status=kind.status, code=kind.code, title=kind.title, path=path)


_UNAVAILABLE: Final = ErrorAnswer(
    status=503, code="no_worker_ready", title="No engine of the model answers", retry_after_s=5
)
_REFUSED: Final = ErrorAnswer(status=502, code="engine_refused", title="An engine refused")
ANSWERS: Final[Mapping[type[Exception], ErrorAnswer]] = {  # an error's nearest base class decides
    InvalidAdapter: _like(AdapterInvalid, path="path"),
    AdapterTaken: ErrorAnswer(status=409, code="name_taken", title="The name is taken"),
    AdaptersFull: ErrorAnswer(status=409, code="adapters_full", title="There is no room for another adapter"),
    NoEngineReady: _UNAVAILABLE,
    AdapterError: _REFUSED,
    UpdateRunning: ErrorAnswer(status=409, code="update_running", title="Another update is under way", retry_after_s=1),
    VersionNotNewer: ErrorAnswer(status=409, code="version_not_newer", title="The version is not newer"),
    GroupMissing: ErrorAnswer(status=409, code="group_missing", title="The trainer's group must be formed again"),
    NoWorkerReady: _UNAVAILABLE,
    InvalidUpdate: _like(UpdateInvalid, path=""),
    OffloadCrowded: ErrorAnswer(status=503, code="crowded", title="Too many documents await a check", retry_after_s=5),
    EngineError: _REFUSED,
}


def problem(error: Exception) -> Response:
    """Return the response for an error of the service or of workers."""
    after_s = (error if isinstance(error, ServiceError) else _answer_to(error)).retry_after_s
    return _render(describe(error), {} if after_s is None else {"Retry-After": str(after_s)})


def refusal(error: ServiceError, path: str, param: str | None = None) -> Response:
    """Return the response to a refused request: a problem, or the error form of the path's API."""
    if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # a 503 is logged by its cause
        logger.error("%s: %s", error.code, error)
    return error_of_service(error, param).response(path, {}) if is_of_surface(path) else problem(error)


def describe(error: Exception) -> dict[str, object]:
    """Return the fields of a problem that programs use."""
    if isinstance(error, ServiceError):
        return _fields(error.status, error.title, str(error), error.code, error.faults)
    answer = _answer_to(error)
    faults = () if answer.path is None else (Fault(path=answer.path, message=str(error)),)
    return _fields(answer.status, answer.title, "; ".join(map(str, faults)) or str(error), answer.code, faults)


class ProblemFault(BaseModel):
    """One fault of a request; ``line`` is that of the job's text, if known."""

    path: str
    message: str
    line: int | None = None


class Problem(BaseModel):
    """An error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[ProblemFault]


def refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route for its description, including those of the door."""
    statuses = (*statuses, *DOOR, *((HTTPStatus.UNSUPPORTED_MEDIA_TYPE,) if TOO_LARGE in statuses else ()))
    # A reference, since FastAPI would make a validator for each of them, 300 in all, at every start.
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"content": content, "description": HTTPStatus(status).phrase} for status in statuses}


def install(app: FastAPI) -> None:
    """Make this module render every error of ``app``."""

    @app.exception_handler(ServiceError)
    async def service_error(request: Request, error: ServiceError) -> Response:
        return refusal(error, request.url.path)

    for kind in ANSWERS:

        @app.exception_handler(kind)
        async def worker_error(_request: Request, error: Exception) -> Response:
            return problem(error)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(_request: Request, error: RequestValidationError) -> Response:
        faults = tuple(Fault(path=path_of(entry["loc"]), message=phrase(entry)) for entry in error.errors())
        detail = "; ".join(map(str, faults))
        return _render(_fields(400, "A parameter is not usable", detail, "invalid_parameter", faults), {})

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        title = HTTPStatus(error.status_code).phrase
        code, detail = title.lower().replace(" ", "_"), str(error.detail)
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = allowed = _allowed(request)
            detail = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        path = request.url.path
        if is_of_surface(path):
            message = not_served(path) if error.status_code == HTTPStatus.NOT_FOUND else detail
            return ClientError(status=error.status_code, code=code, message=message).response(path, headers)
        return _render(_fields(error.status_code, title, detail, code), headers)

    @app.exception_handler(Exception)
    async def defect(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again after this answer, and the server logs it with its traceback.
        return _render(_fields(500, "Internal error", "a defect of Roundhouse; see its log", "internal"), {})


def _answer_to(error: Exception) -> ErrorAnswer:
    return next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)


def _allowed(request: Request) -> str:
    """Return the methods of all of a path's routes; the framework names those of one route."""
    root = request.scope.get("root_path", "")
    path = {"type": "http", "path": request.scope["path"], "root_path": root, "headers": []}
    below = {**path, "path": f"{path['path']}/-/-", "method": "GET"}

    def match(route: BaseRoute, method: str) -> Match:
        return route.matches({**path, "method": method})[0]

    def knows(method: str) -> bool:
        return any(match(route, method) is Match.FULL for route in known)

    found = [route for route in request.app.routes if match(route, "GET") is not Match.NONE]
    # A route with a ``path`` parameter also matches any path below. Where all do, the first is meant: it is the most
    # specific.
    exact = [route for route in found if route.matches(below)[0] is Match.NONE]
    known = exact or [route for route in found if _shape_of(route) == _shape_of(found[0])]
    return ", ".join(method for method in METHODS if knows("GET" if method == "HEAD" else method))


def _shape_of(route: BaseRoute) -> object:
    """Return the path of one route; FastAPI may hold a whole router as one route, which has no path."""
    return getattr(route, "path", route)


def _fields(status: int, title: str, detail: str, code: str, faults: Sequence[Fault] = ()) -> dict[str, object]:
    errors = [
        {"path": fault.path, "message": fault.message, **({} if fault.line is None else {"line": fault.line})}
        for fault in faults
    ]
    return {"title": title, "status": status, "detail": detail, "code": code, "errors": errors}


def _render(fields: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    content = msgspec.json.encode({"type": f"urn:roundhouse:{fields['code']}", **fields})
    return Response(content, status_code=fields["status"], media_type=MEDIA_TYPE, headers=headers)

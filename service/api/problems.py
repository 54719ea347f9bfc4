"""Errors as ``application/problem+json`` (RFC 9457), rendered in one place."""

import logging
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from service.api import schemas
from service.errors import Fault, ServiceError
from service.formats.faults import path_of

MEDIA_TYPE: Final = "application/problem+json"
METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
logger = logging.getLogger(__name__)


def problem(error: ServiceError) -> Response:
    """Return the response that an error of the service stands for."""
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else {}
    return _render(error.status, error.title, str(error), error.code, error.faults, headers)


def refused(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the errors that a route can answer with, for its description."""
    return {status: {"model": schemas.Problem, "description": HTTPStatus(status).phrase} for status in statuses}


def install(app: FastAPI) -> None:
    """Have every error of ``app`` rendered here."""

    @app.exception_handler(ServiceError)
    async def service_error(_request: Request, error: ServiceError) -> Response:
        if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # a 503 is told by whatever is not available
            logger.error("%s: %s", error.code, error)
        return problem(error)

    @app.exception_handler(RequestValidationError)
    async def bad_parameter(_request: Request, error: RequestValidationError) -> Response:
        faults = tuple(Fault(path=path_of(entry["loc"]), message=entry["msg"]) for entry in error.errors())
        detail = "; ".join(map(str, faults))
        return _render(HTTPStatus.BAD_REQUEST, "A parameter is not usable", detail, "invalid_parameter", faults, {})

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> Response:
        phrase = HTTPStatus(error.status_code).phrase
        code = phrase.lower().replace(" ", "_")
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = _allowed(request)
        return _render(error.status_code, phrase, str(error.detail), code, (), headers)

    @app.exception_handler(Exception)
    async def defect(_request: Request, _error: Exception) -> Response:
        # Starlette raises it again after this answer, and the server logs it with its traceback.
        return _render(500, "Internal error", "a defect of Roundhouse; see its log", "internal", (), {})


def _allowed(request: Request) -> str:
    """Return the methods that a path knows, by any of its routes; the framework names those of one."""
    root = request.scope.get("root_path", "")
    path = {"type": "http", "path": request.scope["path"], "root_path": root, "headers": []}

    def match(route: BaseRoute, method: str) -> Match:
        return route.matches({**path, "method": method})[0]

    known = [route for route in request.app.routes if match(route, "GET") is not Match.NONE]
    return ", ".join(method for method in METHODS if any(match(route, method) is Match.FULL for route in known))


def _render(
    status: int, title: str, detail: str, code: str, faults: tuple[Fault, ...], headers: dict[str, str]
) -> Response:
    body: dict[str, object] = {
        "type": f"urn:roundhouse:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        "errors": [{"path": fault.path, "message": fault.message} for fault in faults],
    }
    return Response(msgspec.json.encode(body), status_code=status, media_type=MEDIA_TYPE, headers=headers)

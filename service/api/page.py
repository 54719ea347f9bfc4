"""The dashboard at ``/`` and its files, which need no key: what they show is asked for with one."""

from typing import Final

from fastapi import APIRouter, Request, Response

from service.errors import PathNotFound
from service.web.page_files import PREFIX, page_files

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # it is asked each time whether it has changed, so an upgrade shows at once
}


def page_router() -> APIRouter:
    """Return the routes of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def read_page(request: Request) -> Response:
        return _answer("/", request)

    @router.get(PREFIX + "{name}")
    async def read_file(name: str, request: Request) -> Response:
        return _answer(PREFIX + name, request)

    return router


def _answer(path: str, request: Request) -> Response:
    file = page_files().get(path)
    if file is None:
        raise PathNotFound("the dashboard has no such file")
    headers = {**HEADERS, "ETag": file.tag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.tag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)

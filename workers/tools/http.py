"""Tools behind an HTTP endpoint that the operator configured."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

import httpx

from transport.bodies import LITTLE_AHEAD, UNPACKED, UnreadableBody, read_body
from workers.errors import ToolRunFailed, UnknownTool
from workers.tools.results import MAX_RESULT_BYTES, decode_result
from workers.tools.runner import ToolUse

DETAIL_CHARS: Final = 200


class HttpTools:
    """Posts each call as JSON ``{name, arguments, call_id, job_name}``; the body of a 2xx answer is the result.

    The header ``Idempotency-Key`` is the same when the same call is made again after a crash.

    Status 404 means that there is no such tool; any other status, and a body that is not JSON, is a failure of the
    tool.
    """

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    def __repr__(self) -> str:
        return f"<HttpTools {self._url}>"

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    def knows(self, _name: str) -> None:
        """Return None: only the endpoint itself knows."""
        return

    async def run(self, use: ToolUse) -> object:
        """Ask the endpoint once."""
        body = {"name": use.name, "arguments": use.arguments, "call_id": use.call_id, "job_name": use.job_name}
        headers = {"Idempotency-Key": use.key} if use.key is not None else {}
        try:
            async with self._client.stream("POST", self._url, json=body, headers=headers) as response:
                content = await read_body(response, MAX_RESULT_BYTES)
        except UnreadableBody as error:
            raise ToolRunFailed(f"{self._url}: {error}") from error
        if response.status_code == HTTPStatus.NOT_FOUND:
            raise UnknownTool(use.name)
        if not response.is_success:
            excerpt = content[:DETAIL_CHARS].decode("utf-8", "replace")
            raise ToolRunFailed(f"{self._url} answered {response.status_code}: {excerpt}")
        return await decode_result(content)


def open_http_tools(url: str, headers: Mapping[str, str]) -> HttpTools:
    """Return the tools of an endpoint with their own connection pool, to be closed; callers bound each call."""
    return HttpTools(
        httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(trust_env=False, socket_options=LITTLE_AHEAD),
            headers={**UNPACKED, **headers},
            timeout=None,  # noqa: S113
            trust_env=False,
        ),
        url,
    )


@asynccontextmanager
async def http_tools(url: str, headers: Mapping[str, str]) -> AsyncIterator[HttpTools]:
    """Hold a connection pool to the endpoint for a block; every call is bounded by its caller."""
    tools = open_http_tools(url, headers)
    try:
        yield tools
    finally:
        await tools.close()

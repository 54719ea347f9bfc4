"""MCP over HTTP, bounded: the SDK bounds the events of a stream, but reads any other answer whole."""

from collections.abc import AsyncIterator, Mapping

import httpx2

from transport.bodies import LITTLE_AHEAD, UNPACKED
from workers.tools.results import MAX_RESULT_BYTES

EVENT_STREAM = "text/event-stream"


class BoundedTransport(httpx2.AsyncBaseTransport):
    """A transport that refuses packed answers and cuts off large ones."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"<BoundedTransport {self._inner!r}>"

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; the SDK bounds event streams itself."""
        answer = await self._inner.handle_async_request(request)
        coding = answer.headers.get("content-encoding", "").strip().lower()
        if coding not in {"", "identity"}:
            await answer.aclose()
            raise httpx2.DecodingError(
                f"the answer is compressed ({coding[:50]}), although no compression was requested"
            )
        if not answer.headers.get("content-type", "").lower().startswith(EVENT_STREAM):
            assert isinstance(answer.stream, httpx2.AsyncByteStream)  # noqa: S101 - every such transport gives one
            answer.stream = _Bounded(answer.stream)
        return answer

    async def aclose(self) -> None:
        """Close its connections."""
        await self._inner.aclose()


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = MAX_RESULT_BYTES
        async for piece in self._inner:
            left -= len(piece)
            if left < 0:
                raise httpx2.ReadError(f"an answer of more than {MAX_RESULT_BYTES} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


def open_client(headers: Mapping[str, str]) -> httpx2.AsyncClient:
    """Return a client for one server; its caller bounds the time."""
    return httpx2.AsyncClient(
        headers={**UNPACKED, **headers},
        timeout=None,
        transport=BoundedTransport(httpx2.AsyncHTTPTransport(socket_options=LITTLE_AHEAD)),
    )

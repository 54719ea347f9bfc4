"""The path of a token cut off after each of its layers; differences are the costs of single layers.

``bench/token_path.py --layers`` runs them in turn, each in its own process.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Final

import httptools

from transport.client import EngineClient
from transport.endpoint import Endpoint
from transport.request import ChatRequest, Message
from transport.sse import FrameDecoder
from transport.stream import ChatStream
from workers.requests.generation import Generation

BODY: Final = {"model": "timed", "messages": [{"role": "user", "content": "Go."}], "stream": True}
Take = Callable[[bytes], object]
Layer = Callable[[int, int], Coroutine[None, None, list[str] | None]]


class _Body:
    """Passes each piece of a body from httptools to ``take``."""

    def __init__(self, take: Take) -> None:
        self.on_body = take


class _Reader(asyncio.Protocol):
    """Gives all bytes of one answer to ``take``, until the connection ends."""

    def __init__(self, take: Take, ended: "asyncio.Future[None]") -> None:
        self._take = take
        self._ended = ended

    def data_received(self, data: bytes) -> None:
        """Take one read."""
        self._take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end."""
        self._ended.set_result(None)


def _nothing(_data: bytes) -> None:
    """Ignore data."""


def _http(take: Take) -> Take:
    parser: Take = httptools.HttpResponseParser(_Body(take)).feed_data
    return parser


async def _read(port: int, streams: int, take: Callable[[], Take]) -> None:
    loop, body = asyncio.get_running_loop(), json.dumps(BODY).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )

    async def one() -> None:
        ended: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.create_connection(lambda: _Reader(take(), ended), "127.0.0.1", port)
        transport.write(head + body)
        await ended

    await asyncio.gather(*(one() for _ in range(streams)))


async def reads(port: int, streams: int) -> None:
    """Wake up for data, and copy it out of the kernel."""
    await _read(port, streams, lambda: _nothing)


async def chunks(port: int, streams: int) -> None:
    """Also parse HTTP."""
    await _read(port, streams, lambda: _http(_nothing))


async def frames(port: int, streams: int) -> None:
    """Also cut the body into frames."""
    await _read(port, streams, lambda: _http(FrameDecoder().feed))


async def events(port: int, streams: int) -> None:
    """Also decode the JSON of each frame."""
    await _read(port, streams, lambda: _http(ChatStream().feed))


async def texts(port: int, streams: int) -> list[str]:
    """Also accumulate the text, as for a request without a watch."""
    client = EngineClient(Endpoint(port=port))
    request = ChatRequest(model="timed", messages=(Message(role="user", content="Go."),))
    generations = [Generation(time.monotonic) for _ in range(streams)]
    await asyncio.gather(*(client.stream(request, generation) for generation in generations))
    return [generation.text for generation in generations]


LAYERS: Final[dict[str, Layer]] = {
    "reads": reads,
    "+ chunks": chunks,
    "+ frames": frames,
    "+ events": events,
    "+ texts": texts,
}

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
import respx
from msgspec.structs import replace

from tests.harness.waiting import LIMIT_S
from transport.client import EngineClient
from transport.control import EngineControl
from transport.dialects.dialect import PLAIN
from transport.dialects.llama_server import LLAMA_SERVER
from transport.endpoint import Endpoint
from transport.errors import (
    ContextOverflow,
    EngineError,
    EngineOverloaded,
    EngineProtocolError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    FrameTooLarge,
    MalformedFrame,
    TruncatedStream,
    UnreadableFrame,
)
from transport.events import Event, Finished, TextDelta
from transport.request import ChatRequest, Message

REQUEST = ChatRequest(model="m", messages=(Message(role="user", content="Go."),))
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TEXT = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
END = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


class Recorder:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.touches = 0

    def begin_stream(self) -> None:
        self.touches += 0

    def touch(self) -> None:
        self.touches += 1

    def receive(self, event: Event) -> None:
        self.events.append(event)


@asynccontextmanager
async def engine_that_sends(
    *writes: bytes, reset: bool = False, hold: bool = False
) -> AsyncIterator[tuple[EngineClient, list[bytes]]]:
    """Play bytes on a real socket to the client that sends a request; then close, reset, or hold the connection."""
    requests: list[bytes] = []
    leave = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        requests.append(head + await reader.readexactly(length))
        for data in writes:
            writer.write(data)
            await writer.drain()
        if hold:
            await leave.wait()
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield EngineClient(Endpoint(port=server.sockets[0].getsockname()[1])), requests
        leave.set()


async def outcome_of(*writes: bytes, reset: bool = False) -> tuple[list[Event], EngineError | None]:
    recorder = Recorder()
    async with engine_that_sends(*writes, reset=reset) as (client, _):
        with anyio.fail_after(LIMIT_S):
            try:
                await client.stream(REQUEST, recorder)
            except EngineError as error:
                return recorder.events, error
    return recorder.events, None


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(SSE + b"\r\n" + TEXT + END, id="until the end of the connection"),
        pytest.param(SSE + b"Content-Length: %d\r\n\r\n" % len(TEXT + END) + TEXT + END, id="of a given length"),
        pytest.param(
            SSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(TEXT[:9], TEXT[9:], END) + b"0\r\n\r\n", id="chunked"
        ),
        pytest.param(SSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(TEXT, END), id="chunked, [DONE] is enough"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + SSE + b"\r\n" + TEXT + END, id="after an interim answer"),
    ],
)
async def test_a_stream_is_delivered_however_it_is_framed(wire: bytes) -> None:
    """Every framing of HTTP/1.1 gives the same events."""
    assert await outcome_of(wire) == ([TextDelta("hi"), Finished("stop")], None)


async def test_the_request_is_sent_whole_and_the_connection_is_not_kept() -> None:
    """llama-server closes kept-alive connections; one that is never kept can never fail a turn."""
    recorder = Recorder()
    async with engine_that_sends(SSE + b"\r\n" + END) as (client, requests):
        for _ in range(3):
            with anyio.fail_after(LIMIT_S):
                await client.stream(REQUEST, recorder)
    assert len(requests) == 3
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nConnection: close" in head
    assert b'"stream":true' in body


async def test_any_byte_of_the_body_is_a_sign_of_life() -> None:
    """Specification, "Streaming": comments are bytes and count as such, but they are no events."""
    recorder = Recorder()
    pings = SSE + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(b": ping\n\n", b": ping\n\n")
    async with engine_that_sends(pings) as (client, _):
        with anyio.fail_after(LIMIT_S), pytest.raises(TruncatedStream):
            await client.stream(REQUEST, recorder)
    assert recorder.touches > 0
    assert not recorder.events


def http(status: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), headers, body)


OVERFLOW = (
    b'{"error":{"code":400,"message":"request (422 tokens) exceeds the available context size (256 tokens)",'
    b'"type":"exceed_context_size_error","n_prompt_tokens":422,"n_ctx":256}}'
)


@pytest.mark.parametrize(
    ("wire", "kind", "text"),
    [
        pytest.param(http(400, OVERFLOW), ContextOverflow, "exceeds the available", id="the prompt is too long"),
        pytest.param(http(400, b'{"error":{"message":"bad"}}'), EngineRejected, "bad", id="a bad request"),
        pytest.param(http(503, b'{"error":{"message":"Loading model"}}'), EngineOverloaded, "Loading", id="loading"),
        pytest.param(http(429, b"", b"Retry-After: 7\r\n"), EngineOverloaded, "no body", id="too many"),
        pytest.param(http(500, b"<html>oops"), EngineRejected, "<html>oops", id="an error that is not JSON"),
        pytest.param(
            http(200, b"<html>", b"Content-Type: text/html\r\n"), UnreadableFrame, "text/html", id="HTML with 200"
        ),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", MalformedFrame, "not HTTP", id="another protocol"),
        pytest.param(SSE + b"\r\n" + TEXT, TruncatedStream, "before", id="the stream is cut off"),
        pytest.param(SSE + b"\r\n" + TEXT + b'data: {"ch', TruncatedStream, "middle", id="a frame is cut off"),
        pytest.param(SSE + b"\r\ndata: {]\n\n", UnreadableFrame, "{]", id="a bad frame"),
        pytest.param(SSE + b"\r\ndata: " + b"x" * (17 << 20), FrameTooLarge, "larger than", id="a frame over the cap"),
        pytest.param(
            SSE + b'\r\ndata: {"error":{"code":500,"message":"Compute error."}}\n\n',
            EngineRejected,
            "Compute",
            id="error in 200",
        ),
        pytest.param(
            b'HTTP/1.1 500 X\r\n\r\n{"error":{"message":"\xff"}}', EngineRejected, "500", id="an error that is no UTF-8"
        ),
        pytest.param(SSE + b'\r\ndata: {"a":"\xff"}', TruncatedStream, "before", id="a last frame that is no UTF-8"),
        pytest.param(b"", EngineUnreachable, "before an answer", id="closed without a word"),
    ],
)
async def test_each_failure_is_one_error(wire: bytes, kind: type[EngineError], text: str) -> None:
    """Whatever an engine does, the caller gets one error of the documented tree."""
    _, error = await outcome_of(wire)
    assert type(error) is kind
    assert text in str(error)
    if isinstance(error, EngineOverloaded) and error.status == 429:
        assert error.retry_after_s == 7


async def test_events_before_a_failure_stand() -> None:
    """Partial output is kept in every failure."""
    events, error = await outcome_of(SSE + b"\r\n" + TEXT, reset=True)
    assert (events, type(error)) == ([TextDelta("hi")], TruncatedStream)


async def test_an_engine_that_does_not_listen_is_unreachable(free_ports: Callable[[int], int]) -> None:
    """A refused connection means an engine that cannot be reached."""
    with pytest.raises(EngineUnreachable):
        await EngineClient(Endpoint(port=free_ports(1))).stream(REQUEST, Recorder())


async def test_a_cancel_closes_the_connection_to_an_engine() -> None:
    """Only a closed connection makes an engine stop."""
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(SSE + b"\r\n" + TEXT)
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    recorder = Recorder()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, anyio.create_task_group() as tasks:
        client = EngineClient(Endpoint(port=server.sockets[0].getsockname()[1]))
        with anyio.fail_after(LIMIT_S):
            tasks.start_soon(client.stream, REQUEST, recorder)
            while not recorder.events:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await gone.wait()


FOREIGN_ERRORS = [
    error
    for error in vars(httpx).values()
    if isinstance(error, type) and issubclass(error, httpx.TransportError) and not error.__subclasses__()
]


@respx.mock
async def test_a_probe_has_the_query_of_the_address() -> None:
    """Requests for answers have it too."""
    asked = respx.get(url="http://127.0.0.1:9/a/v1/models?api-version=2").respond(json={"data": []})
    await EngineClient(Endpoint.of_url("http://127.0.0.1:9/a/v1?api-version=2")).probe_ready()
    assert asked.called


@pytest.mark.parametrize("foreign", FOREIGN_ERRORS, ids=lambda error: error.__name__)
@respx.mock
async def test_every_foreign_error_of_a_probe_is_translated(foreign: type[httpx.TransportError]) -> None:
    """Errors are translated once, at the boundary: no error of httpx's comes through."""
    respx.get("http://127.0.0.1:9/v1/models").mock(side_effect=foreign("x"))
    expected = EngineTimeout if issubclass(foreign, httpx.TimeoutException) else EngineUnreachable
    with pytest.raises(expected) as caught:
        await EngineClient(Endpoint(port=9)).probe_ready()
    assert isinstance(caught.value.__cause__, foreign)


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (httpx.Response(200, json={"data": []}), None),
        (httpx.Response(503, json={"error": {}}), EngineRejected),
        (httpx.Response(200, text="<html>"), EngineProtocolError),
        (httpx.Response(200, json=[]), None),
    ],
    ids=["ready", "loading", "no JSON", "any JSON"],
)
@respx.mock
async def test_ready_means_200_with_json(response: httpx.Response, kind: type[EngineError] | None) -> None:
    """Specification, "Readiness probe": readiness is GET /v1/models, 200, and JSON."""
    respx.get("http://127.0.0.1:9/v1/models").mock(return_value=response)
    client = EngineClient(Endpoint(port=9))
    if kind is None:
        await client.probe_ready()
    else:
        with pytest.raises(kind):
            await client.probe_ready()


async def test_a_connection_lost_while_it_is_made_is_the_engines_end() -> None:
    """The library under httpx asks a socket for its peer, which is gone; this is no network error."""
    lost = AttributeError("'NoneType' object has no attribute 'getpeername'")
    endpoint = Endpoint(host="127.0.0.1", port=9)
    with respx.mock:
        respx.route().mock(side_effect=lost)
        with pytest.raises(EngineUnreachable):
            await EngineClient(endpoint).probe_ready()
        with pytest.raises(EngineUnreachable):
            await EngineControl(endpoint).resume()


JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"


async def test_a_prompt_is_counted_by_the_body_that_will_be_sent() -> None:
    """Tools and parameters may become part of a prompt."""
    answer = b'{"input_tokens": 42}'
    write = JSON + f"Content-Length: {len(answer)}\r\n\r\n".encode() + answer
    request = replace(REQUEST, params={"max_tokens": 9}, tools=({"type": "function", "function": {"name": "look"}},))
    async with engine_that_sends(write) as (plain, requests):
        client = EngineClient(plain.endpoint, LLAMA_SERVER)
        assert await client.count_prompt(LLAMA_SERVER.encode(request)) == 42
    head, _, body = requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions/input_tokens HTTP/1.1")
    assert b"content-type: application/json" in head.lower()
    assert body == LLAMA_SERVER.encode(request)


async def test_an_engine_that_cannot_count_is_not_asked() -> None:
    """The test's address has no listener."""
    assert await EngineClient(Endpoint(port=1), PLAIN).count_prompt(LLAMA_SERVER.encode(REQUEST)) is None


async def test_a_failed_count_is_an_error_of_the_engine() -> None:
    """A failed connection is one too."""
    async with engine_that_sends(reset=True) as (plain, _):
        with pytest.raises(EngineError):
            await EngineClient(plain.endpoint, LLAMA_SERVER).count_prompt(LLAMA_SERVER.encode(REQUEST))

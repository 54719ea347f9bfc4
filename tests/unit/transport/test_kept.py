"""Connections left open after an answer, on a network in memory: which are kept, and how a broken one is handled."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import pytest
import trustme

from tests.harness.ports import find_ports
from tests.harness.virtual import pass_time
from tests.harness.virtual_loop import VirtualLoop
from tests.harness.waiting import LIMIT_S, wait_until
from transport import kept
from transport.client import EngineClient
from transport.dialects.dialect import PLAIN, Dialect
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.vllm import VLLM
from transport.endpoint import Endpoint
from transport.errors import EngineError, EngineUnreachable
from transport.kept import IDLE_S
from transport.request import ChatRequest, Message
from workers.requests.generation import Generation

PORT = 20_000
BODY = b'{"choices": [{"message": {"content": "yes"}}]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n" + BODY
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3c\r\n" + b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n' + b"\r\n"
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


def answer(headers: bytes = b"") -> bytes:
    return ANSWER % (len(BODY), headers)


@dataclass
class Engine:
    """Answers the n-th request with the n-th of ``answers``, then with the last; None closes without a byte."""

    answers: list[bytes | None]
    connections: int = 0
    requests: int = 0
    heads: list[bytes] = field(default_factory=list)
    gone: int = 0
    idle_s: float | None = None  # after which it closes
    silent_s: float = 0.0  # before it closes without a byte

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self.idle_s)
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                self.heads.append(head)
                told = self.answers[min(self.requests, len(self.answers) - 1)]
                self.requests += 1
                if told is None:
                    await pass_time(self.silent_s)
                    break
                writer.write(told)
        except (asyncio.IncompleteReadError, TimeoutError):
            pass
        self.gone += 1
        writer.close()


class Passed:
    def __init__(self) -> None:
        self.whole: list[bytes] = []

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        """Ignore the frames."""

    def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
        assert (status, content_type) == (200, "application/json")
        self.whole.append(body)


async def ask(client: EngineClient, passed: Passed | None = None) -> None:
    await client.relay("/v1/embeddings", b"{}", Generation(time.monotonic), passed or Passed())


def talk(engine: Engine, scenario: Callable[[EngineClient], Awaitable[None]], dialect: Dialect = PLAIN) -> None:
    """Run a scenario against an engine in virtual time."""
    loop = VirtualLoop(Random(1))  # noqa: S311
    loop.network.listen(PORT, engine.serve)

    async def run() -> None:
        await scenario(EngineClient(Endpoint(port=PORT), dialect))
        await pass_time(3 * IDLE_S)  # all are closed
        assert engine.gone == engine.connections

    anyio.run(run, backend_options={"loop_factory": lambda: loop})


async def ask_thrice(client: EngineClient) -> None:
    passed = Passed()
    for _ in range(3):
        await ask(client, passed)
    assert passed.whole == [BODY] * 3


@pytest.mark.parametrize("dialect", [PLAIN, VLLM], ids=lambda each: each.name)
def test_successive_requests_share_one_connection(dialect: Dialect) -> None:
    """A connection for each costs a fifth of a short request's CPU time (``bench/relay.py``)."""
    engine = Engine([answer()])
    talk(engine, ask_thrice, dialect)
    assert (engine.connections, engine.requests) == (1, 3)
    assert all(b"\r\nConnection: keep-alive\r\n" in head for head in engine.heads)


def test_a_client_that_stops_closes_its_connections_at_once() -> None:
    """Uvloop refuses to close a loop with an open one: a program that stops its worker would end with an error."""
    engine = Engine([answer()])

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        assert engine.gone == 0
        client.close_idle()
        await pass_time(IDLE_S / 10)
        assert engine.gone == 1

    talk(engine, scenario)


def test_a_complete_stream_leaves_its_connection_open() -> None:
    """The stream ends with the last chunk, which comes with the last event."""
    engine = Engine([STREAM])

    async def scenario(client: EngineClient) -> None:
        for _ in range(3):
            await ask(client)

    talk(engine, scenario)
    assert (engine.connections, engine.requests) == (1, 3)


@pytest.mark.parametrize(
    ("params", "is_watched", "connections"),
    [({"max_tokens": 8}, False, 1), ({}, True, 1), ({}, False, 3), ({"max_tokens": 500}, False, 3)],
)
def test_turns_share_a_connection_unless_their_reads_are_gathered(
    params: Mapping[str, object], connections: int, *, is_watched: bool
) -> None:
    """That is, short turns and watched ones: the end of a kept connection wakes no reader of gathered bytes."""
    engine = Engine([STREAM])

    async def scenario(client: EngineClient) -> None:
        message = Message(role="user", content="Go.")
        for _ in range(3):
            asked = ChatRequest(model="m", messages=(message,), params=params, is_watched=is_watched)
            await client.stream(asked, Generation(time.monotonic))

    talk(engine, scenario)
    assert (engine.connections, engine.requests) == (connections, 3)


@pytest.mark.parametrize(
    ("headers", "dialect"),
    [
        pytest.param(b"Connection: close\r\n", PLAIN, id="closes"),
        pytest.param(b"Server: llama.cpp\r\n", PLAIN, id="llama.cpp that is attached"),
        pytest.param(b"", LLAMA_SERVER, id="llama.cpp of ours"),
    ],
)
def test_a_connection_is_kept_only_if_the_engine_allows_it(headers: bytes, dialect: Dialect) -> None:
    """llama.cpp's server has few threads and one waits on each connection: probes would find none."""
    engine = Engine([answer(headers)])
    talk(engine, ask_thrice, dialect)
    assert engine.connections == 3


def test_a_request_on_a_closed_connection_is_sent_once_more() -> None:
    """The engine closes an idle connection while we send: that is no attempt, and no failure."""
    engine = Engine([answer(), None, answer()])
    talk(engine, ask_thrice)
    assert (engine.connections, engine.requests) == (2, 4)


def test_a_request_is_not_sent_a_third_time() -> None:
    """An engine that breaks fresh connections too is broken."""
    engine = Engine([answer(), None, None])

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        with pytest.raises(EngineUnreachable, match="it was sent twice"):
            await ask(client)
        with pytest.raises(EngineUnreachable, match=r"answer began$"):
            await ask(client)

    talk(engine, scenario)
    assert (engine.connections, engine.requests) == (3, 4)


def test_a_request_whose_answer_has_begun_is_not_sent_again() -> None:
    """The engine has begun to work on it."""
    engine = Engine([answer(), b"HTTP/1.1 200 OK\r\n"])

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        with anyio.move_on_after(5):
            await ask(client)
        assert engine.requests == 2

    talk(engine, scenario)
    cut = Engine([answer(), b"HTTP/1.1 500 No\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", answer()])

    async def refused(client: EngineClient) -> None:
        await ask(client)
        with pytest.raises(EngineError):
            await ask(client)

    talk(cut, refused)
    assert cut.requests == 2


def test_a_request_whose_engine_fails_during_it_is_not_sent_again() -> None:
    """A closed connection shows at once; one that breaks after a while is the engine's failure."""
    engine = Engine([answer(), None, answer()], silent_s=2.0)

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        with pytest.raises(EngineUnreachable):
            await ask(client)

    talk(engine, scenario)
    assert engine.requests == 2


async def test_a_connection_over_tls_is_kept_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves a handshake of two milliseconds; the test runs on uvloop, as the service does."""
    authority, engine = trustme.CA(), Engine([answer()])
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    monkeypatch.setattr(kept, "IDLE_S", 0.2)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    port = find_ports(1)
    with anyio.fail_after(LIMIT_S):
        async with await asyncio.start_server(engine.serve, "localhost", port, ssl=context):
            await ask_thrice(EngineClient(Endpoint.of_url(f"https://localhost:{port}", {}), PLAIN))
            assert (engine.connections, engine.requests) == (1, 3)
            await wait_until(lambda: engine.gone == 1, "it is closed when nobody takes it")


def test_a_cancel_closes_a_kept_connection() -> None:
    """This makes an engine stop."""
    engine = Engine([answer(), b"HTTP/1.1 200 OK\r\n"])

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        with anyio.move_on_after(1) as scope:
            await ask(client)
        assert scope.cancelled_caught
        await pass_time(1)
        assert engine.gone == 1

    talk(engine, scenario)


def test_an_answer_with_extra_bytes_ends_its_connection() -> None:
    """Extra bytes would be read as the next answer."""
    engine = Engine([answer() + answer()])
    talk(engine, ask_thrice)
    assert engine.requests == 3
    assert engine.connections == 3


def test_idle_connections_are_closed_by_us_or_by_the_engine() -> None:
    """We close them after two seconds, and notice an engine that is quicker."""
    engine = Engine([answer()])

    async def scenario(client: EngineClient) -> None:
        await ask(client)
        await pass_time(IDLE_S / 2)
        assert engine.gone == 0
        await pass_time(IDLE_S)
        assert engine.gone == 1
        await ask(client)
        assert engine.connections == 2

    talk(engine, scenario)
    quick = Engine([answer()], idle_s=0.5)

    async def heard(client: EngineClient) -> None:
        await ask(client)
        await pass_time(1)
        assert quick.gone == 1
        await ask(client)

    talk(quick, heard)
    assert (quick.connections, quick.requests) == (2, 2)

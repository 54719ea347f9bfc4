import asyncio
import select
import socket
from collections.abc import Iterator

import anyio
import pytest

from tests.harness.waiting import LIMIT_S, wait_until
from transport.client import EngineClient
from transport.endpoint import Endpoint
from transport.events import Event
from transport.exchange import Exchange
from transport.gathering import GATHERED_BYTES, READS_A_LOOK, Gathering, Reads
from transport.request import ChatRequest

FRAME = b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
STOP = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
PROGRESS = b'data: {"prompt_progress":{"total":9,"processed":3}}\n\n'
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
CLOSES = SSE + b"Connection: close\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the two ends of a TCP connection, the reader's and the engine's."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with far:
            yield near, far


def wakes(connection: socket.socket) -> bool:
    """Return whether there is data to read; on loopback sent data has arrived."""
    return bool(select.select([connection], [], [], 0)[0])


def gathered(connection: socket.socket) -> Reads:
    """Return gathered reads."""
    reads = Reads(connection)
    reads.count = READS_A_LOOK
    reads.adapt()
    return reads


class TestReads:
    def test_a_few_tokens_wake_no_reader_and_many_do(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """The kernel delays the wake-up until there is enough data."""
        near, far = pair
        gathered(near)
        far.sendall(bytes(GATHERED_BYTES - 1))
        assert not wakes(near)
        far.sendall(b"x")
        assert wakes(near)

    def test_the_end_wakes_at_once(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A slot is free when its answer has ended."""
        near, far = pair
        gathered(near)
        far.sendall(b"x")
        far.shutdown(socket.SHUT_WR)
        assert wakes(near)

    def test_a_reset_wakes_at_once(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """A dead engine is noticed at once."""
        near, far = pair
        gathered(near)
        near.sendall(b"unread, so that the engine's end is a reset")
        assert wakes(far)
        far.close()
        assert wakes(near)

    def test_slow_data_is_read_at_the_next_look(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """No byte waits for bytes that may never come."""
        near, far = pair
        reads = gathered(near)
        far.sendall(b"x")
        assert not wakes(near)
        reads.adapt()
        assert wakes(near)
        reads.count = 1
        reads.adapt()
        assert wakes(near)  # a read a look is too few to be gathered

    def test_reads_that_go_on_stay_gathered(self, pair: tuple[socket.socket, socket.socket]) -> None:
        """One read since the last look is enough if it brought many tokens."""
        near, far = pair
        reads = gathered(near)
        reads.count = 1
        reads.adapt()
        far.sendall(b"x")
        assert not wakes(near)

    def test_a_broken_connection_does_not_disturb_others(self) -> None:
        """Its end is reported in another way."""
        connection = socket.socket()
        reads = Reads(connection)
        connection.close()
        reads.count = READS_A_LOOK
        reads.adapt()


class Recorder:
    """A receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def begin_stream(self) -> None:
        self.events.clear()

    def touch(self) -> None:
        assert self.events is not None

    def receive(self, event: Event) -> None:
        self.events.append(event)


class Reader:
    """One unwatched answer on a real connection."""

    def __init__(self) -> None:
        self.gathering = Gathering()
        self.recorder = Recorder()
        finished = asyncio.get_running_loop().create_future()
        self.exchange = Exchange(b"POST", self.recorder, finished, gathering=self.gathering)
        self.transport: asyncio.WriteTransport | None = None

    async def connect(self, server: asyncio.Server) -> None:
        host, port = server.sockets[0].getsockname()[:2]
        loop = asyncio.get_running_loop()
        self.transport, _ = await loop.create_connection(lambda: self.exchange, host, port)

    async def has_events(self, count: int) -> None:
        await wait_until(lambda: len(self.recorder.events) >= count, f"{count} events have come")

    def wakes_at(self) -> int:
        assert self.transport is not None
        size: int = self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        return size

    def leave(self) -> None:
        assert self.transport is not None
        self.exchange.finished.cancel()
        self.exchange.stop_gathering()
        assert not len(self.gathering)
        self.transport.abort()


def chunk(frame: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(frame), frame)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        pytest.param(CLOSES + chunk(FRAME), 1, id="of an answer that has begun"),
        pytest.param(CLOSES + chunk(PROGRESS), 0, id="not while its prompt is read"),
        pytest.param(
            SSE + b"\r\n" + chunk(FRAME), 0, id="not where the end of an answer is not that of its connection"
        ),
    ],
)
async def test_reads_are_gathered_after_the_first_token(wire: bytes, expected: int) -> None:
    """The time of the first token has to be exact, and the end of an answer immediate."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire)
        await reader.read()  # until the other end leaves
        writer.close()

    reader = Reader()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await reader.connect(server)
        await reader.has_events(1)
        assert len(reader.gathering) == expected
        reader.leave()


async def test_every_token_is_read_soon_and_the_end_at_once() -> None:
    """A fast answer that becomes slow is read within two looks; its end is read at once."""
    reader, is_to_end = Reader(), asyncio.Event()
    many = READS_A_LOOK + 2

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CLOSES)
        for count in range(1, many + 1):
            writer.write(chunk(FRAME))
            await reader.has_events(count)  # each is a read of its own
        await wait_until(lambda: reader.wakes_at() == GATHERED_BYTES, "reads are gathered")
        writer.write(chunk(FRAME))
        await is_to_end.wait()
        writer.write(chunk(FRAME) + chunk(STOP + b"data: [DONE]\n\n"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await reader.connect(server)
        await reader.has_events(many + 1)
        assert reader.wakes_at() == 1
        is_to_end.set()
        with anyio.fail_after(LIMIT_S):
            await reader.exchange.finished
        assert len(reader.recorder.events) == many + 3  # and the end
        reader.leave()


@pytest.mark.parametrize(("is_watched", "expected"), [(True, False), (False, True)])
async def test_only_unwatched_answers_are_gathered(*, is_watched: bool, expected: bool) -> None:
    """A follower sees each token when it arrives."""
    held: list[bool] = []
    seen: list[Event] = []

    class Watcher(Recorder):
        def receive(self, event: Event) -> None:
            seen.append(event)

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CLOSES + chunk(FRAME))
        await wait_until(lambda: bool(seen), "the first token has come")
        held.append("1 connections" in repr(client))
        writer.write(chunk(STOP + b"data: [DONE]\n\n"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = EngineClient(Endpoint(port=server.sockets[0].getsockname()[1]))
        with anyio.fail_after(LIMIT_S):
            await client.stream(ChatRequest(model="m", messages=(), is_watched=is_watched), Watcher())
        assert held == [expected]
        assert "0 connections" in repr(client)

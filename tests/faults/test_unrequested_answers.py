"""A server that answers twice on a connection: no request gets the answer to another one."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio

from tests.harness.waiting import LIMIT_S, wait_until
from transport.client import EngineClient
from transport.dialects.dialect import PLAIN
from transport.endpoint import Endpoint
from workers.requests.generation import Generation


def _answer(text: str) -> bytes:
    body = b'{"choices": [{"message": {"content": "%s"}}]}' % text.encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class TwiceServer:
    """Answers each request with its body's word and, if configured to, once more with SECOND after it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.connections = 0
        self._open: set[socket.socket] = set()
        self.wants_second = threading.Event()
        self.has_sent = threading.Event()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(connection)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def hang_up(self) -> None:
        for connection in list(self._open):
            with suppress(OSError):  # the other side may have closed it
                connection.shutdown(socket.SHUT_WR)

    @property
    def is_alone(self) -> bool:
        """Return whether the other side has closed every connection too."""
        return not self._open

    def _talk(self, connection: socket.socket) -> None:
        try:
            self._answer_all(connection)
        finally:
            self._open.discard(connection)

    def _answer_all(self, connection: socket.socket) -> None:
        is_first = self.connections == 1
        with connection, connection.makefile("rb") as lines, suppress(ConnectionError):
            while lines.peek(1):
                head = list(iter(lines.readline, b"\r\n"))
                size = next(int(line.split()[1]) for line in head if line.lower().startswith(b"content-length"))
                connection.sendall(_answer(lines.read(size).decode().strip('"')))
                if is_first and self.wants_second.wait(LIMIT_S):
                    is_first = False
                    connection.sendall(_answer("SECOND"))
                    self.has_sent.set()


@contextmanager
def answering_twice() -> Iterator[TwiceServer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = TwiceServer(listener)
        threading.Thread(target=server.serve, daemon=True).start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)


class Passed:
    """Reads an answer; the second one is already on its connection when the first is read to its end."""

    def __init__(self, server: TwiceServer) -> None:
        self._server = server
        self.bodies: list[bytes] = []

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        raise AssertionError((content_type, frames))

    def pass_whole(self, _status: int, _content_type: str, body: bytes) -> None:
        self.bodies.append(body)
        self._server.wants_second.set()
        assert self._server.has_sent.wait(LIMIT_S)


async def test_a_connection_with_unread_bytes_is_not_used_again() -> None:
    """They must not answer a later request, perhaps of another key."""
    with answering_twice() as server, anyio.fail_after(2 * LIMIT_S):
        client, passed = EngineClient(Endpoint(port=server.port), PLAIN), Passed(server)
        try:
            for word in (b'"one"', b'"two"', b'"three"'):
                await client.relay("/v1/embeddings", word, Generation(time.monotonic), passed)
        finally:
            server.hang_up()
            await wait_until(lambda: server.is_alone, "every connection is closed")
    assert [body.decode().split('"')[-2] for body in passed.bodies] == ["one", "two", "three"]
    assert server.connections == 2

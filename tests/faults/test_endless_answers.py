"""Answers of servers that never end: memory holds no more of one than its reader needs."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.behaviour.test_forks_bounds import MIB, forget_peak, memory
from tests.harness.service import Document, serving
from tests.harness.waiting import wait_for

PROBES = 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODIES = {
    "length": (HEAD + b"Content-Length: 4000000000\r\n\r\n", b"x" * MIB),
    "one chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3fffffff\r\n", b"x" * MIB),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"100000\r\n" + b"x" * MIB + b"\r\n"),
    "headers": (HEAD, b"X-More: " + b"y" * 60_000 + b"\r\n"),
}


class Endless:
    """Answers each request with a beginning, and then with pieces as long as they are read."""

    def __init__(self, begin: bytes, piece: bytes) -> None:
        self.answered = 0
        self._begin, self._piece = begin, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listener.accept()
                with closing(connection), suppress(OSError):
                    connection.settimeout(5.0)
                    connection.recv(65536)
                    self.answered += 1
                    connection.sendall(self._begin)
                    while True:
                        connection.sendall(self._piece)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture(params=BODIES)
def endless(request: pytest.FixtureRequest) -> Iterator[Endless]:
    server = Endless(*BODIES[request.param])
    yield server
    server.close()


@pytest.mark.system
def test_probes_of_a_server_keep_little_of_its_answers(
    tmp_path: Path, free_ports: Callable[[int], int], endless: Endless
) -> None:
    """However much it sends before it notices the close."""
    models: Document = {"m": {"engine": "attached", "url": f"http://127.0.0.1:{endless.port}"}}
    with serving(tmp_path, free_ports(1), models, ready=False) as service:
        wait_for(lambda: endless.answered > 1, "it is asked")
        before = memory(service, "VmRSS")
        forget_peak(service)
        wait_for(lambda: endless.answered > PROBES, "it is asked again and again", 60.0)
        assert memory(service, "VmHWM") - before < 24 * MIB
        assert service.get("/v1/workers")["workers"][0]["state"] == "starting"

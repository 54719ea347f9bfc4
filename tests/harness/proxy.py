"""A proxy of TCP that cuts connections in the middle of an answer, as networks and balancers do."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK = 1 << 12
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closed at once, so that the other side sees a reset


class CuttingProxy:
    """Forwards bytes; ``cuts`` gives for each connection, in order, after how many bytes of answers it ends.

    Connections after the last of them stay open. ``carried`` counts connections.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.cuts: list[int] = []
        self.carried = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        self._run(self._accept)

    def cut_all(self) -> None:
        """End all present connections; new ones are forwarded."""
        for each in self._open:
            _end(each)

    def close(self) -> None:
        """End all connections, and the threads that carried them."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            self.carried += 1
            left = self.cuts.pop(0) if self.cuts else None
            try:
                theirs = socket.create_connection(self._target)
            except OSError:  # no listener: the caller gets the kernel's error
                _end(ours)
                continue
            self._open += [ours, theirs]
            self._run(_pump, ours, theirs, None)
            self._run(_pump, theirs, ours, left)

    def _run(self, function: object, *arguments: object) -> None:
        assert callable(function)
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


def _pump(source: socket.socket, target: socket.socket, left: int | None) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            if left is not None:
                data, left = data[:left], left - len(data)
            target.sendall(data)
            if left is not None and left <= 0:
                break
    _end(source)
    _end(target)


def _end(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def cutting(port: int) -> Iterator[CuttingProxy]:
    """Reach a service over a proxy for a block."""
    proxy = CuttingProxy(("127.0.0.1", port))
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()

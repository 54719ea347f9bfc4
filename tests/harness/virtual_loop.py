"""An asyncio loop with virtual time: hours pass in milliseconds, connections are in memory, threads alternate with it.

One seed draws all events on it, so the same seed gives the same run.
"""

import asyncio
import errno
import itertools
import queue
import selectors
import socket
import threading
from collections.abc import Awaitable, Callable
from contextvars import Context
from random import Random
from typing import Any

LEAST_S = 1e-9  # between two pieces of one direction: events of one moment have no order
ON_THE_WAY_S = 0.0005  # at most, of one piece
Held = dict[Any, None]  # in the order in which they came: a set's would be that of their addresses
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Stuck(Exception):
    """No event is left, and a task still waits."""


class VirtualSelector(selectors.SelectSelector):
    """Finds no file ever ready; where the loop would wait, its time advances."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; ``network`` is where its connections lead."""

    def __init__(self, chance: Random) -> None:
        self._clock = VirtualSelector()
        super().__init__(self._clock)
        self.network = Network(self, chance)

    def time(self) -> float:
        return self._clock.now

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., object],
        *args: Any,  # noqa: ANN401
        context: Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # the caller has the loop's turn

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        _host: Any = None,  # noqa: ANN401
        port: Any = None,  # noqa: ANN401
        **_: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        return await self.network.connect(protocol_factory, int(port))


class Network:
    """Servers by their ports."""

    def __init__(self, loop: VirtualLoop, chance: Random) -> None:
        self.loop = loop
        self.chance = chance
        self.servers: dict[int, tuple[Handler, Held]] = {}

    def listen(self, port: int, handler: Handler) -> Held:
        """Serve connections at a port; return all tasks and ends of the server."""
        held: Held = {}
        self.servers[port] = handler, held
        return held

    async def connect(self, factory: Callable[[], Any], port: int) -> tuple[asyncio.Transport, Any]:
        arrived = self.loop.create_future()
        timer = self.loop.call_later(self.chance.uniform(0, ON_THE_WAY_S), arrived.set_result, None)
        try:
            await arrived
        finally:
            timer.cancel()
        if port not in self.servers:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        handler, held = self.servers[port]
        reader = asyncio.StreamReader(loop=self.loop)
        theirs = asyncio.StreamReaderProtocol(reader, loop=self.loop)
        ours = factory()
        client, server = MemoryTransport(self, ours), MemoryTransport(self, theirs)
        client.peer, server.peer = server, client
        held[server] = None
        theirs.connection_made(server)
        ours.connection_made(client)
        task = self.loop.create_task(_serve(handler, reader, asyncio.StreamWriter(server, theirs, reader, self.loop)))
        held[task] = None
        task.add_done_callback(lambda done: held.pop(done, None))
        return client, ours


async def _serve(handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await handler(reader, writer)
    except ConnectionError:
        writer.transport.abort()


class _NoSocket:
    """Accepts options that have no effect here."""

    def setsockopt(self, *_: object) -> None:
        """Set nothing."""

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    getsockname = getpeername
    family, type, proto = socket.AF_INET, socket.SOCK_STREAM, 0


class MemoryTransport(asyncio.Transport):
    """One end of a connection: bytes written at one end reach the other in order, a little later."""

    peer: "MemoryTransport"

    def __init__(self, network: Network, protocol: Any) -> None:  # noqa: ANN401
        super().__init__({"socket": _NoSocket(), "peername": ("127.0.0.1", 0), "sockname": ("127.0.0.1", 0)})
        self._network = network
        self._protocol = protocol
        self._is_closing = self._is_lost = False
        self._last = 0.0  # when the last piece of ours arrives
        self._held: list[bytes | None] | None = None  # what has come while nothing is read

    def _send(self, what: Callable[[], None]) -> None:
        loop = self._network.loop
        self._last = max(self._last + LEAST_S, loop.time() + self._network.chance.uniform(0, ON_THE_WAY_S))
        loop.call_at(self._last, what)

    def write(self, data: Any) -> None:  # noqa: ANN401
        if not self._is_closing:
            piece = bytes(data)
            self._send(lambda: self.peer._take(piece))

    def writelines(self, list_of_data: Any) -> None:  # noqa: ANN401
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._send(lambda: self.peer._take(None))

    def can_write_eof(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Buffer nothing: all bytes are sent at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: Any) -> None:  # noqa: ANN401
        self._protocol = protocol

    def get_protocol(self) -> Any:  # noqa: ANN401
        return self._protocol

    def is_reading(self) -> bool:
        return self._held is None

    def pause_reading(self) -> None:
        if self._held is None:
            self._held = []

    def resume_reading(self) -> None:
        held, self._held = self._held, None
        for piece in held or ():
            self._network.loop.call_soon(self._take, piece)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._end(None)

    def abort(self) -> None:
        self._end(None)

    def reset(self) -> None:
        """Break, as a connection does when the other end's process has died."""
        self._end(ConnectionResetError(errno.ECONNRESET, "the process is gone"))

    def _end(self, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._network.loop.call_soon(self._lose, error)
            self._send(lambda: self.peer._take(None) if error is None else self.peer._lose(error))

    def _take(self, piece: bytes | None) -> None:
        if self._is_lost or self._is_closing:
            return
        if self._held is not None:
            self._held.append(piece)
        elif piece is not None:
            self._protocol.data_received(piece)
        elif not self._protocol.eof_received():
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._protocol.connection_lost(error)


class TakingTurns:
    """Threads of a program that run one at a time, and never beside the loop; it replaces ``threading`` and ``queue``.

    A thread runs until it waits. Then the loop runs, and the thread again when its condition holds, after as long as
    ``draw_delay`` says.
    """

    Empty = queue.Empty

    def __init__(self, loop: VirtualLoop, draw_delay: Callable[[], float]) -> None:
        self.loop = loop
        self.draw_delay = draw_delay
        self._of_loop = threading.Semaphore(0)
        self.running: Companion | None = None

    def give(self, thread: "Companion") -> None:
        """Let a thread run until it waits or ends; in the loop's thread."""
        if not thread.is_over:
            self.running = thread
            thread.turn.release()
            self._of_loop.acquire()
            self.running = None

    def give_back(self) -> None:
        """Let the loop go on; in a thread that ends, or is about to wait."""
        self._of_loop.release()

    def Thread(self, target: Callable[[], None], name: str) -> "Companion":  # noqa: N802 - threading's word
        return Companion(self, target, name)

    def Event(self) -> "Flag":  # noqa: N802
        return Flag(self)

    def SimpleQueue(self) -> "Line":  # noqa: N802
        return Line(self)

    def __class_getitem__(cls, _: object) -> type["TakingTurns"]:
        return cls


class Companion:
    """A thread."""

    def __init__(self, turns: TakingTurns, target: Callable[[], None], name: str) -> None:
        self._turns = turns
        self._target = target
        self.turn = threading.Semaphore(0)
        self.is_over = False
        self._wait = 0
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.turn.acquire()
        try:
            self._target()
        finally:
            self.is_over = True
            self._turns.give_back()

    def start(self) -> None:
        self._thread.start()
        self._turns.give(self)

    def join(self) -> None:
        """Let it run to its end, whatever it waits for."""
        while not self.is_over:
            self._turns.give(self)
        self._thread.join()

    def wait(self, after_s: float | None) -> None:
        """Pause until ``wake`` or this many seconds later; called in the thread itself."""
        self._wait = number = next(self._numbers)
        if after_s is not None:
            self._turns.loop.call_later(after_s, self.wake, number)
        self._turns.give_back()
        self.turn.acquire()
        self._wait = 0

    @property
    def waits(self) -> int:
        """The number of its present wait, 0 outside one."""
        return self._wait

    def wake(self, number: int) -> None:
        """End a wait, unless it is over."""
        if number and self._wait == number:
            self._turns.give(self)


class Line:
    """A ``queue.SimpleQueue``."""

    def __init__(self, turns: TakingTurns) -> None:
        self._turns = turns
        self._items: list[Any] = []
        self._reader: Companion | None = None

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._reader is not None and self._turns.running is None:
            self._turns.loop.call_later(self._turns.draw_delay(), self._reader.wake, self._reader.waits)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ANN401
        reader = self._reader = self._turns.running
        assert reader is not None, "the loop must never wait for a queue"
        while not self._items:
            reader.wait(timeout)
            if timeout is not None:
                break
        self._reader = None
        return self.get_nowait()

    def get_nowait(self) -> Any:  # noqa: ANN401
        if not self._items:
            raise queue.Empty
        return self._items.pop(0)

    def qsize(self) -> int:
        return len(self._items)


class Flag:
    """A ``threading.Event`` on which one thread waits."""

    def __init__(self, turns: TakingTurns) -> None:
        self._turns = turns
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True  # a waiting thread is run by ``join``

    def wait(self, timeout: float) -> bool:
        if not self._is_set and self._turns.running is not None:
            self._turns.running.wait(timeout)
        return self._is_set

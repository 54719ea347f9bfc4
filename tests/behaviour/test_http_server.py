"""A paused server accepts nothing and refuses nothing, and continues if the pause ends."""

import socket
from collections.abc import Callable
from contextlib import closing
from functools import partial

import anyio
import anyio.to_thread
from fastapi import FastAPI

from service.api.door.http_server import Accepted, HttpServer, server_config
from service.serve import listen
from tests.harness.waiting import LIMIT_S, wait_until

ASKED = b"GET /now HTTP/1.1\r\nHost: x\r\n\r\n"


def application(gate: anyio.Event) -> FastAPI:
    app = FastAPI()

    @app.get("/now")
    async def now() -> str:
        return "now"

    @app.get("/later")
    async def later() -> str:
        await gate.wait()
        return "later"

    return app


def asking(port: int, request: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
    connection.sendall(request)
    return connection


async def answer(connection: socket.socket, *, within_s: float = LIMIT_S) -> bytes:
    connection.settimeout(within_s)
    try:
        return await anyio.to_thread.run_sync(partial(connection.recv, 4096))
    except TimeoutError:
        return b""


async def test_a_pause_refuses_no_client_and_can_be_ended(free_ports: Callable[[int], int]) -> None:
    """Running requests are answered first; new ones wait, and are answered after the pause."""
    port, gate = free_ports(1), anyio.Event()
    with listen("127.0.0.1", port) as listener:
        server = HttpServer(server_config(application(gate), 100), listener)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run_until_told)
            with closing(asking(port, ASKED)) as kept, closing(asking(port, ASKED.replace(b"now", b"later"))) as busy:
                assert b"200 OK" in await answer(kept)
                await server.wait_answered(0.05)
                with closing(asking(port, ASKED)) as meanwhile:
                    assert b"200 OK" in await answer(meanwhile)
                tasks.start_soon(server.quiesce, LIMIT_S)
                await wait_until(lambda: len(server.resting()) == 1, "one of two connections rests")
                gate.set()
                assert b"later" in await answer(busy)
                await wait_until(lambda: len(server.resting()) == 2, "both do")
                kept.sendall(ASKED)
                with closing(asking(port, ASKED)) as fresh:  # it is not refused
                    assert await answer(kept, within_s=0.1) == b""
                    assert await answer(fresh, within_s=0.1) == b""
                    await server.resume()
                    assert b"200 OK" in await answer(kept)
                    assert b"200 OK" in await answer(fresh)
            server.should_exit = True


async def test_another_server_takes_over_connections(free_ports: Callable[[int], int]) -> None:
    """Their clients notice nothing; a client that left meanwhile causes no error."""
    port = free_ports(1)
    with listen("127.0.0.1", port) as listener:
        taken, theirs = listener.accept, asking(port)
        listener.setblocking(True)
        ours, _ = taken()
        gone = asking(port)
        lost, _ = listener.accept()
        gone.close()
        listener.setblocking(False)
        accepted = [Accepted(ours.detach()), Accepted(lost.detach())]
        server = HttpServer(server_config(application(anyio.Event()), 100), listener, accepted)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run_until_told)
            with closing(theirs):
                theirs.sendall(ASKED)
                assert b"200 OK" in await answer(theirs)
            server.should_exit = True

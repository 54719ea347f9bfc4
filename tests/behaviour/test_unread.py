"""Answers that clients do not read: their memory is bounded, and clients that read do not pay for those that do not."""

import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from service.api.door.connections import Door
from tests.behaviour.test_door import listens
from tests.behaviour.test_forks_bounds import MIB, forget_peak, memory
from tests.harness.processes import running_program
from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

DOOR = """
import asyncio, sys
import uvicorn
from service.api.app import Measuring
from service.api.door.leaving import LeavingDoor
from service.api.door.http_server import HttpServer
from service.serve import listen

class Small(LeavingDoor):
    UNREAD_S, UNREAD_BYTES = 2.0, 40 * 1024 * 1024

async def app(scope, receive, send):
    size = int(scope["path"].rsplit("/")[-1])
    step = 65536 if scope["path"].startswith("/pieces") else size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    for at in range(0, size, step):
        body = b"x" * min(step, size - at)
        await send({"type": "http.response.body", "body": body, "more_body": at + step < size})

config = uvicorn.Config(Measuring(app, lambda *_: None), lifespan="off", http=Small, ws="none",
                        limit_concurrency=64, log_config=None)
asyncio.run(HttpServer(config, listen("127.0.0.1", int(sys.argv[1]))).run_until_told())
"""
MOST_KEPT = Door.UNREAD_BYTES // 4_000_000
SIZE = 16_000_000  # more than a kernel holds of a connection
_never = threading.Event()
pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def small_door(free_ports: Callable[[int], int]) -> Iterator[tuple[int, psutil.Process]]:
    """The real door with smaller bounds, over an application that answers with the requested number of bytes."""
    port = free_ports(1)
    with running_program([sys.executable, "-c", DOOR, str(port)]) as process:
        wait_for(lambda: listens(port), "it listens")
        yield port, psutil.Process(process.pid)


def ask(port: int, path: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    return connection


def read_all(connection: socket.socket, pause_s: float = 0.0) -> Iterator[int]:
    """Yield the number of bytes of each read, with pauses between."""
    left = SIZE
    with suppress(ConnectionResetError):
        while left > 0 and (piece := connection.recv(65536)):
            left -= len(piece)
            yield len(piece)
            _never.wait(pause_s)


def kept_by(process: psutil.Process, connections: Sequence[socket.socket]) -> int:
    """Return how many of its connections a process still has; a client that reads nothing does not notice the close."""
    found = process.net_connections("tcp")
    peers = {each.raddr.port for each in found if each.status == psutil.CONN_ESTABLISHED}
    return sum(each.getsockname()[1] in peers for each in connections)


@pytest.mark.parametrize("path", [f"/{SIZE}", f"/pieces/{SIZE}"])
def test_a_client_that_reads_nothing_is_disconnected(small_door: tuple[int, psutil.Process], path: str) -> None:
    """After a bounded time of silence; its place and its memory are free again."""
    port, process = small_door
    with closing(ask(port, path)) as connection:
        wait_for(lambda: kept_by(process, [connection]) == 0, "it is cut off", 10.0)


@pytest.mark.parametrize("path", [f"/{SIZE}", f"/pieces/{SIZE}"])
def test_a_client_that_reads_slowly_is_not_cut_off(small_door: tuple[int, psutil.Process], path: str) -> None:
    """It reads for longer than the bound of silence."""
    with closing(ask(small_door[0], path)) as connection:
        assert sum(read_all(connection, pause_s=0.01)) >= SIZE


def test_clients_that_read_do_not_pay_for_those_that_do_not(small_door: tuple[int, psutil.Process]) -> None:
    """If all leave too much unread, those that have read nothing for longest go first, in any order of arrival."""
    port, process = small_door
    with ExitStack() as stack:

        def ask_silently() -> socket.socket:
            connection = stack.enter_context(closing(ask(port, f"/{SIZE}")))
            select.select([connection], [], [], LIMIT_S)  # it is being answered
            return connection

        silent = [ask_silently(), ask_silently()]
        reader = stack.enter_context(closing(ask(port, f"/{SIZE}")))
        counts: list[int] = []
        reading = threading.Thread(target=lambda: counts.extend(read_all(reader, pause_s=0.01)))
        reading.start()
        wait_for(lambda: sum(counts) > SIZE // 2, "it reads")
        assert kept_by(process, silent) <= 1
        silent += [ask_silently(), ask_silently()]
        wait_for(lambda: kept_by(process, silent) <= 1, "all but one are cut off")
        reading.join(LIMIT_S)
        assert sum(counts) >= SIZE


@pytest.fixture
def service(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        yield running


def test_a_running_answer_is_complete_when_the_service_stops(service: Service) -> None:
    """It has a few seconds for that, whatever else has stopped."""
    talks = [{"id": f"q{n}", "prompt": "x" * 4_000_000} for n in range(3)]
    job_id = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": talks})
    service.wait_ended(job_id)
    with closing(ask(int(service.url.rpartition(":")[2]), f"/v1/jobs/{job_id}/document")) as connection:
        pieces = read_all(connection, pause_s=0.005)
        count = next(pieces)
        assert service.process is not None
        service.process.terminate()
        assert count + sum(pieces) > 12_000_000
    assert service.process.wait(LIMIT_S) == 0


def test_a_second_signal_waits_for_no_answer(service: Service) -> None:
    """For clients that do not read: many wait for their turn to be answered, and none holds up the end."""
    talks = [{"id": f"q{n}", "prompt": "x" * 4_000_000} for n in range(3)]
    job_id = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": talks})
    service.wait_ended(job_id)
    assert service.process is not None
    with ExitStack() as stack:
        port = int(service.url.rpartition(":")[2])
        for _ in range(40):
            stack.enter_context(closing(ask(port, f"/v1/jobs/{job_id}/document")))
        service.process.terminate()
        wait_for(lambda: "draining" in service.log(), "it has heard")
        service.process.terminate()
        assert service.process.wait(LIMIT_S) == 0, service.log()
        assert "timeout graceful shutdown exceeded" not in service.log()


@pytest.mark.parametrize("what", ["document", "conversations/q0/turns/a/0/prompt"])
def test_unread_whole_answers_are_held_within_the_bound(service: Service, what: str) -> None:
    """A hundred of 4 MB each are requested at once: a few are built at a time, and each is counted whole."""
    talk = {"id": "q0", "prompt": "x" * 4_000_000}
    job_id = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [talk]})
    service.wait_ended(job_id)
    assert service.process is not None
    process, before = psutil.Process(service.process.pid), memory(service, "VmRSS")
    forget_peak(service)
    with ExitStack() as stack:
        path = f"/v1/jobs/{job_id}/{what}"
        port = int(service.url.rpartition(":")[2])
        clients = [stack.enter_context(closing(ask(port, path))) for _ in range(100)]
        wait_for(lambda: kept_by(process, clients) <= MOST_KEPT, "the others are cut off")
        assert service.get(path)
    grown = memory(service, "VmHWM") - before
    assert grown < 2.2 * Door.UNREAD_BYTES, grown // MIB


def test_the_memory_of_an_ended_job_is_freed(service: Service) -> None:
    """By reference counting: the garbage collector visits old objects too rarely for prompts of megabytes."""
    talk = {"id": "q0", "prompt": "x" * 4_000_000}

    def run_jobs(count: int) -> int:
        for _ in range(count):
            service.wait_ended(service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [talk]}))
        return memory(service, "VmRSS")

    first = run_jobs(5)
    assert run_jobs(15) - first < 32 * MIB

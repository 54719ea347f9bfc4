"""The cost of a token, counted and not timed: function calls between the socket and the accumulated text."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

import anyio
import pytest

from tests.harness.quiet_owner import QuietOwner
from transport.client import EngineClient
from transport.endpoint import Endpoint
from transport.exchange import Exchange
from workers.health.probes import EngineProbes
from workers.health.watch import HealthWatch
from workers.policy.repetition import RepetitionLimits
from workers.requests.answer import Answer
from workers.requests.generation import Generation
from workers.requests.in_flight import InFlightRequest, InFlightRequests
from workers.spec import WorkerTimeouts

WIRE: Final = Path(__file__).parents[1] / "transport" / "wire" / "llama_server_text.sse"
HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REPEATED: Final = 50
GATHERED: Final = 8
TOKENS_A_LOOK: Final = 25  # at 50 a second, with a look each half second
REQUESTS: Final = 20
ADVICE: Final = (
    "{what} now takes {calls:.2f} calls, more than {bound}. Each call is paid for every token of every stream. Take the"
    " work off the path: do it once a read, once a look of the watch, or once a request. If it has to stay, measure"
    " what it costs with `python -m bench.token_path` beside the commit before, and raise the bound here by just that."
)


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions ``work`` calls, in Python and in C."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


class Connection(asyncio.Transport):
    """The connection of the request, which is not counted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert data


def token_chunks() -> list[bytes]:
    """Return a real server's chunks of one token each, as sent over HTTP."""
    frames = [frame + b"\n\n" for frame in WIRE.read_bytes().split(b"\n\n") if b'"content":"' in frame]
    assert len(frames) > 5
    return [b"%x\r\n%s\r\n" % (len(frame), frame) for frame in frames] * REPEATED


@pytest.mark.parametrize(
    ("a_read", "bound"),
    [pytest.param(1, 20.5, id="a token a read"), pytest.param(GATHERED, 8.6, id="gathered reads")],
)
async def test_a_token_takes_few_calls(a_read: int, bound: float) -> None:
    """Specification, "Performance bounds": the path of a token stays cheaper than its rivals'."""
    generation = Generation(time.monotonic)
    exchange = Exchange(b"POST", generation, asyncio.get_running_loop().create_future())
    exchange.connection_made(Connection())
    exchange.data_received(HEAD)
    chunks = token_chunks()
    reads = [b"".join(chunks[at : at + a_read]) for at in range(0, len(chunks), a_read)]

    def read() -> None:
        for data in reads:
            exchange.data_received(data)

    calls = calls_of(read) / len(chunks)
    assert generation.output_tokens == len(chunks)
    exchange.finished.cancel()
    exchange.connection_lost(None)
    assert calls <= bound, ADVICE.format(what="A token", calls=calls, bound=bound)


async def test_a_look_of_the_watch_takes_few_calls_per_request() -> None:
    """The watch looks at all requests at once, beside the path of their tokens."""
    in_flight = InFlightRequests()
    probes = EngineProbes(EngineClient(Endpoint(port=1)), lambda: ("m", {}), lambda: None, lambda: 0)
    watch = HealthWatch(in_flight, probes, WorkerTimeouts(), QuietOwner(), time.monotonic)
    exchanges = []
    chunks = token_chunks()[:TOKENS_A_LOOK]
    async with anyio.create_task_group() as tasks:
        for _ in range(REQUESTS):
            answer = Answer(time.monotonic)
            running = InFlightRequest(in_flight.next_id(), "job", answer)
            tasks.start_soon(_hold, in_flight, running)
            generation = answer.begin_generation(RepetitionLimits(), 3)
            exchange = Exchange(b"POST", generation, asyncio.get_running_loop().create_future())
            exchange.connection_made(Connection())
            exchange.data_received(HEAD + b"".join(chunks))
            exchanges.append(exchange)
        while len(in_flight) < REQUESTS:
            await anyio.lowlevel.checkpoint()
        calls = calls_of(lambda: watch.tick(tasks)) / REQUESTS
        tasks.cancel_scope.cancel()
    for exchange in exchanges:
        exchange.finished.cancel()
        exchange.connection_lost(None)
    bound = 57.0
    assert calls <= bound, ADVICE.format(what="A look at a request", calls=calls, bound=bound)


async def _hold(in_flight: InFlightRequests, running: InFlightRequest) -> None:
    with in_flight.admit(running):
        await anyio.sleep_forever()

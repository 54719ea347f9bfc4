"""No answer of an engine ends the service: each ends its own request, with a reason, within bounds."""

import asyncio
import resource
import time
import tracemalloc

import anyio.lowlevel
import pytest

from service.conversations.record.measures import UsageCounts
from tests.harness import fuzzed
from transport.counters import EngineCounters, KvCache
from transport.dialects import llama_server, vllm
from transport.dialects.refusals import decode_error
from transport.errors import EngineError
from transport.events import Usage
from transport.exchange import Exchange
from transport.relay import HELD, RelayExchange
from workers.requests.generation import Generation

ANSWERS, SOAK_ANSWERS = 1000, 1_000_000
MOST_TOKENS = 2**31
STEP_S = 0.05  # CPU time of the event loop, as a soak measures it
MEMORY_MIB = 200
TENTH = 10


class Passage:
    """A relayed answer goes here and is dropped."""

    def pass_frames(self, _content_type: str, _frames: bytes) -> None:
        """Drop a piece of a stream."""

    def pass_whole(self, status: int, _content_type: str, _body: bytes) -> None:
        assert 200 <= status <= 599


class Connection(asyncio.Transport):
    """A connection that sends nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the request."""

    def is_closing(self) -> bool:
        return True


async def play(seed: int, *, is_relayed: bool) -> tuple[Usage, float]:
    """Play one answer; return its cost and its longest step."""
    answer, generation = fuzzed.answer(seed), Generation(time.monotonic)
    finished = asyncio.get_running_loop().create_future()
    if is_relayed:
        exchange: Exchange = RelayExchange(b"POST", generation, finished, Passage())
    else:
        exchange = Exchange(b"POST", generation, finished)
    exchange.connection_made(Connection())
    longest = 0.0
    for piece in answer.pieces:
        began_at = time.thread_time()
        exchange.data_received(piece)
        longest = max(longest, time.thread_time() - began_at)
        if finished.done():
            break
    exchange.connection_lost(None)
    assert finished.done(), f"answer {seed} has not ended"
    error = finished.exception()
    assert error is None or isinstance(error, EngineError), f"answer {seed}"
    await anyio.lowlevel.checkpoint()  # a callback frees held memory
    return generation.usage or generation.seen, longest


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return SOAK_ANSWERS if request.config.getoption("--soak") else ANSWERS


@pytest.mark.parametrize("is_relayed", [False, True], ids=["of a job", "at the front door"])
async def test_any_answer_ends_its_own_request(count: int, *, is_relayed: bool) -> None:
    """It ends with a result or an engine's error, and with an account that fits every column."""
    total, longest, first_tenth_kib = UsageCounts(), 0.0, 0
    for seed in range(count):
        cost, step = await play(seed, is_relayed=is_relayed)
        assert 0 <= cost.cached_tokens <= cost.prompt_tokens < MOST_TOKENS, f"answer {seed}"
        assert 0 <= cost.completion_tokens < MOST_TOKENS, f"answer {seed}"
        total = UsageCounts(prompt_tokens=total.prompt_tokens + cost.prompt_tokens)
        longest = max(longest, step)
        if seed == count // TENTH:
            first_tenth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert total.prompt_tokens < 2**63
    assert HELD.bytes == 0
    if count == SOAK_ANSWERS:
        now_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{count} answers, longest step {1000 * longest:.1f} ms, memory {first_tenth_kib} -> {now_kib} KiB")
        assert longest < STEP_S
        assert now_kib < 1.1 * first_tenth_kib


def test_any_answer_to_a_probe_is_read_or_refused(count: int) -> None:
    """No number of an engine's leaves the range of counts for tokens and slots."""
    for seed in range(count):
        path, body = fuzzed.probe(seed)
        try:
            found = read(path, body)
        except EngineError:
            continue
        if isinstance(found, int):
            assert abs(found) < 2**63, f"probe {seed}"
        if isinstance(found, KvCache):
            assert 0 < found.tokens < 2**63, f"probe {seed}"
            assert 0 <= found.used < 2**63, f"probe {seed}"
            assert 1 <= found.block < 2**63, f"probe {seed}"
        if isinstance(found, EngineCounters):
            assert all(abs(work.steps) < 2**63 for work in found.work), f"probe {seed}"


def read(path: str, body: bytes) -> object:
    """Read a probe's answer as the dialects do."""
    match path:
        case "/slots":
            return llama_server.decode_counters(body)
        case "/props":
            return llama_server.decode_capacity(body)
        case "/apply-template":
            return llama_server.decode_thought(body, b"{}")
        case "/v1/chat/completions/input_tokens":
            return llama_server.decode_count(body)
        case "/metrics":
            vllm.decode_counters(body)
            vllm.decode_capacity(body, b"{}")
            return vllm.decode_kv_cache(body)
        case _:
            vllm.decode_capacity(fuzzed.METRICS.encode(), body)
            return decode_error(500, {}, body).status


ENDLESS = {
    "blank lines": b"\n" * 4096,
    "comments": b": x\n" * 1024,
    "half lines": b"data: x" * 512,
    "lines of data": b"data: {}\n" * 512,
    "empty frames": b"data: {}\n\n" * 512,
    "trailing headers": b"x: y\r\n" * 512,
}
SLOW = ("empty frames",)
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.system) if what in SLOW else what for what in ENDLESS]
)
async def test_an_endless_answer_ends_its_request(what: str) -> None:
    """A bound on its size ends it, long before memory runs out."""
    exchange, finished = exchange_of_stream()
    if what == "trailing headers":
        exchange, finished = exchange_of_stream(b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
    tracemalloc.start()
    for _ in range(16_384):
        await anyio.lowlevel.checkpoint()
        exchange.data_received(ENDLESS[what])
        if finished.done():
            break
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(finished.exception(), EngineError)
    assert most < MEMORY_MIB * 1024 * 1024
    exchange.connection_lost(None)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000, id="headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, id="one header"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, id="interim answers"),
        pytest.param(SSE + b"Content-Encoding: gzip\r\n\r\n", id="packed"),
        pytest.param(b"HTTP/1.1 600 X\r\n\r\n", id="no status"),
    ],
)
async def test_an_impossible_head_ends_its_request(head: bytes) -> None:
    """Its body is not read."""
    finished = asyncio.get_running_loop().create_future()
    exchange = Exchange(b"POST", Generation(time.monotonic), finished)
    exchange.connection_made(Connection())
    for at in range(0, len(head), 8192):
        exchange.data_received(head[at : at + 8192])
    assert isinstance(finished.exception(), EngineError)
    exchange.connection_lost(None)


async def test_a_days_comments_are_no_fault() -> None:
    """An engine may ping every second while it reads a long prompt; frames reset the count."""
    exchange, finished = exchange_of_stream()
    for _ in range(3):
        for _ in range(80_000):
            exchange.data_received(b": ping\n\n")
        exchange.data_received(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
    assert not finished.done()
    finished.cancel()
    exchange.connection_lost(None)


def exchange_of_stream(more: bytes = b"\r\n") -> tuple[Exchange, "asyncio.Future[None]"]:
    """Return an exchange whose answer has begun."""
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exchange = Exchange(b"POST", Generation(time.monotonic), finished)
    exchange.connection_made(Connection())
    exchange.data_received(SSE + more)
    return exchange, finished

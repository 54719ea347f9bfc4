"""The cost of relays between clients and an engine: CPU per relayed token, and time added to the first one.

Roundhouse's front door beside sglang-router (Rust), litellm's proxy and a bare relay on aiohttp, each a process of its
own between the same client and the same timed engine (``bench/parts/timed_engine.py``): 64 and 256 streams of 50
tokens/s. The rivals are set up in environments of their own in the user's cache folder (``bench/parts/rivals.py``);
``--rivals none`` leaves them out. The CPU is the relay's own, user and system. The first token is timed while all
streams run. The engine sends it with the request, and the time without a relay is subtracted. Then the same relays with
requests of one token, 64 at once, each answered whole: requests a second, and the CPU of each.

    python -m bench.relay [--rivals sglang-router,litellm] [--rounds 3] [--tokens 200] [--requests 100]
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import httptools
import psutil
import uvloop

from bench.parts.rivals import rival_python
from bench.parts.services import START_S, cpu_s, process_of, serving
from bench.parts.timed_engine import timed_engine
from tests.harness.ports import find_ports

PORT: Final = find_ports(4)
RATE_HZ: Final = 50.0
RIVALS: Final = ("sglang-router", "litellm")
PATHS: Final = {"sglang-router": "/v1/models", "litellm": "/health/liveliness"}
Figures = dict[str, float]


class Reader(asyncio.Protocol):
    """One streamed request: counts frames, and records when the first came."""

    def __init__(self, request: bytes, tokens: int) -> None:
        self._request = request
        self._tokens = tokens
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self.began_at = self.first_at = 0.0
        self.frames = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self.began_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count received tokens; a mark may be split between reads."""
        seen = self._tail + data
        self.frames += seen.count(b'"content"') - self._tail.count(b'"content"')
        if self.frames and not self.first_at:
            self.first_at = time.perf_counter()
        self._tail = seen[-8:]
        if b"[DONE]" in seen and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the stream broke"))


async def load(port: int, streams: int, tokens: int) -> list[float]:
    """Read ``streams`` streams at once, begun over a second; return the times to first tokens."""
    body = json.dumps({"model": "timed", "messages": [{"role": "user", "content": "Go."}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def one(at_s: float) -> float:
        await asyncio.sleep(at_s)
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(lambda: Reader(request, tokens), "127.0.0.1", port)
        try:
            await reader.done
        finally:
            transport.abort()
        if reader.frames != tokens:
            sys.exit(f"{reader.frames} of {tokens} tokens came")
        return reader.first_at - reader.began_at

    return await asyncio.gather(*(one(random.random()) for _ in range(streams)))


class Asker(asyncio.Protocol):
    """One kept connection: asks ``left`` times, each time after the last answer."""

    def __init__(self, request: bytes, left: int) -> None:
        self._request = request
        self._left = left
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Ask again, or be done."""
        if self._parser.get_status_code() != 200:
            self.done.set_exception(ConnectionError(f"answered {self._parser.get_status_code()}"))
            return
        self._left -= 1
        if self._left and self._transport is not None:
            self._parser = httptools.HttpResponseParser(self)
            self._transport.write(self._request)
        else:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the connection broke"))


async def ask(port: int, connections: int, requests: int) -> float:
    """Ask ``requests`` times on each of ``connections`` connections; return the requests per second."""
    message = {"model": "timed", "messages": [{"role": "user", "content": "Go."}], "max_tokens": 1}
    body = json.dumps(message).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def one() -> None:
        loop = asyncio.get_running_loop()
        transport, asker = await loop.create_connection(lambda: Asker(request, requests), "127.0.0.1", port)
        try:
            await asker.done
        finally:
            transport.abort()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    return connections * requests / (time.perf_counter() - began)


def _ask(port: int, connections: int, requests: int) -> float:
    argv = [sys.executable, "-m", "bench.relay", "--ask", str(port), "--streams", str(connections)]
    done = subprocess.run([*argv, "--requests", str(requests)], stdout=subprocess.PIPE, check=True, timeout=300)
    return float(done.stdout)


def _load(port: int, streams: int, tokens: int) -> list[float]:
    argv = [sys.executable, "-m", "bench.relay", "--load", str(port), "--streams", str(streams)]
    done = subprocess.run([*argv, "--tokens", str(tokens)], stdout=subprocess.PIPE, check=True, timeout=300)
    times: list[float] = json.loads(done.stdout)
    return times


async def serve_aiohttp(port: int, engine: int) -> None:
    """Relay on aiohttp, chunk by chunk, and nothing else."""
    import aiohttp  # noqa: PLC0415 - only this process needs it
    from aiohttp import web  # noqa: PLC0415

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            url = f"http://127.0.0.1:{engine}{request.path}"
            async with session.post(url, data=await request.read()) as upstream:
                answer = web.StreamResponse(headers={"Content-Type": upstream.headers["Content-Type"]})
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                return answer

        app = web.Application()
        app.router.add_post("/v1/chat/completions", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


def _command(name: str, engine: int, folder: Path) -> list[str]:
    if name == "aiohttp":
        return [sys.executable, "-m", "bench.relay", "--serve", str(PORT), "--engine", str(engine)]
    if name == "sglang-router":
        flags = ["--worker-urls", f"http://127.0.0.1:{engine}", "--port", str(PORT), "--policy", "round_robin"]
        quiet = ["--log-level", "error", "--prometheus-port", str(PORT + 1), "--disable-health-check"]
        return [str(rival_python(name)), "-m", "sglang_router.launch_router", *flags, "--backend", "openai", *quiet]
    config = folder / "config.yaml"
    at = {"model": "openai/timed", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
    models = [{"model_name": "timed", "litellm_params": at}]
    general = {"dangerously_permit_weak_or_unset_master_key": True}  # it listens on loopback alone, for a minute
    config.write_text(json.dumps({"model_list": models, "general_settings": general}))
    return [str(rival_python(name).parent / "litellm"), "--config", str(config), "--port", str(PORT)]


@contextmanager
def _running(name: str, engine: int) -> Iterator[psutil.Process]:
    if name == "roundhouse":
        model = {"engine": "attached", "url": f"http://127.0.0.1:{engine}", "slots": 512}
        with serving(PORT, {"timed": model}) as service:
            yield process_of(service)
        return
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it fetches prices
        relay = subprocess.Popen(_command(name, engine, Path(folder)), stdout=log, stderr=log, env=env)
        try:
            _wait_served(name)
            yield psutil.Process(relay.pid)
        finally:
            relay.terminate()
            relay.wait(30)


def _wait_served(name: str) -> None:
    path = PATHS.get(name, "/v1/chat/completions")
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5).close()
        except urllib.error.HTTPError as error:
            if name == "aiohttp" and error.code == 405:
                return
        except OSError:
            pass
        else:
            return
        time.sleep(0.1)
    sys.exit(f"{name} does not serve")


def _cpu_s(process: psutil.Process) -> float:
    return sum(map(cpu_s, (process, *process.children(recursive=True))))


def _measure(name: str, streams: int, tokens: int) -> Figures:
    with timed_engine(tokens, "at-once") as engine:
        if name == "none":
            first = _load(engine, streams, tokens)
            return {"us": 0.0, "first_ms": 1000 * statistics.median(first), "last_ms": 1000 * max(first)}
        with _running(name, engine) as process:
            _load(PORT, 4, tokens)
            before = _cpu_s(process)
            first = _load(PORT, streams, tokens)
            used_s = _cpu_s(process) - before
    return {
        "us": used_s / (streams * tokens) * 1e6,
        "first_ms": 1000 * statistics.median(first),
        "last_ms": 1000 * statistics.quantiles(first, n=100)[98],
    }


def _compare(streams: int, tokens: int, rounds: int, rivals: Sequence[str]) -> None:
    names = ["none", "roundhouse", *rivals, "aiohttp"]
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:  # in turn, so that a slow minute of the machine affects all
            figures[name].append(_measure(name, streams, tokens))
    print(f"\n{streams} streams x {RATE_HZ:g} tokens/s, {tokens} tokens each, median of {rounds} rounds")
    print(f"{'relay':<16}{'CPU us/token':>14}{'first p50':>12}{'added':>10}{'first p99':>12}")
    bare = statistics.median(run["first_ms"] for run in figures["none"])
    for name, runs in figures.items():
        us, first, last = (statistics.median(run[key] for run in runs) for key in ("us", "first_ms", "last_ms"))
        print(f"{name:<16}{us:>14.1f}{first:>9.2f} ms{first - bare:>7.2f} ms{last:>9.2f} ms", flush=True)


def _measure_requests(name: str, connections: int, requests: int) -> Figures:
    with timed_engine(1, "at-once") as engine:
        if name == "none":
            return {"rate": _ask(engine, connections, requests), "us": 0.0}
        with _running(name, engine) as process:
            _ask(PORT, 4, 10)
            before = _cpu_s(process)
            rate = _ask(PORT, connections, requests)
            return {"rate": rate, "us": (_cpu_s(process) - before) / (connections * requests) * 1e6}


def _compare_requests(connections: int, requests: int, rounds: int, rivals: Sequence[str]) -> None:
    names = ["none", "roundhouse", *rivals, "aiohttp"]
    figures: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            figures[name].append(_measure_requests(name, connections, requests))
    print(f"\n{connections} connections, {requests} requests of one token on each, median of {rounds} rounds")
    print(f"{'relay':<16}{'requests/s':>14}{'CPU us/request':>16}{'beside aiohttp':>16}")
    bare = statistics.median(run["us"] for run in figures["aiohttp"])
    for name, runs in figures.items():
        rate, us = (statistics.median(run[key] for run in runs) for key in ("rate", "us"))
        print(f"{name:<16}{rate:>14.0f}{us:>16.0f}{us / bare if bare else math.nan:>16.2f}", flush=True)


def main() -> None:
    """Compare, or run as one of the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", default=",".join(RIVALS), help=f"{','.join(RIVALS)}, some of them, or none")
    parser.add_argument("--streams", type=int, default=0, help="default: 64, then 256")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=100, help="requests on each of 64 connections")
    parser.add_argument("--only", choices=["streams", "requests"], help="measure only these")
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(uvloop.run(load(options.load, options.streams, options.tokens))))
    elif options.ask:
        print(uvloop.run(ask(options.ask, options.streams, options.requests)))
    elif options.serve:
        uvloop.run(serve_aiohttp(options.serve, options.engine))
    else:
        rivals = [name for name in RIVALS if name in options.rivals.split(",")]
        if options.only != "requests":
            for streams in [options.streams] if options.streams else [64, 256]:
                _compare(streams, options.tokens, options.rounds, rivals)
        if options.only != "streams":
            _compare_requests(options.streams or 64, options.requests, options.rounds, rivals)


if __name__ == "__main__":
    main()

"""CPU per streamed token, from the socket to the accumulated text: Roundhouse beside its rivals, in the same run.

Each client is a process of its own against the same timed engine (``bench/timed_engine.py``): loopback TCP, 64 and 256
streams of 50 tokens/s, one event a token. The figure is the client's own user and system time, set-up included, divided
by the tokens that it received; ``behind`` is how much longer than the engine's clock the streams took. Rounds are
repeated and the median is printed; the ratios matter, since machines differ.
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import uvloop

HERE: Final = Path(__file__).parent
BODY: Final = {"model": "timed", "messages": [{"role": "user", "content": "Go."}], "stream": True}
Client = Callable[[int, int], Coroutine[None, None, list[str]]]


class _Watched:
    """A worker that has nothing to repair."""

    is_serving = True
    is_starting = False
    owns_engine = True

    def break_engine(self, *_told: object) -> None:
        sys.exit("the watch took a healthy engine for a broken one")


async def roundhouse(port: int, streams: int) -> list[str]:
    """Run the path that every turn takes, with the watch over it: verdicts, repetition, rates. Nobody follows its job."""
    return await _roundhouse(port, streams, is_watched=False)


async def roundhouse_followed(port: int, streams: int) -> list[str]:
    """Run the same for a job that somebody follows: each token is read when it comes."""
    return await _roundhouse(port, streams, is_watched=True)


async def _roundhouse(port: int, streams: int, *, is_watched: bool) -> list[str]:
    import anyio  # noqa: PLC0415 - each client's process pays for its own imports only

    from transport.client import EngineClient  # noqa: PLC0415
    from transport.endpoint import Endpoint  # noqa: PLC0415
    from transport.request import ChatRequest, Message  # noqa: PLC0415
    from workers.health.probes import EngineProbes  # noqa: PLC0415
    from workers.health.watch import HealthWatch  # noqa: PLC0415
    from workers.policy.repetition import RepetitionLimits  # noqa: PLC0415
    from workers.requests.answer import Answer  # noqa: PLC0415
    from workers.requests.in_flight import InFlightRequest, InFlightRequests  # noqa: PLC0415
    from workers.spec import WorkerTimeouts  # noqa: PLC0415

    client = EngineClient(Endpoint(port=port))
    message = Message(role="user", content="Go.")
    request = ChatRequest(model="timed", messages=(message,), is_watched=is_watched)
    in_flight = InFlightRequests()
    vitals = EngineProbes(client, lambda: ("timed", {}), lambda: None, lambda: 0)
    watch = HealthWatch(in_flight, vitals, WorkerTimeouts(), _Watched(), time.monotonic)

    async def one() -> str:
        answer = Answer(time.monotonic)
        with in_flight.admit(InFlightRequest(in_flight.next_id(), "bench", answer)):
            await client.stream(request, answer.begin_generation(RepetitionLimits(), 3))
        return answer.text

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        texts = await asyncio.gather(*(one() for _ in range(streams)))
        tasks.cancel_scope.cancel()
    return texts


async def httpx_sse(port: int, streams: int) -> list[str]:
    """Run stock httpx and httpx-sse."""
    import httpx  # noqa: PLC0415
    from httpx_sse import aconnect_sse  # noqa: PLC0415

    async def one(client: httpx.AsyncClient) -> str:
        parts: list[str] = []
        async with aconnect_sse(client, "POST", "/v1/chat/completions", json=BODY) as source:
            async for event in source.aiter_sse():
                if event.data == "[DONE]":
                    break
                parts.append(json.loads(event.data)["choices"][0]["delta"].get("content", ""))
        return "".join(parts)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None, trust_env=False
    ) as client:
        return await asyncio.gather(*(one(client) for _ in range(streams)))


async def aiohttp(port: int, streams: int) -> list[str]:
    """Run bare aiohttp: chunks as they come, split on blank lines, the standard library's JSON parser."""
    return await _aiohttp(port, streams, json.loads)


async def aiohttp_msgspec(port: int, streams: int) -> list[str]:
    """Run bare aiohttp with a fast untyped JSON parser."""
    import msgspec  # noqa: PLC0415

    return await _aiohttp(port, streams, msgspec.json.decode)


async def _aiohttp(
    port: int, streams: int, loads: Callable[[bytes], dict[str, list[dict[str, dict[str, str]]]]]
) -> list[str]:
    import aiohttp  # noqa: PLC0415

    async def one(session: aiohttp.ClientSession) -> str:
        parts: list[str] = []
        rest = b""
        async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=BODY) as response:
            async for chunk in response.content.iter_any():
                *frames, rest = (rest + chunk).split(b"\n\n")
                for frame in frames:
                    if frame == b"data: [DONE]":
                        return "".join(parts)
                    parts.append(loads(frame[6:])["choices"][0]["delta"].get("content", ""))
        return "".join(parts)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        return await asyncio.gather(*(one(session) for _ in range(streams)))


CLIENTS: Final[dict[str, Client]] = {
    "roundhouse": roundhouse,
    "roundhouse followed": roundhouse_followed,
    "aiohttp+msgspec": aiohttp_msgspec,
    "aiohttp+json": aiohttp,
    "httpx+httpx-sse": httpx_sse,
}


def _run_client(name: str, port: int, streams: int, tokens: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    started_at = time.monotonic()
    texts = uvloop.run(CLIENTS[name](port, streams))
    wall_s = time.monotonic() - started_at
    after = resource.getrusage(resource.RUSAGE_SELF)
    expected = "".join(f" t{number % 997:04d}" for number in range(tokens))  # as bench/timed_engine.py writes them
    if texts != [expected] * streams:
        sys.exit(f"{name} did not receive what the engine sent")
    cpu_s = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    print(json.dumps({"us_per_token": cpu_s / (streams * tokens) * 1e6, "wall_s": wall_s, "cpu_s": cpu_s}))


def _measure(name: str, streams: int, tokens: int) -> dict[str, float]:
    engine = subprocess.Popen(
        [sys.executable, str(HERE / "timed_engine.py"), str(tokens)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with engine:
        assert engine.stdout is not None
        port = int(engine.stdout.readline())
        argv = [sys.executable, __file__, "--client", name, "--port", str(port)]
        argv += ["--streams", str(streams), "--tokens", str(tokens)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=300)
        engine.communicate(timeout=10)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _compare(streams: int, tokens: int, rounds: int) -> None:
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in CLIENTS}
    for _ in range(rounds):
        for name in CLIENTS:  # in turn, so that a slow minute of the machine falls on all of them
            figures[name].append(_measure(name, streams, tokens))
    print(f"\n{streams} streams x 50 tokens/s, {tokens} tokens each, median of {rounds} rounds")
    print(f"{'client':<18}{'CPU us/token':>14}{'x roundhouse':>14}{'share of a core':>17}{'behind':>9}")
    own = statistics.median(run["us_per_token"] for run in figures["roundhouse"])
    for name, runs in figures.items():
        us = statistics.median(run["us_per_token"] for run in runs)
        share = statistics.median(run["cpu_s"] / run["wall_s"] for run in runs)
        behind = statistics.median(run["wall_s"] for run in runs) - (tokens + 1) / 50
        print(f"{name:<18}{us:>14.1f}{us / own:>14.2f}{share:>16.0%}{behind:>8.2f}s")


def main() -> None:
    """Compare, or be one of the compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=CLIENTS)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=0, help="default: 64, then 256")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.client:
        _run_client(options.client, options.port, options.streams, options.tokens)
        return
    for streams in [options.streams] if options.streams else [64, 256]:
        _compare(streams, options.tokens, options.rounds)


if __name__ == "__main__":
    main()

"""CPU per streamed token, from the socket to the accumulated text: Roundhouse and its rivals, in the same run.

Each client is a process of its own against the same timed engine (``bench/parts/timed_engine.py``): loopback TCP, 64
and 256 streams of 50 tokens/s, one event a token; then 16 an event, as vLLM sends an answer that nobody watches.
``roundhouse`` is the path of a token with the watch over it, ``roundhouse serve`` is the whole service with a job of as
many conversations. The figure is the process's own user and system time, without its start and its imports, divided by
the tokens that it received. The median of the rounds is printed; the ratios matter, since machines differ.

    python -m bench.token_path [--streams N] [--tokens N] [--per-frame N] [--rounds N] [--only CLIENT ...] [--layers]
"""

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import httpx
import psutil
import uvloop

from bench.parts.timed_engine import timed_engine, word_at
from bench.parts.token_layers import BODY, LAYERS, Layer
from tests.harness.quiet_owner import QuietOwner

if TYPE_CHECKING:
    from tests.harness.service import Service


async def roundhouse(port: int, streams: int) -> list[str]:
    """Run the path of every turn, with its watch (verdicts, repetition, rates) but without a follower."""
    return await _roundhouse(port, streams, is_watched=False)


async def roundhouse_followed(port: int, streams: int) -> list[str]:
    """Run the same for a followed job: each token is read when it comes."""
    return await _roundhouse(port, streams, is_watched=True)


async def _roundhouse(port: int, streams: int, *, is_watched: bool) -> list[str]:
    import anyio  # noqa: PLC0415 - each client's process imports only what it needs

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
    watch = HealthWatch(in_flight, vitals, WorkerTimeouts(), QuietOwner(), time.monotonic)

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


CLIENTS: Final[dict[str, Layer]] = {
    "roundhouse": roundhouse,
    "roundhouse followed": roundhouse_followed,
    "aiohttp+msgspec": aiohttp_msgspec,
    "aiohttp+json": aiohttp,
    "httpx+httpx-sse": httpx_sse,
}
SERVICE: Final = "roundhouse serve"  # its own process, measured from outside
PATHS: Final = (SERVICE, *CLIENTS)
LAYERED: Final = (*LAYERS, "roundhouse followed", "roundhouse", SERVICE)  # the next adds the watch
NAMES: Final = (*PATHS, *LAYERS)
RIVAL: Final = "aiohttp+msgspec"


def _run_client(name: str, port: int, streams: int, tokens: int) -> None:
    client = {**CLIENTS, **LAYERS}[name]

    async def run() -> tuple[list[str] | None, Usage]:
        await client(port, 1)  # does the imports before the measurement
        began = Usage.of_self()
        return await client(port, streams), Usage.of_self().since(began)

    texts, used = uvloop.run(run())
    expected = "".join(map(word_at, range(tokens)))
    if texts is not None and texts != [expected] * streams:
        sys.exit(f"{name} did not receive what the engine sent")
    used.tell(streams * tokens)


def _run_service(port: int, streams: int, tokens: int) -> None:
    """Run a job of ``streams`` conversations, without a follower, on the whole service."""
    from bench.parts.services import process_of, serving  # noqa: PLC0415 - the other clients need none of it
    from tests.harness.ports import find_ports  # noqa: PLC0415

    model = {"engine": "attached", "url": f"http://127.0.0.1:{port}", "model": "timed", "slots": streams}
    with serving(find_ports(1), {"m": model}) as service:
        process = process_of(service)
        _run_job(service, 1)
        began = Usage.of_process(process)
        job = _run_job(service, streams)
        used = Usage.of_process(process).since(began)
    if job["progress"]["turns"]["completed"] != streams:
        sys.exit(f"the job ended otherwise: {job}")
    used.tell(streams * tokens)


def _run_job(service: "Service", conversations: int) -> dict[str, Any]:
    from bench.parts.services import wait_ended  # noqa: PLC0415

    document = {
        "agents": [{"id": "a", "model": "m"}],
        "rounds": 1,
        "conversations": [{"prompt": "Go."}] * conversations,
    }
    return wait_ended(service, service.post_job(document), pause_s=1.0)


@dataclass(frozen=True)
class Usage:
    """The CPU time of a process in seconds."""

    user_s: float
    system_s: float
    at: float

    @classmethod
    def of_self(cls) -> Self:
        """Return this process's CPU time."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(usage.ru_utime, usage.ru_stime, time.monotonic())

    @classmethod
    def of_process(cls, process: psutil.Process) -> Self:
        """Return another process's CPU time, in whole hundredths."""
        times = process.cpu_times()
        return cls(times.user, times.system, time.monotonic())

    def since(self, before: Self) -> Self:
        """Return the difference to an earlier time."""
        return type(self)(self.user_s - before.user_s, self.system_s - before.system_s, self.at - before.at)

    def tell(self, tokens: int) -> None:
        """Print the figures of one run."""
        us = [seconds / tokens * 1e6 for seconds in (self.user_s + self.system_s, self.system_s)]
        print(json.dumps({"us_per_token": us[0], "system_us": us[1], "wall_s": self.at}))


def _measure(name: str, streams: int, tokens: int, per_frame: int) -> dict[str, float]:
    with timed_engine(tokens, per_frame) as port:
        argv = [sys.executable, "-m", "bench.token_path", "--client", name, "--port", str(port)]
        argv += ["--streams", str(streams), "--tokens", str(tokens)]
        done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=300)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _compare(streams: int, tokens: int, per_frame: int, rounds: int, names: Sequence[str]) -> None:
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:  # in turn, so that a slow minute of the machine affects all
            figures[name].append(_measure(name, streams, tokens, per_frame))
    print(f"\n{streams} streams x 50 tokens/s, {tokens} tokens each, {per_frame} a frame, median of {rounds} rounds")
    print(f"{'client':<20}{'CPU us/token':>14}{'of it system':>14}{'x ' + RIVAL:>20}")
    medians = {name: statistics.median(run["us_per_token"] for run in runs) for name, runs in figures.items()}
    for name, runs in figures.items():
        system = statistics.median(run["system_us"] for run in runs)
        ratio = medians[name] / medians[RIVAL] if RIVAL in medians else float("nan")
        print(f"{name:<20}{medians[name]:>14.2f}{system:>14.2f}{ratio:>20.2f}", flush=True)


def main() -> None:
    """Compare, or run as one of the compared clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=NAMES)
    parser.add_argument("--only", choices=NAMES, nargs="+", default=PATHS)
    parser.add_argument("--layers", action="store_true", help="compare the layers of the path in place of rivals")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=0, help="default: 64, then 256, then 256 with 16 tokens a frame")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--per-frame", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.client:
        run = _run_service if options.client == SERVICE else partial(_run_client, options.client)
        run(options.port, options.streams, options.tokens)
        return
    shapes = [(64, 1), (256, 1), (256, 16)] if not options.streams else [(options.streams, options.per_frame)]
    for streams, per_frame in shapes:
        names = LAYERED if options.layers else options.only
        _compare(streams, options.tokens, per_frame, options.rounds, names)


if __name__ == "__main__":
    main()

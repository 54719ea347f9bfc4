"""The front door under many callers: a flood's cost to others, reported usage, and clients that never read.

``flood``: one key keeps 100 requests waiting on 8 slots, and another asks now and then: its waits, beside those alone.
Then three keys with shares 1, 1 and 2 flood: the part of each, and the throughput beside one key's. ``usage``: requests
of three keys on the real embedded engine, streamed or not, without its cache: ``GET /v1/usage`` beside the engine's own
counters. ``readers``: 1,000 streams beside 1,000 that are never read: memory of the service, and the time of the others
beside the same number alone.

    python -m bench.studies.door [--part flood usage readers] [--requests 10000] [--seconds 60]
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from bench.parts.services import process_of, serving
from bench.parts.timed_engine import timed_engine
from tests.harness.ports import find_ports
from workers.engine.embedded.tiny_model import ensure_tiny_model

PORT: Final = find_ports(4)
URL: Final = f"http://127.0.0.1:{PORT}"
SLOTS: Final = 8
WRITTEN_S: Final = 5.0  # time for the last usage to be stored, which takes a second
TOKENS: Final = 10  # tokens of an answer in a flood, 0.2 s
FLOOD: Final = 100
NOW_AND_THEN_S: Final = 0.5
SHARES: Final = {"alice": 1.0, "bob": 1.0, "carol": 2.0}
READERS: Final = 2000
STREAM: Final = 480  # tokens of a stream, ten seconds
PER_FRAME: Final = 16  # with fewer, two cores cannot relay 2,000 streams
Document = dict[str, Any]


def key_of(name: str) -> str:
    """Return a caller's key."""
    return f"key-of-{name}"


@contextmanager
def door(model: Document, keys: Mapping[str, float], **server: object) -> Iterator[psutil.Process]:
    """Run the timed engine for a block; return its port."""
    named = [{"name": name, "key": key_of(name), "share": share} for name, share in keys.items()]
    root = {"name": "root", "key": key_of("root"), "scopes": ["admin"]}
    with serving(PORT, {"m": model}, {"keys": [*named, root], **server}, key=key_of("root")) as service:
        yield process_of(service)


def session() -> aiohttp.ClientSession:
    """Return a client without a bound on connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def ask(client: aiohttp.ClientSession, name: str, **fields: object) -> tuple[float, int]:
    """Ask once; return the seconds that the request waited for a slot, and its status."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "stream": True, **fields}
    headers = {"Authorization": f"Bearer {key_of(name)}"}
    async with client.post(f"{URL}/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.content.iter_any():
            pass
        return int(answer.headers.get("X-Roundhouse-Wait-Ms", "0")) / 1000, answer.status


async def used(client: aiohttp.ClientSession) -> dict[str, Document]:
    """Return each key's usage."""
    headers = {"Authorization": f"Bearer {key_of('root')}"}
    async with client.get(f"{URL}/v1/usage?by=key", headers=headers) as answer:
        told = await answer.json()
    return {row["key"]: row for row in told["usage"]}


async def _flood(names: Mapping[str, int], seconds: float, asks: str | None) -> tuple[list[float], dict[str, Document]]:
    """Keep each key's number of requests waiting; return the waits of ``asks``, who asks at times, and the usage."""
    until, waits = time.monotonic() + seconds, list[float]()
    usage: dict[str, Document] = {}
    async with session() as client:

        async def keep_asking(name: str) -> None:
            while time.monotonic() < until:
                _, status = await ask(client, name)
                assert status == 200, status

        async def ask_now_and_then(name: str, tasks: asyncio.TaskGroup) -> None:
            async def once() -> None:
                waits.append((await ask(client, name))[0])

            while time.monotonic() < until:
                tasks.create_task(once())
                await asyncio.sleep(random.expovariate(1 / NOW_AND_THEN_S))

        async with asyncio.TaskGroup() as tasks:
            for name, count in names.items():
                for _ in range(count):
                    tasks.create_task(keep_asking(name))
            if asks is not None:
                tasks.create_task(ask_now_and_then(asks, tasks))
            await asyncio.sleep(until - time.monotonic())
            usage |= await used(client)  # before the rest is served, which is equal for all keys
    return waits, usage


def measure_flood(seconds: float) -> None:
    """Print a flood's cost to others."""
    request_s = TOKENS / 50
    with timed_engine(TOKENS) as port:
        model = {"engine": "attached", "url": f"http://127.0.0.1:{port}", "slots": SLOTS}

        def run(names: Mapping[str, int], asks: str | None = None) -> tuple[list[float], dict[str, Document]]:
            with door(model, SHARES):
                return asyncio.run(_flood(names, seconds, asks))

        alone, _ = run({}, "bob")
        beside, _ = run({"alice": FLOOD}, "bob")
        bound = 2 * _p95(alone) + request_s
        print(f"waits of an occasional client, p95: alone {_p95(alone):.3f} s, beside a flood {_p95(beside):.3f} s")
        print(f"  (at most {bound:.3f} s: twice, and a request of {request_s:g} s)")
        _, usage = run(dict.fromkeys(SHARES, FLOOD))
        tokens = {name: usage[name]["answer_tokens"] for name in SHARES}
        total = sum(tokens.values())
        for name, share in SHARES.items():
            part = tokens[name] / total * sum(SHARES.values())
            print(f"{name}: share {share:g}, got {part:.3f}, off by {100 * (part / share - 1):.1f} %")
        _, single = run({"alice": len(SHARES) * FLOOD})
        ratio = total / single["alice"]["answer_tokens"]
        print(f"throughput: {total / TOKENS / seconds:.1f} requests a second by shares, {ratio:.3f} x one key's")


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[18]


async def _counters(client: aiohttp.ClientSession, port: int) -> dict[str, float]:
    async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    named = (line.split() for line in lines if line.startswith("llamacpp:"))
    return {name.removeprefix("llamacpp:"): float(value) for name, value in named}


async def _use(requests: int, port: int) -> None:
    headers = {"Authorization": f"Bearer {key_of('engine')}"}
    draw = random.Random(17)
    async with session() as client, aiohttp.ClientSession(headers=headers) as engine_client:
        before, left = await _counters(engine_client, port), iter(range(requests))

        async def keep_asking() -> None:
            for number in left:
                words = f"Say {number}. " + "word " * draw.randrange(20)
                fields: Document = {"stream": number % 2 == 0, "max_tokens": draw.randrange(1, 17), "ignore_eos": True}
                if number % 3 == 0:
                    fields["stream_options"] = {"include_usage": True}
                if not fields["stream"]:
                    fields.pop("stream_options", None)
                told = {"messages": [{"role": "user", "content": words}], "cache_prompt": False, **fields}
                _, status = await ask(client, draw.choice(sorted(SHARES)), **told)
                assert status == 200, status

        async with asyncio.TaskGroup() as tasks:
            for _ in range(32):
                tasks.create_task(keep_asking())
        after, told = await _counters(engine_client, port), await used(client)
        until = time.monotonic() + WRITTEN_S
        while sum(row["turns"] for row in told.values()) < requests and time.monotonic() < until:
            told = await used(client)
    ours = {field: sum(row[field] for row in told.values()) for field in ("turns", "prompt_tokens")}
    ours |= {field: sum(row[field] for row in told.values()) for field in ("cached_tokens", "answer_tokens")}
    read = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    written = after["tokens_predicted_total"] - before["tokens_predicted_total"]
    print(f"{requests} requests of {len(told)} keys: {ours}")
    print(f"read: {ours['prompt_tokens'] - ours['cached_tokens']} reported, {read:.0f} counted by the engine")
    print(f"written: {ours['answer_tokens']} reported, {written:.0f} counted by the engine")


def measure_usage(requests: int) -> None:
    """Print reported usage beside the engine's counters."""
    with tempfile.TemporaryDirectory() as folder:
        path = ensure_tiny_model(Path(folder) / "tiny.gguf")
        model = {"engine": "embedded", "model": str(path), "port": PORT + 1, "slots": SLOTS, "context": 4096}
        model |= {"args": {"threads": 1}, "env": {"LLAMA_API_KEY": key_of("engine")}}
        with door(model, SHARES):
            asyncio.run(_use(requests, PORT + 1))


async def _read(readers: int, silent: int) -> list[float]:
    """Return the seconds of each stream that was read to its end."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Go."}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key_of('alice')}\r\nContent-Length: {len(body)}\r\n\r\n"
    never = []
    for _ in range(silent):
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport of a socket has it
        writer.write(head.encode() + body)
        never.append((reader, writer))
    async with session() as client:

        async def one() -> float:
            await asyncio.sleep(random.random())
            began = time.monotonic()
            _, status = await ask(client, "alice")
            assert status == 200, status
            return time.monotonic() - began

        took = await asyncio.gather(*(one() for _ in range(readers)))
    for _, writer in never:
        writer.transport.abort()
    return took


def measure_readers() -> None:
    """Print the cost of clients that never read."""
    with timed_engine(STREAM, PER_FRAME) as port:
        model = {"engine": "attached", "url": f"http://127.0.0.1:{port}", "slots": READERS}
        for name, silent in (("alone", 0), ("beside as many that never read", READERS // 2)):
            with door(model, SHARES, queue=2 * READERS) as process:
                took = asyncio.run(_read(READERS // 2, silent))
                memory = process.memory_info().rss / 1e6
            print(
                f"{READERS // 2} streams of {STREAM} tokens {name}: median {statistics.median(took):.2f} s, longest"
                f" {max(took):.2f} s; the service has {memory:.0f} MB afterwards",
                flush=True,
            )


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("flood", "usage", "readers"))
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    parts = options.part or ("flood", "usage", "readers")
    if "flood" in parts:
        measure_flood(options.seconds)
    if "usage" in parts:
        measure_usage(options.requests)
    if "readers" in parts:
        measure_readers()


if __name__ == "__main__":
    main()

"""Programs of clients on few slots: what is reused of their prompts, and how long they take, through the door and not.

32 made sessions of 8 requests, each of which extends the one before, on 4 slots of the real embedded engine with the
tiny model; or four recorded sessions of coding agents on 2 slots with the small model (``bench/recorded_sessions.py``).
Once straight at the engine, all at a time, as agents do that know of no queue; once through the front door. Reused is
what engines report of the tokens that their session's last request had, prompt and answer. Recorded sessions are cut to
the small model, and so is the memory that llama.cpp keeps prompts in beside its slots: see ``--cache-ram``.

    python -m bench.programs [--made 32] [--requests 8] [--rounds 3]
    python -m bench.programs --sessions DIR [--requests 8] [--rounds 3] [--cache-ram MIB]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.recorded_sessions import CACHE_RAM_MIB, RecordedRequest, read_sessions
from bench.relay import READY_S
from tests.harness.ports import find_ports

PORT: Final = find_ports(4)
RECORDED: Final = 4  # sessions
KEY: Final = "bench"
WORDS: Final = 60  # that a session adds with each request
TOKENS: Final = 24  # of an answer


class Counted:
    """Tokens of prompts: all, those that could have been reused, and those that were."""

    def __init__(self) -> None:
        self.asked = self.reusable = self.reused = self.cached = 0

    def take(self, usage: dict[str, Any], known: int) -> int:
        """Take what an answer tells; return what the next request of its session could reuse."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.asked += usage["prompt_tokens"]
        self.cached += cached
        self.reusable += known
        self.reused += min(known, cached)
        return int(usage["prompt_tokens"] + usage["completion_tokens"])

    @property
    def read(self) -> int:
        """Those that the engine computed."""
        return self.asked - self.cached


Session = Callable[[Callable[..., Awaitable[dict[str, Any]]], Counted], Awaitable[None]]


def made_session(number: int, requests: int) -> Session:
    """Return a session each of whose requests extends the one before with its answer."""

    async def run(ask: Callable[..., Awaitable[dict[str, Any]]], counted: Counted) -> None:
        messages = [{"role": "system", "content": f"You are agent {number}. " + f"rule{number} " * WORDS}]
        known = 0
        for turn in range(requests):
            messages.append({"role": "user", "content": f"word{turn} " * WORDS})
            told = await ask(messages, TOKENS)
            known = counted.take(told["usage"], known)
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})

    return run


def recorded_session(requests: Sequence[RecordedRequest]) -> Session:
    """Return a session as it was recorded: its pauses are the agent's tools at work."""

    async def run(ask: Callable[..., Awaitable[dict[str, Any]]], counted: Counted) -> None:
        for request in requests:
            await asyncio.sleep(request.pause_s)
            told = await ask([{"role": "user", "content": request.prompt}], request.answer)
            counted.take(told["usage"], 0)

    return run


async def run(url: str, sessions: Sequence[Session]) -> tuple[float, Counted]:
    """Run all sessions at once; return the seconds that they took and what was read."""
    counted = Counted()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

        async def one(number: int, session: Session) -> None:
            headers = {"Authorization": f"Bearer {KEY}", "X-Session-Id": f"session-{number}"}

            async def ask(messages: object, tokens: int) -> dict[str, Any]:
                fixed = {"model": "m", "ignore_eos": True, "temperature": 0}
                body = {**fixed, "messages": messages, "max_tokens": tokens}
                async with client.post(url, json=body, headers=headers) as answer:
                    told: dict[str, Any] = await answer.json()
                    assert answer.status == 200, told
                return told

            await session(ask, counted)

        await asyncio.gather(*(one(number, session) for number, session in enumerate(sessions)))
    return time.monotonic() - began, counted


async def wait_served(url: str) -> None:
    """Return when the service is ready."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


def measure(port: int, sessions: Sequence[Session], engine: dict[str, Any]) -> tuple[float, Counted]:
    """Run all sessions at a port of a fresh service: that of its front door, or that of its engine."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = {"engine": "embedded", "port": PORT + 1, "env": {"LLAMA_API_KEY": KEY}, **engine}
        config = {"server": {"port": PORT, "state_dir": str(place / "state")}, "models": {"m": model}}
        (place / "config.yaml").write_text(json.dumps(config))
        serve = [str(Path(sys.executable).parent / "roundhouse"), "serve", "--config", str(place / "config.yaml")]
        with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as service:
            try:
                asyncio.run(wait_served(f"http://127.0.0.1:{PORT}/readyz"))
                return asyncio.run(run(f"http://127.0.0.1:{port}/v1/chat/completions", sessions))
            finally:
                service.terminate()
                service.wait(60)


def main() -> None:
    """Compare both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, help="a folder of recorded sessions", metavar="DIR")
    parser.add_argument("--made", type=int, default=32, help="sessions, where none were recorded")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache-ram", type=int, default=CACHE_RAM_MIB, help="llama.cpp's, for recorded sessions", metavar="MIB"
    )
    options = parser.parse_args()
    if options.sessions is None:
        engine = {"model": "roundhouse:tiny", "slots": 4, "context": 8192, "args": {"threads": 1}}
        sessions = [made_session(number, options.requests) for number in range(options.made)]
    else:
        engine = {"model": "roundhouse:small", "slots": 2, "context": 8192, "args": {"cache-ram": options.cache_ram}}
        recorded = read_sessions(options.sessions, RECORDED, options.requests, 8192)
        sessions = [recorded_session(each) for each in recorded]
    figures: dict[str, list[tuple[float, Counted]]] = {"engine": [], "door": []}
    for _ in range(options.rounds):
        for name, port in (("engine", PORT + 1), ("door", PORT)):
            figures[name].append(measure(port, sessions, engine))
    print(
        f"{len(sessions)} sessions of {options.requests} requests, {engine['slots']} slots, median of {options.rounds}"
    )
    own = statistics.median(seconds for seconds, _ in figures["engine"])
    most = statistics.median(counted.read for _, counted in figures["engine"])
    for name, runs in figures.items():
        seconds = statistics.median(took for took, _ in runs)
        read = statistics.median(counted.read for _, counted in runs)
        line = f"{name:<8}{seconds:>8.2f} s{seconds / own:>8.2f} x{read:>10,.0f} tokens read{read / most:>8.2f} x"
        if options.sessions is None:
            share = statistics.median(counted.reused / counted.reusable for _, counted in runs)
            line += f"{share:>8.3f} of the reusable tokens reused"
        print(line)


if __name__ == "__main__":
    main()

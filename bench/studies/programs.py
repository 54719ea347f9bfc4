"""Client programs on few slots: reused prompt tokens and duration, through the front door and without it.

32 generated sessions of 8 requests, each of which extends the one before, on 4 slots of the real embedded engine with
the tiny model; or four recorded sessions of coding agents on 2 slots with the small model
(``bench/parts/recorded_sessions.py``). Once straight at the engine, all at a time, as agents without a queue do; once
through the front door. Reused are the tokens, as engines report them, that the session's last request had, prompt and
answer. Recorded sessions are cut to the small model, and so is llama.cpp's memory for prompts beside its slots: see
``--cache-ram``.

    python -m bench.studies.programs [--made 32] [--requests 8] [--rounds 3]
    python -m bench.studies.programs --sessions DIR [--requests 8] [--rounds 3] [--cache-ram MIB]
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.parts.recorded_sessions import CACHE_RAM_MIB, RecordedRequest, read_sessions
from bench.parts.services import serving
from tests.harness.ports import find_ports

PORT: Final = find_ports(4)
RECORDED: Final = 4  # number of recorded sessions
KEY: Final = "bench"
WORDS: Final = 60  # words that a session adds with each request
TOKENS: Final = 24  # tokens of an answer


class Counted:
    """Prompt tokens: all, reusable, reused and cached ones."""

    def __init__(self) -> None:
        self.asked = self.reusable = self.reused = self.cached = 0

    def take(self, usage: dict[str, Any], known: int) -> int:
        """Take an answer's usage; return the tokens that its session's next request could reuse."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.asked += usage["prompt_tokens"]
        self.cached += cached
        self.reusable += known
        self.reused += min(known, cached)
        return int(usage["prompt_tokens"] + usage["completion_tokens"])

    @property
    def read(self) -> int:
        """Tokens that the engine computed."""
        return self.asked - self.cached


Session = Callable[[Callable[..., Awaitable[dict[str, Any]]], Counted], Awaitable[None]]


def made_session(number: int, requests: int) -> Session:
    """Return a session in which each request extends the one before with its answer."""

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
    """Return a recorded session; its pauses are the times of the agent's tools."""

    async def run(ask: Callable[..., Awaitable[dict[str, Any]]], counted: Counted) -> None:
        for request in requests:
            await asyncio.sleep(request.pause_s)
            told = await ask([{"role": "user", "content": request.prompt}], request.answer)
            counted.take(told["usage"], 0)

    return run


async def run(url: str, sessions: Sequence[Session]) -> tuple[float, Counted]:
    """Run all sessions at once; return the seconds and the token counts."""
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


def measure(port: int, sessions: Sequence[Session], engine: dict[str, Any]) -> tuple[float, Counted]:
    """Run all sessions at a port of a fresh service: its front door's or its engine's."""
    model = {"engine": "embedded", "port": PORT + 1, "env": {"LLAMA_API_KEY": KEY}, **engine}
    with serving(PORT, {"m": model}):
        return asyncio.run(run(f"http://127.0.0.1:{port}/v1/chat/completions", sessions))


def main() -> None:
    """Compare both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=Path, help="a folder of recorded sessions", metavar="DIR")
    parser.add_argument("--made", type=int, default=32, help="generated sessions, if none are recorded")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache-ram",
        type=int,
        default=CACHE_RAM_MIB,
        help="MiB of llama.cpp's prompt cache, for recorded sessions",
        metavar="MIB",
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

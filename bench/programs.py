"""Programs of clients on few slots: what is reused of their prompts, and how long they take, through the door and not.

32 sessions of 8 requests, each of which extends the one before, on 4 slots of the real embedded engine with the tiny
model: once straight at the engine, all 32 at a time, as agents do that know of no queue; once through the front door.
Reused is what engines report of the tokens that their session's last request had, prompt and answer.

    python -m bench.programs [--sessions 32] [--requests 8] [--rounds 3]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from bench.relay import READY_S
from tests.harness.ports import find_ports
from workers.engine.embedded.tiny_model import ensure_tiny_model

PORT: Final = find_ports(4)
SLOTS: Final = 4
KEY: Final = "bench"
WORDS: Final = 60  # that a session adds with each request
TOKENS: Final = 24  # of an answer


async def run(url: str, sessions: int, requests: int) -> tuple[float, float]:
    """Return seconds, and the share of the reusable tokens that was reused."""
    reusable = reused = 0

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        nonlocal reusable, reused
        messages = [{"role": "system", "content": f"You are agent {number}. " + f"rule{number} " * WORDS}]
        known = 0
        for turn in range(requests):
            messages.append({"role": "user", "content": f"word{turn} " * WORDS})
            body = {"model": "m", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
            async with client.post(url, json=body) as answer:
                told = await answer.json()
                assert answer.status == 200, told
            usage = told["usage"]
            reusable += known
            reused += min(known, usage["prompt_tokens_details"]["cached_tokens"])
            known = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({"role": "assistant", "content": told["choices"][0]["message"]["content"]})

    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"Authorization": f"Bearer {KEY}"}
    began = time.monotonic()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as client:
        await asyncio.gather(*(one(client, number) for number in range(sessions)))
    return time.monotonic() - began, reused / reusable


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


def measure(port: int, sessions: int, requests: int) -> tuple[float, float]:
    """Run all sessions at a port of a fresh service: that of its front door, or that of its engine."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = ensure_tiny_model(place / "tiny.gguf")
        engine = {"engine": "embedded", "model": str(model), "port": PORT + 1, "slots": SLOTS, "context": 8192}
        engine |= {"args": {"threads": 1}, "env": {"LLAMA_API_KEY": KEY}}
        config = {"server": {"port": PORT, "state_dir": str(place / "state")}, "models": {"m": engine}}
        (place / "config.yaml").write_text(json.dumps(config))
        serve = [str(Path(sys.executable).parent / "roundhouse"), "serve", "--config", str(place / "config.yaml")]
        with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as service:
            try:
                asyncio.run(wait_served(f"http://127.0.0.1:{PORT}/readyz"))
                return asyncio.run(run(f"http://127.0.0.1:{port}/v1/chat/completions", sessions, requests))
            finally:
                service.terminate()
                service.wait(60)


def main() -> None:
    """Compare both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures: dict[str, list[tuple[float, float]]] = {"engine": [], "door": []}
    for _ in range(options.rounds):
        for name, port in (("engine", PORT + 1), ("door", PORT)):
            figures[name].append(measure(port, options.sessions, options.requests))
    print(f"{options.sessions} sessions of {options.requests} requests on {SLOTS} slots, median of {options.rounds}")
    own = statistics.median(seconds for seconds, _ in figures["engine"])
    for name, runs in figures.items():
        seconds, share = (statistics.median(run[place] for run in runs) for place in (0, 1))
        print(f"{name:<8}{seconds:>8.2f} s{seconds / own:>8.2f} x{share:>8.3f} of the reusable tokens reused")


if __name__ == "__main__":
    main()

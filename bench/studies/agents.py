"""Agents on many devices through ``InferenceEngine``, on timed engines: waits and losses.

``servers``: p95 of two devices with two servers each, beside one server's. ``load``: 1,000 requests a minute over 8
devices: lost, doubled, memory. ``kills``: an engine killed every 10 s while 16 agents talk: lost, doubled. Arrivals are
random (exponential), at the same load for each server; the first loads of models are not measured.

    python -m bench.studies.agents servers [--seconds 60]
    python -m bench.studies.agents load [--seconds 600]
    python -m bench.studies.agents kills [--seconds 300]
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from roundhouse import EngineKind, InferenceEngine, WorkerSpec
from tests.conftest import ENGINE_PROGRAM

TOKENS, INTERVAL_S, PREFILL_S = 20, 0.02, 0.05
ANSWER_S = TOKENS * INTERVAL_S + PREFILL_S
KILL_EVERY_S = 10.0
LATE_S = 60.0  # time for requests still under way at the end


def engine_on(folder: Path, devices: int, each: int, first_port: int = 9730) -> InferenceEngine:
    """Return an engine on invented devices."""
    inventory = folder / "devices.json"
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "made up", "memory_mib": 80_000} for n in range(devices)]
    inventory.write_text(json.dumps({"devices": gpus}))
    spec = WorkerSpec(
        engine=EngineKind.LLAMA_SERVER,
        slots=1,
        command=(sys.executable, "-I", "-S", str(ENGINE_PROGRAM)),
        args={"tokens": TOKENS, "interval": INTERVAL_S, "prefill": PREFILL_S, "echo": r"PROMPT-\d+-\d+"},
    )
    return InferenceEngine(
        spec,
        inventory=inventory,
        max_agents_per_gpu=each,
        ports=(first_port, first_port + devices * each - 1),
    )


class Tally:
    """Counts of requests and their results."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: Counter[str] = Counter()
        self.took: list[float] = []
        self.failed: list[str] = []

    async def ask(self, engine: InferenceEngine, agent: str) -> None:
        """Ask once; the answer must repeat its question's words."""
        self.asked += 1
        words = [f"PROMPT-{self.asked}-{number}" for number in range(TOKENS)]
        began = time.monotonic()
        try:
            answer = await engine.run(agent, " ".join(words), step="act", max_tokens=TOKENS)
        except Exception as error:  # noqa: BLE001 - every loss is counted
            self.failed.append(f"{type(error).__name__}: {error}")
            return
        self.answers["right" if answer.split() == words else "wrong"] += 1
        self.took.append(time.monotonic() - began)

    def line(self) -> str:
        """Return the counts as a line."""
        right, wrong = self.answers["right"], self.answers["wrong"]
        return f"{self.asked} asked, {right} right, {wrong} wrong, {len(self.failed)} failed {self.failed[:3]}"


async def arrive(seconds: float, rate: float, ask: Callable[[int], Awaitable[None]]) -> None:
    """Ask at random moments, ``rate`` times a second, and wait for all answers."""
    dice, end, number = random.Random(5), time.monotonic() + seconds, 0
    async with asyncio.timeout(seconds + LATE_S), asyncio.TaskGroup() as tasks:
        while time.monotonic() < end:
            tasks.create_task(ask(number))  # type: ignore[arg-type]
            number += 1
            await asyncio.sleep(dice.expovariate(rate))


async def register(engine: InferenceEngine, agents: int, models: int) -> list[str]:
    """Register agents, and load every checkpoint once."""
    names = [f"a{n}" for n in range(agents)]
    for number, name in enumerate(names):
        await engine.register_agent(agent_id=name, model_ckpt=f"m{number % models}")
    await asyncio.gather(*(engine.run(name, "PROMPT-0-0", step="act", max_tokens=5) for name in names[:models]))
    return names


async def ask_in_turn(tally: Tally, engine: InferenceEngine, names: list[str], number: int) -> None:
    """Ask the next agent."""
    await tally.ask(engine, names[number % len(names)])


async def servers(folder: Path, seconds: float) -> None:
    """Compare p95 at the same load per server."""
    found = []
    for devices, each in ((1, 1), (2, 2)):
        count, tally = devices * each, Tally()
        async with engine_on(folder, devices, each) as engine:
            names = await register(engine, 8 * count, count)
            await arrive(seconds, 0.6 * count / ANSWER_S, partial(ask_in_turn, tally, engine, names))
        p95 = sorted(tally.took)[len(tally.took) * 95 // 100]
        found.append(p95)
        print(f"{devices} devices x {each}: {tally.line()}; p50 {statistics.median(tally.took):.2f} s, p95 {p95:.2f} s")
    print(f"p95 {found[1] / found[0]:.2f} x of one server (bound 1.2)")


async def load(folder: Path, seconds: float) -> None:
    """Ask 1,000 times per minute over 8 devices with two servers each."""
    tally, memory = Tally(), []

    async def look() -> None:
        while True:
            await asyncio.sleep(seconds / 10)
            memory.append(psutil.Process().memory_info().rss / 2**20)

    async with engine_on(folder, 8, 2) as engine:
        names = await register(engine, 64, 16)
        looking = asyncio.create_task(look())
        await arrive(seconds, 1000 / 60, partial(ask_in_turn, tally, engine, names))
        looking.cancel()
    p95 = sorted(tally.took)[len(tally.took) * 95 // 100]
    print(f"{tally.line()}; p50 {statistics.median(tally.took):.2f} s, p95 {p95:.2f} s")
    print("memory in MiB: " + " ".join(f"{each:.0f}" for each in memory))


async def kills(folder: Path, seconds: float) -> None:
    """Kill a lane's engine every 10 s while 16 agents talk."""
    tally, killed, news = Tally(), 0, Counter[str]()
    end = time.monotonic() + seconds
    async with engine_on(folder, 2, 2) as engine:
        names = await register(engine, 16, 4)

        async def follow() -> None:
            async for event in engine.events():
                news[event["event"]] += 1

        async def talk(name: str) -> None:
            while time.monotonic() < end:
                await tally.ask(engine, name)

        following = asyncio.create_task(follow())
        async with asyncio.timeout(seconds + LATE_S), asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(talk(name))
            while time.monotonic() < end - KILL_EVERY_S:
                await asyncio.sleep(KILL_EVERY_S)
                killed += kill_one(random.Random(killed))
    await following
    print(f"{killed} engines killed in {seconds:g} s; {tally.line()}; {dict(news)}")
    print(f"an answer: p50 {statistics.median(tally.took):.2f} s, longest {max(tally.took):.2f} s")


def kill_one(dice: random.Random) -> int:
    """Kill one of our engines; return the number killed."""
    engines = []
    for child in psutil.Process().children(recursive=True):
        try:
            if str(ENGINE_PROGRAM) in child.cmdline():
                engines.append(child.pid)
        except psutil.Error:
            continue
    if not engines:
        return 0
    os.kill(dice.choice(engines), signal.SIGKILL)
    return 1


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("servers", "load", "kills"))
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    ways: dict[str, tuple[Callable[[Path, float], Any], float]] = {
        "servers": (servers, 60.0), "load": (load, 600.0), "kills": (kills, 300.0),
    }  # fmt: skip
    way, usual = ways[options.what]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(way(Path(folder), options.seconds or usual))


if __name__ == "__main__":
    main()

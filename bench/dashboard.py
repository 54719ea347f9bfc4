"""What those who look at the dashboard cost the service: its CPU with no viewer, with one, and with a hundred.

A job of 10,000 conversations runs meanwhile on an engine that says its tokens by the clock, 200 turns a second. Phases
with and without viewers alternate, and what the turns themselves cost is taken from those without: so a machine that
does other work as well, and turns that come slower for it, count for neither.

python -m bench.dashboard [--seconds N] [--rounds N]
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil

from tests.harness.ports import find_ports

PORT: Final = find_ports(4)
ROUNDHOUSE: Final = str(Path(sys.executable).parent / "roundhouse")
CONVERSATIONS: Final = 10_000
SLOTS, TOKENS = 64, 16  # of 20 ms: 64 turns in 0.32 s are 200 a second
VIEWERS: Final = {1: 0.05, 100: 0.10}  # and the part of a core that they may cost
SETTLE_S: Final = 15.0
HEAD: Final = b"GET /v1/overview/events HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"


def main() -> None:
    """Print what each number of viewers costs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with serving() as service:
        asyncio.run(_measure(service, options.seconds, options.rounds))


@contextlib.contextmanager
def serving() -> Iterator[psutil.Process]:
    """Run the service and its engine for a block."""
    engine = [sys.executable, "-m", "bench.timed_engine", str(TOKENS), "at-once"]
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(engine, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as timed,
    ):
        try:
            assert timed.stdout is not None
            config = _config(Path(name), int(timed.stdout.readline()))
            with subprocess.Popen([ROUNDHOUSE, "serve", "--config", str(config)], stderr=subprocess.DEVNULL) as service:
                try:
                    yield psutil.Process(service.pid)
                finally:
                    service.kill()
        finally:
            timed.kill()


def _config(folder: Path, engine_port: int) -> Path:
    model = {"engine": "attached", "url": f"http://127.0.0.1:{engine_port}", "slots": SLOTS, "model": "timed"}
    config = {"server": {"port": PORT, "state_dir": str(folder / "state")}, "models": {"m": model}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


async def _measure(service: psutil.Process, seconds: float, rounds: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=120, trust_env=False) as http:
        await post_load(http)
        bare: list[tuple[float, float]] = []
        watched: dict[int, list[tuple[float, float]]] = {count: [] for count in VIEWERS}
        for _ in range(rounds):
            for count in VIEWERS:
                bare.append(await _phase(service, http, seconds, 0))
                watched[count].append(await _phase(service, http, seconds, count))
    a_turn = sum(cpu for cpu, _ in bare) / sum(turns for _, turns in bare)
    rate = sum(turns for _, turns in bare) / (seconds * len(bare))
    alone = median(cpu / seconds for cpu, _ in bare)
    print(f"no viewer: {alone:.1%} of a core at {rate:.0f} turns/s, {a_turn * 1e3:.2f} ms of CPU a turn")
    for count, bound in VIEWERS.items():
        costs = [(cpu - turns * a_turn) / seconds for cpu, turns in watched[count]]
        turns_s = sum(turns for _, turns in watched[count]) / (seconds * rounds)
        told = f"{median(costs):.1%} of a core more ({', '.join(f'{cost:.1%}' for cost in costs)})"
        print(
            f"viewers: {count}: {told}, bound {bound:.0%}; {turns_s:.0f} turns/s, {turns_s / rate:.2f} of those without"
        )


async def post_load(http: httpx.AsyncClient) -> str:
    """Post the job, once the service is ready; return its id when its turns come steadily."""
    await until_ready(http)
    job = {"rounds": 20, "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}]}
    answer = await http.post("/v1/jobs", json={**job, "conversations": [{"prompt": "Go."}] * CONVERSATIONS})
    answer.raise_for_status()
    await asyncio.sleep(SETTLE_S)
    return str(answer.json()["id"])


async def _phase(service: psutil.Process, http: httpx.AsyncClient, seconds: float, viewers: int) -> tuple[float, float]:
    """Return the CPU seconds of the service while some look, and how many turns ended meanwhile."""
    async with _looking(viewers):
        await asyncio.sleep(1.0)
        turns, cpu = await _ended(http), service.cpu_times()
        began_at = time.monotonic()
        await asyncio.sleep(seconds)
        spent = service.cpu_times()
        took_s = time.monotonic() - began_at
        ended = await _ended(http) - turns
    scale = seconds / took_s
    return (spent.user + spent.system - cpu.user - cpu.system) * scale, ended * scale


@contextlib.asynccontextmanager
async def _looking(viewers: int) -> AsyncIterator[None]:
    frames = [0] * viewers
    tasks = [asyncio.create_task(_look(frames, place)) for place in range(viewers)]
    try:
        yield
        assert all(frames), "a viewer was shown nothing"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _look(frames: list[int], place: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=1 << 20)
    try:
        writer.write(HEAD % PORT)
        while line := await reader.readline():
            frames[place] += line.startswith(b"event: frame")
        frames[place] = 0  # it was left alone
    finally:
        writer.close()


async def _ended(http: httpx.AsyncClient) -> int:
    used = (await http.get("/v1/usage", params={"by": ""})).json()["usage"]
    return sum(int(row["turns"]) for row in used)


async def until_ready(http: httpx.AsyncClient) -> None:
    """Return when the service is ready."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if (await http.get("/readyz")).is_success:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the service is not ready")


if __name__ == "__main__":
    main()

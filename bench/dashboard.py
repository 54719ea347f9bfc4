"""The cost of the dashboard's viewers: the service's CPU with no viewer, with one, and with a hundred.

A job of 10,000 conversations runs meanwhile on a timed engine, 200 turns a second. Phases with and without viewers
alternate, and the turns' own cost is taken from the phases without: so other work on the machine, and turns slowed down
by it, count for neither.

    python -m bench.dashboard [--seconds N] [--rounds N] [--settle-s N]
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from statistics import median
from typing import Final

from bench.parts.services import cpu_s, process_of, serving
from bench.parts.timed_engine import timed_engine
from tests.harness.ports import find_ports
from tests.harness.service import Service

PORT: Final = find_ports(4)
CONVERSATIONS: Final = 10_000
SLOTS, TOKENS = 64, 16  # tokens of 20 ms: 64 turns in 0.32 s are 200 per second
VIEWERS: Final = {1: 0.05, 100: 0.10}  # numbers of viewers, with the share of a core that they may cost
SETTLE_S: Final = 15.0
HEAD: Final = b"GET /v1/overview/events HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n"


def main() -> None:
    """Print the cost of each number of viewers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="seconds until turns end at a steady rate")
    options = parser.parse_args()
    with timed_service() as service:
        post_load(service, options.settle_s)
        asyncio.run(_measure(service, options.seconds, options.rounds))


@contextlib.contextmanager
def timed_service() -> Iterator[Service]:
    """Run the service and its engine for a block."""
    with timed_engine(TOKENS, "at-once") as port:
        model = {"engine": "attached", "url": f"http://127.0.0.1:{port}", "slots": SLOTS, "model": "timed"}
        with serving(PORT, {"m": model}) as service:
            yield service


def post_load(service: Service, settle_s: float = SETTLE_S) -> str:
    """Post the job; return its id when its turns end at a steady rate."""
    job = {"rounds": 20, "agents": [{"id": "a", "model": "m"}, {"id": "b", "model": "m"}]}
    job_id = service.post_job({**job, "conversations": [{"prompt": "Go."}] * CONVERSATIONS})
    time.sleep(settle_s)
    return job_id


async def _measure(service: Service, seconds: float, rounds: int) -> None:
    bare: list[tuple[float, float]] = []
    watched: dict[int, list[tuple[float, float]]] = {count: [] for count in VIEWERS}
    for _ in range(rounds):
        for count in VIEWERS:
            bare.append(await _phase(service, seconds, 0))
            watched[count].append(await _phase(service, seconds, count))
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


async def _phase(service: Service, seconds: float, viewers: int) -> tuple[float, float]:
    """Post the job once the service is ready; return its id when its turns are steady."""
    process = process_of(service)
    async with _looking(viewers):
        await asyncio.sleep(1.0)
        turns, before_s = await _ended(service), cpu_s(process)
        began_at = time.monotonic()
        await asyncio.sleep(seconds)
        used_s = cpu_s(process) - before_s
        took_s = time.monotonic() - began_at
        ended = await _ended(service) - turns
    scale = seconds / took_s
    return used_s * scale, ended * scale


@contextlib.asynccontextmanager
async def _looking(viewers: int) -> AsyncIterator[None]:
    frames = [0] * viewers
    tasks = [asyncio.create_task(_look(frames, place)) for place in range(viewers)]
    try:
        yield
        assert all(frames), "a viewer saw nothing"
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
        frames[place] = 0  # the service ended the stream
    finally:
        writer.close()


async def _ended(service: Service) -> int:
    used = await asyncio.to_thread(service.get, "/v1/usage?by=")
    return sum(int(row["turns"]) for row in used["usage"])


if __name__ == "__main__":
    main()

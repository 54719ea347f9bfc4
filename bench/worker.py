"""A worker's costs: idle CPU, memory with 256 requests in flight, restart after SIGKILL.

Each figure stands beside its bound (specification, "Performance bounds"). The restart is compared with the engine's own
cold start in the same run, since machines differ.

    python -m bench.worker [--idle-s N] [--restarts N]
"""

import argparse
import asyncio
import logging
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from bench.parts.services import cpu_s, process_of, serving
from tests.harness.ports import find_ports
from tests.harness.service import scripted_model
from tests.harness.waiting import wait_for
from workers import EngineKind, RestartPolicy, Worker, WorkerSpec
from workers.engine.embedded.tiny_model import ensure_tiny_model
from workers.states import WorkerState

IN_FLIGHT = 256
PORT = find_ports(4)


async def idle(model: Path, seconds: float) -> None:
    """Return the CPU seconds of one process."""
    async with Worker(WorkerSpec(engine=EngineKind.EMBEDDED, model=str(model), port=PORT)) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        both = [psutil.Process(), psutil.Process(psutil.Process(pid).ppid())]
        await asyncio.sleep(1)
        before = [cpu_s(process) for process in both]
        await asyncio.sleep(seconds)
        used = [cpu_s(process) - was for process, was in zip(both, before, strict=True)]
    share, (ours, guardian) = 100 * sum(used) / seconds, used
    print(f"idle worker: {share:.3f} % of a core (Roundhouse {ours:.2f} s, guardian {guardian:.2f} s of {seconds:g} s;"
          " bound 0.2 %)")  # fmt: skip


async def restart(model: Path, times: int) -> None:
    """Measure the time from SIGKILL to READY, beside the same engine's cold start."""
    cold, back = [], []
    for _ in range(times):
        policy = RestartPolicy(initial_s=0.001, failures=1000)
        spec = WorkerSpec(engine=EngineKind.EMBEDDED, model=str(model), port=PORT, restart=policy)
        began_at = time.monotonic()
        async with Worker(spec) as worker:
            cold.append(time.monotonic() - began_at)
            pid = worker.snapshot().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
            while worker.now.state is WorkerState.READY:  # noqa: ASYNC110 - for a millisecond or two
                await asyncio.sleep(0.001)
            await worker.supervisor.wait_ready()
            back.append(time.monotonic() - killed_at)
    more = statistics.median(back) - statistics.median(cold)
    print(f"restart: cold start {statistics.median(cold):.3f} s, SIGKILL to READY {statistics.median(back):.3f} s,"
          f" {more:+.3f} s (bound +0.5 s; backoff 1 ms; median of {times})")  # fmt: skip


def memory() -> None:
    """Measure the whole service with 256 requests in flight, without the engine."""
    model = scripted_model(PORT, slots=IN_FLIGHT, tokens=100_000, interval=1.0)
    with serving(PORT + 1, {"m": model}) as service:
        talks = [{"prompt": "word " * 400} for _ in range(IN_FLIGHT)]
        service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": talks})
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == IN_FLIGHT, "all slots are in use", 60)
        time.sleep(5)
        ours = [process_of(service), *process_of(service).children()]
        rss = [process.memory_info().rss / 1e6 for process in ours]
    print(f"{IN_FLIGHT} requests in flight: {sum(rss):.0f} MB (service {rss[0]:.0f}, guardian {rss[1]:.0f};"
          " bound 150 MB)")  # fmt: skip


def main() -> None:
    """Measure all three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--restarts", type=int, default=5)
    options = parser.parse_args()
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_tiny_model(Path(folder) / "tiny.gguf")
        asyncio.run(restart(model, options.restarts))
        memory()
        asyncio.run(idle(model, options.idle_s))


if __name__ == "__main__":
    main()

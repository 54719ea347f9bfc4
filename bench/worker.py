"""What a worker costs and how fast it is back: idle CPU, memory with 256 requests in flight, restart after SIGKILL.

Each figure stands beside its bound (specification, "Performance bounds"); the restart is compared with the engine's own
cold start in the same run, since machines differ.
"""

import asyncio
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from tests.harness.ports import find_ports
from workers import EngineKind, RestartPolicy, Worker, WorkerSpec
from workers.engine.embedded.tiny_model import ensure_tiny_model
from workers.states import WorkerState

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "tests" / "harness" / "programs" / "engine.py"
IDLE_S = 30.0
RESTARTS = 5
IN_FLIGHT = 256
PORT = find_ports(4)


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of one process."""
    times = process.cpu_times()
    return times.user + times.system


async def idle(model: Path) -> None:
    """Measure a worker that has nothing to do: ours and its guardian's ticks, not the engine's."""
    async with Worker(WorkerSpec(engine=EngineKind.EMBEDDED, model=str(model), port=PORT)) as worker:
        pid = worker.snapshot().pid
        assert pid is not None
        both = [psutil.Process(), psutil.Process(psutil.Process(pid).ppid())]
        await asyncio.sleep(1)
        before = [cpu_s(process) for process in both]
        await asyncio.sleep(IDLE_S)
        used = [cpu_s(process) - was for process, was in zip(both, before, strict=True)]
    share = 100 * sum(used) / IDLE_S
    print(f"idle worker: {share:.3f} % of a core (Roundhouse {used[0]:.2f} s, guardian {used[1]:.2f} s of {IDLE_S:g} s;"
          " bound 0.2 %)")  # fmt: skip


async def restart(model: Path) -> None:
    """Measure from SIGKILL to READY, beside the cold start of the same engine."""
    cold, back = [], []
    for _ in range(RESTARTS):
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
          f" {more:+.3f} s (bound +0.5 s; backoff 1 ms; median of {RESTARTS})")  # fmt: skip


def memory(folder: Path) -> None:
    """Measure the whole service with 256 requests in flight, the engine itself apart."""
    config = {
        "server": {"port": PORT + 1, "state_dir": str(folder / "state")},
        "models": {"m": {
            "engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE)],
            "args": {"tokens": 100_000, "interval": 1.0}, "port": PORT, "slots": IN_FLIGHT,
        }},
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(config))
    serve = [str(Path(sys.executable).parent / "roundhouse"), "serve", "--config", str(folder / "config.yaml")]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as service:
        try:
            until_in_use(0)
            talks = [{"prompt": "word " * 400} for _ in range(IN_FLIGHT)]
            call("/v1/jobs", {"agents": [{"id": "a", "model": "m"}], "conversations": talks})
            until_in_use(IN_FLIGHT)
            time.sleep(5)
            ours = [psutil.Process(service.pid), *psutil.Process(service.pid).children()]
            rss = [process.memory_info().rss / 1e6 for process in ours]
        finally:
            service.terminate()
            service.terminate()
    print(f"{IN_FLIGHT} requests in flight: {sum(rss):.0f} MB (service {rss[0]:.0f}, guardian {rss[1]:.0f};"
          " bound 150 MB)")  # fmt: skip


def call(path: str, body: object = None) -> dict[str, object]:
    """Return the service's answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT + 1}{path}", data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        told: dict[str, object] = json.load(answer)
    return told


def until_in_use(slots: int) -> None:
    """Return when the worker is ready and so many of its slots are in use."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            worker = call("/v1/workers/m-0")
        except OSError:
            time.sleep(0.1)
            continue
        if worker["state"] == "ready" and worker["slots"] == {"total": IN_FLIGHT, "in_use": slots, "held": 0}:
            return
        time.sleep(0.1)
    sys.exit(f"not within 60 s: {slots} slots in use")


def main() -> None:
    """Measure all three."""
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        model = ensure_tiny_model(Path(folder) / "tiny.gguf")
        asyncio.run(restart(model))
        memory(Path(folder))
        asyncio.run(idle(model))


if __name__ == "__main__":
    main()

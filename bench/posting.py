"""How fast jobs are taken: durable single-conversation jobs a second at 64 clients, and one of 10,000 conversations.

Beside it, in the same run, what the same rows cost when each job is committed by itself, with no HTTP at all; and how
soon a service serves again that has 10,000 unfinished conversations in its store.

python -m bench.posting [--seconds N]
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

import httpx
import yaml

from service.conversations.job import JobId
from service.conversations.job_faults import JobRules
from service.conversations.job_parser import parse_job
from service.conversations.limits import Limits
from service.store.claims import Claims
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.records import NewJob
from tests.harness.ports import find_ports

PORT = find_ports(4)
CLIENTS = 64
PACE = 1050  # jobs a second: what has to be reached, and a little more
PROCESSES = 1
ROUNDHOUSE = str(Path(sys.executable).parent / "roundhouse")
ENGINE = Path(__file__).parents[1] / "tests" / "harness" / "programs" / "engine.py"
JOB = {
    "name": "posted",
    "agents": [{"id": "a", "model": "m", "system": "You answer.", "params": {"temperature": 0.7}}],
    "conversations": [{"prompt": "What is the capital of France? " * 8}],
}
BODY = json.dumps(JOB).encode()


def main() -> None:
    """Print a line for each number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "server": {"state_dir": str(folder / "state"), "port": PORT, "drain_s": 0},
            "models": {"m": {
                "engine": "llama-server", "command": [sys.executable, "-I", "-S", str(ENGINE)],
                "args": {"tokens": 3, "interval": 5}, "port": PORT + 1, "slots": 4,
            }},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        service = _serve(folder)
        try:
            rate = 0.0
            for pace in (PACE, None):
                latencies = _post_at_once(options.seconds, pace)
                rate = len(latencies) / options.seconds
                cut = quantiles(latencies, n=100)
                told = "as fast as it goes" if pace is None else f"{pace} a second asked for"
                print(f"{CLIENTS} clients, {told}: {rate:.0f} durable jobs/s, p50 {cut[49] * 1e3:.1f} ms,"
                  f" p99 {cut[98] * 1e3:.1f} ms (bounds 1000/s and 100 ms)", flush=True)  # fmt: skip
        finally:
            _stop(service)
        alone = _commit_one_by_one(folder / "alone")
        print(
            f"the same rows, one commit a job, no HTTP: {alone:.0f} jobs/s; ours is {rate / alone:.2f} of it",
            flush=True,
        )
        (folder / "state" / FILE_NAME).unlink()
        for rest in (folder / "state").glob(f"{FILE_NAME}-*"):
            rest.unlink()
        service = _serve(folder)
        try:
            large = {**JOB, "conversations": [{"prompt": f"Question {number}"} for number in range(10_000)]}
            at = time.perf_counter()
            httpx.post(f"http://127.0.0.1:{PORT}/v1/jobs", json=large, timeout=60, trust_env=False).raise_for_status()
            print(f"one job of 10,000 conversations: {time.perf_counter() - at:.2f} s (bound 1 s)", flush=True)
        finally:
            service.kill()
            service.wait()
        at = time.perf_counter()
        service = _serve(folder)
        print(
            f"serving again with 10,000 unfinished conversations: {time.perf_counter() - at:.2f} s (bound 2 s)",
            flush=True,
        )
        _stop(service)


def _serve(folder: Path) -> subprocess.Popen[bytes]:
    log = (folder / "log").open("ab")
    service = subprocess.Popen([ROUNDHOUSE, "serve", "--config", str(folder / "config.yaml")], stdout=log, stderr=log)
    until = time.monotonic() + 30
    with httpx.Client(trust_env=False) as http:
        while time.monotonic() < until:
            try:
                if http.get(f"http://127.0.0.1:{PORT}/healthz").status_code == 200:
                    return service
            except httpx.TransportError:
                time.sleep(0.01)
    raise TimeoutError((folder / "log").read_text())


def _stop(service: subprocess.Popen[bytes]) -> None:
    service.send_signal(signal.SIGTERM)
    service.wait(30)


def _post_at_once(seconds: float, pace: int | None) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        parts = pool.starmap(_post_in_process, [(PORT, CLIENTS // PROCESSES, seconds, pace)] * PROCESSES)
    return [latency for part in parts for latency in part]


def _post_in_process(port: int, clients: int, seconds: float, pace: int | None) -> list[float]:
    """Post to a port that is given: a process that is spawned imports this file anew, and would find another."""
    return asyncio.run(_clients(port, clients, seconds, pace))


async def _clients(port: int, clients: int, seconds: float, pace: int | None) -> list[float]:
    latencies: list[float] = []
    begin = time.perf_counter()
    every_s = 0.0 if pace is None else clients / pace
    starts = [begin + every_s * number / clients for number in range(clients)]
    await asyncio.gather(*(_client(port, at, every_s, begin + seconds, latencies) for at in starts))
    return latencies


async def _client(port: int, due: float, every_s: float, until: float, latencies: list[float]) -> None:
    """Post until the end; at a pace, each wait counts from when the post was due."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(BODY)
    )
    while time.perf_counter() < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        at = due if every_s else time.perf_counter()
        due += every_s
        writer.write(head + BODY)
        headers = await reader.readuntil(b"\r\n\r\n")
        length = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
        assert headers.startswith(b"HTTP/1.1 202"), body
        latencies.append(time.perf_counter() - at)
    writer.close()


def _commit_one_by_one(folder: Path) -> float:
    folder.mkdir()
    database = SqliteDatabase(folder / FILE_NAME)
    database.prepare()
    membership, connection = database.membership(), database.connect_writer()
    connection.begin()
    membership.register(connection)
    connection.commit()
    claims = Claims(membership)
    rules = JobRules(models=["m"], limits=Limits())
    job = parse_job(JOB, JobId("x"), rules)
    count, until = 0, time.perf_counter() + 3.0
    while time.perf_counter() < until:
        count += 1
        each = NewJob(
            job=type(job)(**{name: getattr(job, name) for name in job.__struct_fields__} | {"id": JobId(f"j{count}")}),
            document=BODY.decode(), body_hash="h", idempotency_key=None, created_at=datetime.now(UTC),
        )  # fmt: skip
        connection.begin()
        claims.begin_group()
        claims.keep(claims.post(connection, each, claims=True)[1])
        connection.commit()
    connection.close()
    return count / 3.0


if __name__ == "__main__":
    main()

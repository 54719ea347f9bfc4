"""Speed of posting: durable single-conversation jobs per second at 64 clients, and one job of 10,000 conversations.

``jobs``: durable jobs of one conversation a second from 64 clients, beside the same rows committed one by one without
HTTP; then a job of 10,000 conversations, and the start of a service that has them in its store. ``queued``: turns a
second and memory of the whole service with 100,000 queued conversations, beside 1,000.

    python -m bench.posting [--part jobs queued] [--seconds N] [--queued N] [--agents N]
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles

from bench.parts.services import process_of, serving
from service.conversations.document.job_faults import JobRules
from service.conversations.document.job_parser import parse_job
from service.conversations.document.limits import Limits
from service.conversations.job.job import JobId
from service.store.claims import Claims
from service.store.databases.sqlite import FILE_NAME, SqliteDatabase
from service.store.records import NewJob
from tests.harness.ports import find_ports
from tests.harness.service import Service, scripted_model

PORT = find_ports(4)
CLIENTS = 64
PACE = 1050  # jobs a second: a little more than the bound
COMMITS_S = 3.0  # time for which rows are committed without HTTP
FEW, A_JOB = 1_000, 10_000  # conversations
SLOTS = 8
JOB = {
    "name": "posted",
    "agents": [{"id": "a", "model": "m", "system": "You answer.", "params": {"temperature": 0.7}}],
    "conversations": [{"prompt": "What is the capital of France? " * 8}],
}
BODY = json.dumps(JOB).encode()


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("jobs", "queued"), default=("jobs", "queued"))
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds of a measurement; default: 10, queued 20")
    parser.add_argument("--queued", type=int, default=100_000, help="conversations")
    parser.add_argument("--agents", type=int, default=1, help="agents of a queued conversation")
    options = parser.parse_args()
    if "jobs" in options.part:
        measure_jobs(options.seconds or 10.0)
    if "queued" in options.part:
        compare_queues(options.queued, options.agents, options.seconds or 20.0)


def measure_jobs(seconds: float) -> None:
    """Print a line for each number."""
    model = scripted_model(PORT + 1, slots=4, tokens=3, interval=5)
    with serving(PORT, {"m": model}) as service:
        rate = 0.0
        for pace in (PACE, None):
            latencies = _post_at_once(seconds, pace)
            rate = len(latencies) / seconds
            cut = quantiles(latencies, n=100)
            told = "as fast as it goes" if pace is None else f"at {pace} a second"
            print(f"{CLIENTS} clients, {told}: {rate:.0f} durable jobs/s, p50 {cut[49] * 1e3:.1f} ms,"
                  f" p99 {cut[98] * 1e3:.1f} ms (bounds 1000/s and 100 ms)", flush=True)  # fmt: skip
        service.stop()
        alone = _commit_one_by_one(service.folder / "alone", min(COMMITS_S, seconds))
        print(
            f"the same rows, one commit a job, no HTTP: {alone:.0f} jobs/s; ours is {rate / alone:.2f} of it",
            flush=True,
        )
        for file in (service.folder / "state").glob(f"{FILE_NAME}*"):
            file.unlink()
        service.start(ready=False)
        large = {**JOB, "conversations": [{"prompt": f"Question {number}"} for number in range(A_JOB)]}
        at = time.perf_counter()
        service.post_job(large)
        print(f"one job of 10,000 conversations: {time.perf_counter() - at:.2f} s (bound 1 s)", flush=True)
        service.kill()
        at = time.perf_counter()
        service.start(ready=False)
        print(
            f"serving again with 10,000 unfinished conversations: {time.perf_counter() - at:.2f} s (bound 2 s)",
            flush=True,
        )


def compare_queues(many: int, agents: int, seconds: float) -> None:
    """Print turns a second and memory with many queued conversations, beside few."""
    few_rate, few_mb = _measure_queue(FEW, agents, seconds)
    many_rate, many_mb = _measure_queue(many, agents, seconds)
    print(f"{agents} agents, {FEW} conversations: {few_rate:.0f} turns/s, {few_mb:.0f} MB")
    print(f"{agents} agents, {many} conversations: {many_rate:.0f} turns/s, {many_rate / few_rate:.2f} of those"
          f" (bound 0.90), {many_mb:.0f} MB (bound 500 MB)")  # fmt: skip


def _measure_queue(conversations: int, agents: int, seconds: float) -> tuple[float, float]:
    """Return turns a second and the most megabytes of the service; each conversation has rounds for the whole time."""
    job = {
        "rounds": 48 // agents,
        "agents": [{"id": f"a{number}", "model": "m"} for number in range(agents)],
        "conversations": [{"prompt": "Go."}] * min(conversations, A_JOB),
    }
    with serving(PORT, {"m": scripted_model(PORT + 1, slots=SLOTS, tokens=2, interval=0.02)}) as service:
        process = process_of(service)
        for _ in range(max(1, conversations // A_JOB)):
            service.post_job(job)
        time.sleep(seconds / 2)  # until the facts of the admission are written
        before, began_at = _ended(service), time.monotonic()
        most = 0.0
        while time.monotonic() - began_at < seconds:
            most = max(most, process.memory_info().rss / 1e6)
            time.sleep(0.5)
        return (_ended(service) - before) / (time.monotonic() - began_at), most


def _ended(service: Service) -> int:
    jobs = service.get("/v1/jobs?limit=100")["jobs"]
    return sum(job["progress"]["turns"]["completed"] for job in jobs)


def _post_at_once(seconds: float, pace: int | None) -> list[float]:
    """Post from another process, so that the clients' CPU is not ours."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_post_in_process, (PORT, CLIENTS, seconds, pace))


def _post_in_process(port: int, clients: int, seconds: float, pace: int | None) -> list[float]:
    """Post to the given port: a spawned process imports this file again, and would choose another port."""
    return asyncio.run(_clients(port, clients, seconds, pace))


async def _clients(port: int, clients: int, seconds: float, pace: int | None) -> list[float]:
    latencies: list[float] = []
    begin = time.perf_counter()
    every_s = 0.0 if pace is None else clients / pace
    starts = [begin + every_s * number / clients for number in range(clients)]
    await asyncio.gather(*(_client(port, at, every_s, begin + seconds, latencies) for at in starts))
    return latencies


async def _client(port: int, due: float, every_s: float, until: float, latencies: list[float]) -> None:
    """Post until the end; at a pace, latencies count from when each post was due."""
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


def _commit_one_by_one(folder: Path, seconds: float) -> float:
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
    count, until = 0, time.perf_counter() + seconds
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
    return count / seconds


if __name__ == "__main__":
    main()

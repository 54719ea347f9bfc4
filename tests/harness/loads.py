"""Requests that once blocked an event loop, for a running service, and a probe of what others notice."""

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from tests.harness.service import Service

Document = dict[str, Any]

PROBE_S: Final = 0.005
ENDED: Final = 120.0
HUGE: Final[Document] = {
    "agents": [{"id": f"a{number}", "model": "m"} for number in range(100)],
    "conversations": [{"prompt": "x"}] * 2_000,
}  # 200,000 turns, all ready at once


@dataclass(frozen=True, kw_only=True)
class Seen:
    """How long each answer to /healthz took, and how long the loop's thread computed meanwhile, in seconds."""

    latencies: list[float]
    busy: list[float]


@contextmanager
def probing(service: "Service") -> Iterator[Seen]:
    """Request /healthz all the time, from a process of its own; the results are there when the block ends."""
    assert service.process is not None
    seen = Seen(latencies=[], busy=[])
    command = [sys.executable, "-P", str(Path(__file__)), f"{service.url}/healthz", str(service.process.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        probe.stdout.readline()  # it has begun
        try:
            yield seen
        finally:
            probe.stdin.close()
            told = json.loads(probe.stdout.read())
    seen.latencies.extend(told["latencies"])
    seen.busy.extend(told["busy"])


def _probe(url: str, pid: int) -> None:
    thread = Path(f"/proc/{pid}/task/{pid}/schedstat")  # its first number: nanoseconds on a processor

    def busy_s() -> float:
        return int(thread.read_text().split()[0]) / 1e9

    latencies, busy = [], []
    with httpx.Client(trust_env=False, timeout=ENDED) as http:
        http.get(url)
        print("begun", flush=True)
        while not select.select([sys.stdin], [], [], PROBE_S)[0]:
            before, began_at = busy_s(), time.monotonic()
            http.get(url)
            latencies.append(time.monotonic() - began_at)
            busy.append(busy_s() - before)
    print(json.dumps({"latencies": latencies, "busy": busy}))


def _wait_for(condition: Callable[[], bool]) -> None:
    from tests.harness.waiting import wait_for  # noqa: PLC0415 - the probe needs none of it

    wait_for(condition, "the load goes on", ENDED)


def post(service: "Service", job: object) -> httpx.Response:
    return service.http.post("/v1/jobs", json=job, timeout=ENDED)


def one(validation: Document | None = None, prompt: str = "Go.", **more: object) -> Document:
    agent: Document = {"id": "a", "model": "m"}
    if validation is not None:
        agent["validation"] = {"retries": 0, **validation}
    return {"agents": [agent], "conversations": [{"prompt": prompt}], **more}


def nothing(_service: "Service") -> None:
    """Wait, as a service does most of the time."""
    until = time.monotonic() + 1
    _wait_for(lambda: time.monotonic() > until)


def large_bodies(service: "Service") -> None:
    """15 MB of text, of many small values, of quotes that do not end, and of a schema."""
    post(service, one(prompt="x" * 15_000_000))
    post(service, {**one(), "metadata": {"many": [0] * 5_000_000}})
    quotes = b'["' + b'\\"' * 7_000_000
    service.http.post("/v1/jobs", content=quotes, headers={"Content-Type": "application/json"}, timeout=ENDED)
    post(service, one({"json_schema": {"properties": {f"p{number}": {"type": "string"} for number in range(50_000)}}}))


def schemas_and_patterns(service: "Service") -> None:
    """Schemas and patterns that take long to check, to compile, and to apply to an answer."""
    post(service, one({"json_schema": {"allOf": [{"pattern": f"(a+)+{number}$"} for number in range(2_000)]}}))
    jobs = [
        one({"pattern": "(?:w[0-9]+ ?)+x$"}),
        one({"pattern": "|".join(f"v{number}[a-z]{{1,3}}" for number in range(900))}),
        one({"choices": [f"choice number {number}" for number in range(1_000)]}),
    ]
    posted = [post(service, job).json()["id"] for job in jobs]
    for job_id in posted:
        service.wait_ended(job_id, ENDED)


def huge_job(service: "Service") -> None:
    """200,000 turns that are ready at once are admitted, run, cancelled and deleted."""
    job_id = post(service, HUGE).json()["id"]
    _wait_for(lambda: service.get(f"/v1/jobs/{job_id}")["progress"]["turns"]["completed"] > 10)
    service.http.post(f"/v1/jobs/{job_id}/cancel", timeout=ENDED)
    service.wait_ended(job_id, ENDED)
    service.http.delete(f"/v1/jobs/{job_id}", timeout=ENDED).raise_for_status()


def long_lists(service: "Service") -> None:
    """Jobs with metadata, a result of many turns, and both read again and again."""
    talks = [{"prompt": "Go.", "metadata": {"n": "x" * 500}}] * 2_000
    job_id = post(service, {**one(), "conversations": talks}).json()["id"]
    for number in range(200):
        post(service, one(metadata={"n": "x" * 60_000, "number": number}))
    service.wait_ended(job_id, ENDED)
    for _ in range(10):
        service.http.get("/v1/jobs?limit=200", timeout=ENDED)
        service.http.get(f"/v1/jobs/{job_id}/result", timeout=ENDED)
        service.http.get(f"/v1/jobs/{job_id}/result?format=jsonl", timeout=ENDED)


LOADS: Final[dict[str, Callable[["Service"], None]]] = {
    load.__name__.replace("_", " "): load
    for load in (nothing, large_bodies, schemas_and_patterns, huge_job, long_lists)
}

if __name__ == "__main__":
    _probe(sys.argv[1], int(sys.argv[2]))

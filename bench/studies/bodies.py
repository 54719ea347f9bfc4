"""The cost of bodies that are small to post but expensive to read, and of waiting turns.

``bodies``: hostile bodies of JSON and YAML of at most ``limits.body_bytes``. ``forks``: a job of ``--forks``
conversations that begin with one record. For each: the largest growth of the service's memory, as a multiple of the
body, the longest answer of ``/healthz`` meanwhile, and the delay of another key's plain job beside one alone.
``awaited``: with ``--awaited`` turns that wait for callers, the CPU of an idle service, and the time of the words of
another job's caller.

    python -m bench.studies.bodies [--part bodies forks awaited] [--forks 1000] [--rounds 100] [--awaited 60000]
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from bench.parts.services import cpu_s, process_of, serving
from tests.harness.ports import find_ports
from tests.harness.service import scripted_model
from tests.harness.waiting import wait_for

PORT: Final = find_ports(4)
URL: Final = f"http://127.0.0.1:{PORT}"
PROBE_S: Final = 0.005
REST_S: Final = 3.0
IDLE_S: Final = 20.0
LIMIT_S: Final = 300.0
MOST_RSS: Final = 3 << 30  # memory at which an attack has succeeded: the service is killed to spare the machine
JSON_BYTES: Final = 16 * 1024 * 1024 - 1024
YAML_BYTES: Final = 256 * 1024 - 1024
A_JOB: Final = 10_000  # conversations per job
WORDS: Final = 100  # measured words of callers
HOSTILE, PLAIN = ({"Authorization": f"Bearer key-of-{name}"} for name in ("hostile", "plain"))
AGENT: Final = {"id": "a", "model": "m"}
SMALL: Final = {"json": b'{"agents": [], "metadata": [0]}', "yaml": b"agents: []\nmetadata: [0]\n"}
Document = dict[str, Any]


class Attacked(psutil.Process):
    """The process of a service, with its peak memory."""

    def rss(self) -> int:
        """Return its present memory in bytes."""
        return int(self.memory_info().rss)

    def forget_peak(self) -> None:
        """Reset the peak."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="utf-8")

    def peak(self) -> int:
        """Return the peak memory since the reset, in bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def attacked(slots: int = 8, interval: float = 0.0) -> Iterator[Attacked]:
    """Run a service with one scripted model for a block."""
    keys = [{"name": each, "key": f"key-of-{each}", "scopes": ["read", "submit"]} for each in ("hostile", "plain")]
    model = scripted_model(PORT + 1, slots=slots, tokens=3, interval=interval)
    with serving(PORT, {"m": model}, {"keys": keys}, key="key-of-plain") as service:
        yield Attacked(process_of(service).pid)


@contextmanager
def probing(service: Attacked) -> Iterator[list[float]]:
    """Return the seconds until a condition holds."""
    took: list[float] = []
    over = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=URL, trust_env=False, timeout=LIMIT_S) as http:
            while not over.wait(PROBE_S):
                asked_at = time.perf_counter()
                http.get("/healthz")
                took.append(time.perf_counter() - asked_at)
                if service.rss() > MOST_RSS:
                    service.kill()
                    return

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()


def plain_job(http: httpx.Client) -> float:
    """Return the seconds from post to end of another key's job of one turn."""
    began_at = time.monotonic()
    job = {"agents": [AGENT], "conversations": [{"prompt": "Go."}]}
    job_id = http.post("/v1/jobs", json=job, headers=PLAIN).raise_for_status().json()["id"]
    http.get(f"/v1/jobs/{job_id}?wait_s=60", headers=PLAIN).raise_for_status()
    return time.monotonic() - began_at


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Yield hostile bodies: name, type and bytes."""
    head = b'{"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Go."}], "metadata": '
    room = JSON_BYTES - len(head)
    yield "JSON, one text", "json", head + b'"' + b"x" * (room - 3) + b'"}'
    yield "JSON, many values", "json", head + b"[" + b"0," * (room // 2 - 2) + b"0]}"
    yield "JSON, many empty mappings", "json", head + b"[" + b"{}," * (room // 3 - 2) + b"{}]}"
    yield "JSON, brackets", "json", head + b"[" * room
    yield "JSON, quotes", "json", head + b'["' + b'\\"' * (room // 2 - 2)
    yield (
        "JSON, prompts",
        "json",
        json.dumps({"agents": [AGENT], "conversations": [{"prompt": "x" * 1500}] * (JSON_BYTES // 1520)}).encode(),
    )
    casts = [{"a": {"validation": {"choices": [f"c{cast}-{place}" for place in range(150)]}}} for cast in range(3000)]
    talks_of_casts = [{"prompt": "Go.", "agents": cast} for cast in casts]
    yield "JSON, short texts", "json", json.dumps({"agents": [AGENT], "conversations": talks_of_casts}).encode()
    begin = b"agents: [{id: a, model: m}]\nconversations: [{prompt: Go}]\n"
    text = b"t: &t " + b"x" * 100_000 + b"\n"
    yield "YAML, 100 MB of aliases of a text", "yaml", begin + text + b"metadata: [" + b"*t, " * 1000 + b"]\n"
    ten = b"".join(
        b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 6)
    )  # 100,000 values
    yield "YAML, aliases of aliases", "yaml", begin + b"a0: &a0 [x]\n" + ten + b"metadata: *a5\n"
    talks = b"conversations:\n- prompt: &p " + b"x" * 20_000 + b"\n" + b"- prompt: *p\n" * 2000
    yield "YAML, 40 MB of prompts", "yaml", b"agents: [{id: a, model: m}]\n" + talks
    room = YAML_BYTES - len(begin) - 20
    yield "YAML, many values", "yaml", begin + b"metadata: [" + b"0," * (room // 2) + b"0]\n"
    yield "YAML, control characters", "yaml", begin + b'metadata: "' + rb"\a" * (room // 2) + b'"\n'


def measure_bodies() -> None:
    """Print the cost of each body, in a fresh service."""
    for name, kind, body in bodies():
        measure(name, body, kind)


def measure(name: str, body: bytes, kind: str = "json", prepare: Callable[[httpx.Client], bytes] | None = None) -> None:
    """Print the cost of one body beside a plain job of another key."""
    with attacked() as service, httpx.Client(base_url=URL, trust_env=False, timeout=LIMIT_S) as http:
        body = prepare(http) if prepare is not None else body
        alone = statistics.median(plain_job(http) for _ in range(5))
        for each, small in SMALL.items():  # lazy imports must not count as a body's cost
            http.post("/v1/jobs", content=small, headers={"Content-Type": f"application/{each}", **HOSTILE})
        headers = {"Content-Type": f"application/{kind}", **HOSTILE}
        before = service.rss()
        service.forget_peak()
        delays: list[float] = []
        with probing(service) as took, ThreadPoolExecutor(1) as pool:
            posted = pool.submit(http.post, "/v1/jobs", content=body, headers=headers)
            with httpx.Client(base_url=URL, trust_env=False, timeout=LIMIT_S) as other:
                while not posted.done() and service.is_running():
                    try:
                        delays.append(plain_job(other) - alone)
                    except httpx.HTTPError:
                        break
            try:
                status = str(posted.result().status_code)
            except httpx.TransportError:
                status = f"none: the service held more than {MOST_RSS >> 20} MiB"
        grown = max(0, service.peak() - before) if service.is_running() else MOST_RSS
        print(
            f"{name}: {len(body) / 1000:,.0f} KB, answered {status}; memory grew by {grown / 1e6:,.0f} MB,"
            f" {grown / len(body):,.1f} x the body; /healthz at worst {max(took, default=0.0):.3f} s;"
            f" a plain job of another key {max(delays, default=0.0):.2f} s later",
            flush=True,
        )


def measure_forks(forks: int, rounds: int) -> None:
    """Print the cost of ``forks`` forks of one conversation of ``rounds`` rounds."""

    def prepare(http: httpx.Client) -> bytes:
        source = {"agents": [AGENT], "rounds": rounds, "conversations": [{"id": "c", "prompt": "Go."}]}
        job_id = http.post("/v1/jobs", json=source, headers=HOSTILE).raise_for_status().json()["id"]
        path = f"/v1/jobs/{job_id}"
        wait_for(lambda: http.get(path, headers=HOSTILE).json()["state"] == "completed", "it is completed", LIMIT_S)
        heir = {"from": {"job": job_id, "conversation": "c"}, "rounds": rounds + 1}
        return json.dumps({"agents": [AGENT], "conversations": [heir] * forks}).encode()

    measure(f"{forks} forks of {rounds} turns", b"", prepare=prepare)


def measure_awaited(count: int, *, is_running: bool) -> None:
    """Print the cost of an idle service with ``count`` awaited turns, and the time for another caller's words.

    With ``is_running`` a turn beside each waits for a model, so that the node has the conversation in memory.
    """
    guest = {"id": "guest", "by": "caller", "wait_s": 86_400}
    beside = {"id": "ann", "model": "m"} | ({} if is_running else {"speak_after_within_round": ["guest"]})
    client = httpx.Client(base_url=URL, trust_env=False, timeout=LIMIT_S)
    with attacked(1 if is_running else 8, 3600.0 if is_running else 0.0) as service, client as http:
        job: Document = {"agents": [guest, beside], "conversations": [{"prompt": "Go."}] * WORDS}
        job_id = http.post("/v1/jobs", json=job, headers=PLAIN).raise_for_status().json()["id"]
        _wait_awaited(http, job_id, WORDS, PLAIN)
        few = _idle(service)
        left = count
        while left:
            here = min(left, A_JOB)
            left -= here
            more = {**job, "conversations": [{"prompt": "Go."}] * here}
            more_id = http.post("/v1/jobs", json=more, headers=HOSTILE).raise_for_status().json()["id"]
            _wait_awaited(http, more_id, here, HOSTILE)
        idle = _idle(service)
        took = []
        for number in range(WORDS):
            asked_at = time.perf_counter()
            said = http.post(
                f"/v1/jobs/{job_id}/conversations/c{number}/turns/guest/0", json={"text": "Hello."}, headers=PLAIN
            )
            took.append(1000 * (time.perf_counter() - asked_at))
            assert said.status_code == 201, said.text
        asked_at = time.perf_counter()
        http.get(f"/v1/jobs/{job_id}/awaited", headers=PLAIN).raise_for_status()
        listed = 1000 * (time.perf_counter() - asked_at)
        where = "beside turns that wait for a model" if is_running else "of conversations that only callers move"
        print(
            f"{count} awaited turns {where}: idle {100 * idle:.1f} % of a core (bound 1 %; with {WORDS} of them"
            f" {100 * few:.1f} %); words of another's"
            f" caller median {statistics.median(took):.1f} ms, longest {max(took):.1f} ms (bound 20 ms); its list"
            f" {listed:.1f} ms",
            flush=True,
        )


def _idle(service: Attacked) -> float:
    """Return the share of a core that an idle service takes."""
    time.sleep(REST_S)
    before = cpu_s(service)
    time.sleep(IDLE_S)
    return (cpu_s(service) - before) / IDLE_S


def _wait_awaited(http: httpx.Client, job_id: str, count: int, headers: dict[str, str]) -> None:
    path = f"/v1/jobs/{job_id}"

    def are_awaited() -> bool:
        return bool(http.get(path, headers=headers).json()["progress"]["turns"]["awaited"] == count)

    wait_for(are_awaited, f"{count} turns wait for callers", LIMIT_S)


def main() -> None:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("bodies", "forks", "awaited"))
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--awaited", type=int, default=60_000)
    options = parser.parse_args()
    parts = options.part or ("bodies", "forks", "awaited")
    if "bodies" in parts:
        measure_bodies()
    if "forks" in parts:
        measure_forks(options.forks, options.rounds)
    if "awaited" in parts:
        for is_running in (False, True):
            measure_awaited(options.awaited, is_running=is_running)


if __name__ == "__main__":
    main()

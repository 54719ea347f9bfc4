"""A service that is upgraded in place again and again, as a client sees it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.harness.service import Service
from tests.harness.waiting import LIMIT_S, wait_for

UPGRADE_LIMIT_S = 3 * LIMIT_S  # two starts of the service: the check's, and its own
PROBE_S = 0.01
_NEVER = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine as the kernel knows it."""

    worker: str
    pid: int
    started: float
    incarnation: int


def engines_of(service: Service) -> list[Engine]:
    """Return the ready engines, with the kernel's start time of each."""
    workers = service.get("/v1/workers")["workers"]
    return [
        Engine(
            worker=each["id"],
            pid=each["pid"],
            started=psutil.Process(each["pid"]).create_time(),
            incarnation=each["incarnation"],
        )
        for each in workers
        if each["pid"] is not None
    ]


def upgrades_of(service: Service) -> dict[str, Any]:
    """Return the running program's own report, once one answers."""
    seen: list[dict[str, Any]] = []

    def answers() -> bool:
        with suppress(httpx.TransportError):
            seen.append(service.get("/v1/upgrade"))
        return bool(seen)

    wait_for(answers, "a program of the service answers", UPGRADE_LIMIT_S)
    return seen[-1]


def upgrade(service: Service) -> dict[str, Any]:
    """Upgrade a service; return the new program's report, once its models are ready."""
    before = upgrades_of(service)["upgrades"]
    agreed = service.http.post("/v1/upgrade", timeout=UPGRADE_LIMIT_S)
    assert agreed.status_code == 202, agreed.text
    return wait_upgraded(service, before)


def wait_upgraded(service: Service, before: int) -> dict[str, Any]:
    """Return the next program's report, once its models are ready."""
    wait_for(lambda: upgrades_of(service)["upgrades"] == before + 1, "the next program serves", UPGRADE_LIMIT_S)
    wait_for(lambda: service.http.get("/readyz").status_code == 200, "its engines are ready")
    return upgrades_of(service)


@dataclass(kw_only=True)
class Probed:
    """Results of new connections to ``/healthz``; ``gaps`` are the seconds from each request to its answer."""

    gaps: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextmanager
def probing_health(port: int) -> Iterator[Probed]:
    """Request ``/healthz`` on a new connection all the time; each must be accepted and answered, however late."""
    probed, is_over = Probed(), threading.Event()

    def probe() -> None:
        while not is_over.is_set():
            asked_at = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=UPGRADE_LIMIT_S) as connection:
                    connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                    if not connection.recv(4096).startswith(b"HTTP/1.1 200"):
                        probed.faults.append("no answer")
            except OSError as error:
                probed.faults.append(repr(error))
            probed.gaps.append(time.monotonic() - asked_at)
            _NEVER.wait(PROBE_S)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield probed
    finally:
        is_over.set()
        thread.join(UPGRADE_LIMIT_S)

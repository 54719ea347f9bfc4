"""The service is killed at random moments under load: acknowledged work is not lost, and nothing runs twice."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.harness.audit import audit, under_load
from tests.harness.service import Document, Service
from tests.harness.waiting import is_alive, wait_for

KILLS, SOAK_KILLS = 4, 300


def embedded(port: int) -> Document:
    return {
        "engine": "embedded", "port": port, "slots": 4, "context": 2048,
        "args": {"threads": 1}, "params": {"max_tokens": 8},
    }  # fmt: skip


@pytest.mark.system
def test_kills_under_load_lose_nothing_and_double_nothing(
    tmp_path: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest
) -> None:
    """Specification, "Recovery after a crash": SQLite, the real embedded engine; 300 kills in a soak."""
    kills = SOAK_KILLS if request.config.getoption("--soak") else KILLS
    chance = Random(kills)  # noqa: S311
    service = Service(tmp_path, free_ports(1), {"m": embedded(free_ports(1))})
    service.start()
    try:
        with under_load([service.url]) as load:
            for number in range(kills):
                until = time.monotonic() + chance.uniform(0.0, 1.5)
                wait_for(lambda at=until: time.monotonic() > at, "a random moment")  # type: ignore[misc]
                tree = service.tree()
                service.kill()
                wait_for(lambda pids=tree: not any(map(is_alive, pids)), f"kill {number}: no engine is left", 2.0)  # type: ignore[misc]
                service.start(ready=False)
        counts = audit(load, service.url)
        print(f"{kills} kills: {dict(counts)}")
        assert counts["jobs"] >= kills / 2
        assert service.stop() == 0
    finally:
        if service.process is not None and service.process.poll() is None:
            service.kill()
        service.http.close()

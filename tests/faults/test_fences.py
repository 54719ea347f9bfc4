"""A node is stopped past its lease and goes on: what it has in hand was taken over, and it writes nothing of it."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.audit import audit, under_load
from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

LEASE_S = 1.0
SLOTS = 8
RACES, SOAK_RACES = 16, 500
TAKEN_OVER = "another node has taken over"
DEAD = "are dead, and leave"


def in_flight(service: Service) -> int:
    return sum(worker["slots"]["in_use"] for worker in service.get("/v1/workers")["workers"])


def stop_past_its_lease(stopped: Service, lives: Service) -> None:
    """Stop a node until the other has taken over, let it go on, and return when it has learned of that."""
    assert stopped.process is not None
    dead, told = lives.log().count(DEAD), stopped.log().count(TAKEN_OVER)
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: lives.log().count(DEAD) > dead, "it is taken for dead")
    except AssertionError as error:
        raise AssertionError(f"{error}; the other node says:\n{lives.log()[-3000:]}") from error
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    wait_for(lambda: stopped.log().count(TAKEN_OVER) > told, "it learns of it")


@pytest.mark.system
def test_no_stale_write_is_taken(
    tmp_path: Path,
    free_ports: Callable[[int], int],
    postgres: PostgresServer,
    request: pytest.FixtureRequest,
) -> None:
    """500 races in a soak; each turn in flight on the stopped node is one, since its engine goes on.

    Source: specification, "Fences and leases".
    """
    races = SOAK_RACES if request.config.getoption("--soak") else RACES
    flags: Document = {"tokens": 5, "interval": 0.1}
    store: Document = {"url": postgres.new_database(), "lease_s": LEASE_S}
    with ExitStack() as stack:
        stopped, lives = (
            stack.enter_context(
                serving(
                    tmp_path / f"node-{number}",
                    free_ports(1),
                    {"m": scripted_model(free_ports(1), slots=SLOTS, **flags)},
                    {"drain_s": 1},
                    store=store,
                )
            )
            for number in range(2)
        )
        run = stops = 0
        with under_load([lives.url]) as load:
            while run < races:
                wait_for(lambda: in_flight(stopped) >= SLOTS // 2, "the node has turns in flight")
                run += in_flight(stopped)
                stops += 1
                stop_past_its_lease(stopped, lives)
        counts = audit(load, lives.url)
        print(f"{run} races in {stops} stops: {dict(counts)}; refused: {stopped.log().count('refused')}")
        assert stopped.log().count(TAKEN_OVER) >= stops

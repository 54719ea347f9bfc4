"""A node is stopped past its lease and continues: others have taken over its work, and it writes none of it."""

import json
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def claims(service: Service, postgres: PostgresServer, database: str) -> int:
    """Count what a node runs under its present lease; a node that counts as dead has none."""
    sql = "SELECT count(*) FROM conversations JOIN nodes ON nodes.id = owner WHERE is_live = 1 AND owner = %s"
    return int(str(postgres.execute(sql, service.get("/v1/status")["store"]["node"], database=database)[0][0]))


def stop_past_its_lease(stopped: Service, lives: Service) -> None:
    """Stop a node until the other has taken over, continue it, and return when it has noticed."""
    assert stopped.process is not None
    stopped.process.send_signal(signal.SIGSTOP)
    told = stopped.log().count(TAKEN_OVER)
    try:  # where it was taken for dead a moment before it was stopped, and has not learned of it, that counts
        wait_for(lambda: lives.log().count(DEAD) > told, "it is taken for dead")
    except AssertionError as error:
        nodes = (("it", stopped), ("the other", lives))
        said = "\n".join(f"{name} says:\n{node.log()[-3000:]}" for name, node in nodes)
        raise AssertionError(f"{error}; {said}") from error
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    wait_for(lambda: stopped.log().count(TAKEN_OVER) > told, "it learns of it")


@pytest.mark.system
def test_no_stale_write_is_accepted(
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
    database = postgres.new_database()
    store: Document = {"url": database, "lease_s": LEASE_S}
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
                wait_for(lambda: claims(stopped, postgres, database), "the node runs conversations")
                wait_for(lambda: in_flight(stopped) >= SLOTS // 2, "the node has turns in flight")
                run += in_flight(stopped)
                stops += 1
                stop_past_its_lease(stopped, lives)
        counts = audit(load, lives.url)
        print(f"{run} races in {stops} stops: {dict(counts)}; refused: {stopped.log().count('refused')}")
        assert stopped.log().count(TAKEN_OVER) >= stops


@pytest.mark.system
def test_requests_of_clients_outlive_the_lease_of_their_node(
    tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer
) -> None:
    """No other node has them: one goes on with its stream, one waits on in the queue, and each is answered once."""
    flags: Document = {"tokens": 60, "interval": 0.05, "goes_on": "kept"}
    store: Document = {"url": postgres.new_database(), "lease_s": LEASE_S}
    chat = {"model": "m", "messages": [{"role": "user", "content": "Go."}]}
    answer = " ".join(f"word{number}" for number in range(60))
    with ExitStack() as stack, ThreadPoolExecutor() as tasks:
        stopped, lives = (
            stack.enter_context(
                serving(
                    tmp_path / f"node-{number}",
                    free_ports(1),
                    {"m": scripted_model(free_ports(1), slots=2, **flags)},
                    {"drain_s": 1},
                    store=store,
                )
            )
            for number in range(2)
        )
        stopped.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Talk."}]})
        wait_for(lambda: in_flight(stopped) + in_flight(lives) == 1, "the job is on a slot")
        asked = [
            tasks.submit(stopped.http.post, "/v1/chat/completions", json={**chat, "stream": stream}, timeout=60.0)
            for stream in (True, False, True)
        ]
        wait_for(lambda: in_flight(stopped) == 2, "the node is busy")
        stop_past_its_lease(stopped, lives)
        answers = [each.result().text for each in asked]
    for text in answers:
        frames = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert not any("error" in frame for frame in frames), text
    words = ["".join(re.findall(r'"content": ?"([^"]*)"', text)) for text in answers]
    assert words == [answer] * 3

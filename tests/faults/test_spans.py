"""One engine over several nodes: its parts live and end together, and no device ever has parts of two lives.

Source: specification, "Spans".
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, debate, scripted_model
from tests.harness.spans import LEASE_S, SpanCluster, gone, running_spans
from tests.harness.waiting import is_alive, wait_for

pytestmark = pytest.mark.system
GONE_S = 2.0


def has_served_again(node: Service, before: int) -> bool:
    return node.log().count("serving at") > before


@pytest.fixture
def two(tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer) -> Iterator[SpanCluster]:
    with running_spans(tmp_path, free_ports, postgres, 2) as cluster:
        yield cluster
        assert cluster.doubles == ""


@pytest.fixture
def three(tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer) -> Iterator[SpanCluster]:
    with running_spans(tmp_path, free_ports, postgres, 3) as cluster:
        yield cluster
        assert cluster.doubles == ""


def test_a_job_runs_on_an_engine_over_two_nodes(two: SpanCluster) -> None:
    """Posted through either node, its turns run on the leader; the other's worker says what it is part of."""
    span = two.wait_serving()
    assert [member["rank"] for member in span["members"]] == [0, 1]
    for node in two.nodes:
        assert node.wait_ended(node.post_job(debate(conversations=2, rounds=2)))["state"] == "completed"
    follower = two.worker(two.follower())
    assert "is member 1" in follower["because"]
    assert len(two.nodes[0].get("/v1/nodes")["nodes"]) == 2


def test_conversations_go_where_their_next_model_is(
    tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer
) -> None:
    """A job whose agents alternate between the span and a model of either node ends; its turns go to and fro."""

    def more(number: int) -> Document:
        return {f"own-{number}": scripted_model(free_ports(1))}

    with running_spans(tmp_path, free_ports, postgres, 2, more) as cluster:
        cluster.wait_serving()
        agents = [
            {"id": "first", "model": "own-0"},
            {"id": "second", "model": "m", "speak_after_within_round": ["first"]},
            {"id": "third", "model": "own-1", "speak_after_within_round": ["second"]},
        ]
        talks = [{"prompt": f"Talk {number}."} for number in range(2)]
        node = cluster.nodes[0]
        job = node.post_job({"agents": agents, "rounds": 2, "conversations": talks})
        assert node.wait_ended(job)["state"] == "completed"


def test_a_node_says_what_its_span_waits_for(
    tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer
) -> None:
    """Alone it is not ready, and refuses requests in the form of the API, with the model's name or without."""
    with running_spans(tmp_path, free_ports, postgres, 1) as cluster:
        (node,) = cluster.nodes
        assert node.http.get("/readyz").status_code == 503
        for body in ({"model": "m"}, {}):
            answer = node.http.post("/v1/chat/completions", json={**body, "messages": []})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker_ready")
            assert "waits until 2 nodes offer devices" in answer.json()["error"]["message"]
        assert "waits until 2 nodes" in cluster.worker(0)["because"]


@pytest.mark.parametrize("part", ["worker", "engine", "guardian", "service"])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_any_death_ends_the_whole_generation(three: SpanCluster, part: str, *, leads: bool) -> None:
    """Nothing of it is left after two seconds, the other nodes name the guilty one, and the next generation serves."""
    span = three.wait_serving()
    hit, other = (three.leader(), three.follower()) if leads else (three.follower(), three.leader())
    trees = three.tree(hit) + three.tree(other)
    guardian, engine, *below = three.tree(hit)
    service = three.nodes[hit].process
    assert service is not None
    victim = {"worker": below[0].pid, "engine": engine.pid, "guardian": guardian.pid, "service": service.pid}[part]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: gone(trees), "nothing of the generation is left", GONE_S)
    rank = 0 if leads else 1
    said = f"member {rank} at 127.0.0.1"
    among = [each for each in range(3) if each != hit] if part == "service" else [0, 1, 2]
    wait_for(lambda: said in three.nodes[other].log(), f"the other node blames {said}", 10)
    three.wait_serving(after=span["generation"], among=among)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_frozen_node_is_replaced_and_ends_its_part_when_it_wakes(three: SpanCluster, *, leads: bool) -> None:
    """All of a node stands still past its lease: others go on, and its part is gone two seconds after it wakes."""
    span = three.wait_serving()
    hit = three.leader() if leads else three.follower()
    service = three.nodes[hit].process
    assert service is not None
    tree = three.tree(hit)
    frozen = [psutil.Process(service.pid), *tree]
    for process in frozen:
        process.suspend()
    try:
        three.wait_serving(after=span["generation"], among=[each for each in range(3) if each != hit])
    finally:
        for process in frozen:
            with suppress(psutil.NoSuchProcess):  # its guardian, awake before it, has killed it
                process.resume()
    wait_for(lambda: gone(tree), "its part is gone", GONE_S)


def test_a_database_that_is_away_ends_no_engine(two: SpanCluster) -> None:
    """The engines run on for longer than two leases, and the generation is the same when the database is back."""
    span = two.wait_serving()
    trees = two.tree(0) + two.tree(1)
    two.postgres.stop("immediate")
    try:
        with pytest.raises(AssertionError):
            wait_for(lambda: not all(is_alive(each.pid) for each in trees), "an engine ends", 3 * LEASE_S)
    finally:
        two.postgres.start()
    with pytest.raises(AssertionError):
        wait_for(lambda: not all(is_alive(each.pid) for each in trees), "an engine ends", 2 * LEASE_S)
    assert two.span() == span


def test_an_upgrade_of_a_node_keeps_its_part(two: SpanCluster) -> None:
    """The engine goes on under the next program, on the leader's node and on the other's."""
    span = two.wait_serving()
    trees = two.tree(0) + two.tree(1)
    for node in two.nodes:
        before = node.log().count("serving at")
        assert node.http.post("/v1/upgrade").status_code == 202
        wait_for(partial(has_served_again, node, before), "the next serves", 60)
    assert two.wait_serving()["generation"] == span["generation"]
    assert all(is_alive(each.pid) for each in trees)
    node = two.nodes[0]
    assert node.wait_ended(node.post_job(debate(conversations=2, rounds=1)))["state"] == "completed"


def test_a_node_that_leaves_ends_the_generation_for_the_next(three: SpanCluster) -> None:
    """A stopped node says goodbye, and the others form another generation."""
    span = three.wait_serving()
    hit = three.leader()
    three.nodes[hit].stop()
    three.wait_serving(after=span["generation"], among=[each for each in range(3) if each != hit])

"""A real vLLM over two nodes of this machine: it answers rightly, gets new weights, and is replaced when it breaks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.engines.checkpoint import write_checkpoint
from tests.engines.test_weights import HEAD, PROMPTS, SEEDS, agrees, say, spoken_by, trainer, vllm_model
from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, serving
from tests.harness.spans import SpanCluster, gone
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.long
START_S = 300.0
GONE_S = 2.0
STALL_S = 10.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("spans")
    return [write_checkpoint(folder / str(seed), seed, is_tied=True) for seed in SEEDS[:2]]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], int],
    postgres: PostgresServer,
    vllm_python: str,
    checkpoints: list[Path],
) -> Iterator[SpanCluster]:
    folder, database = tmp_path_factory.mktemp("cluster"), postgres.new_database()
    model = vllm_model(
        vllm_python,
        checkpoints[0],
        0,
        command=[vllm_python, str(Path(__file__).parent / "vllm_cli.py"), "serve"],
        args={"enforce_eager": True, "dtype": "bfloat16", "tensor-parallel-size": 2},
        replicas=1,
        span={"nodes": 2},
        timeouts={"start_s": START_S, "prefill_stall_s": STALL_S, "decode_stall_s": STALL_S, "busy_stall_s": STALL_S},
    )
    with ExitStack() as stack:
        nodes: list[Service] = []
        for number in range(2):
            node = serving(
                folder / f"node-{number}",
                free_ports(1),
                {"policy": model},
                {"address": "127.0.0.1"},
                store={"url": database, "lease_s": 5},
                ready=False,
            )
            nodes.append(stack.enter_context(node))
        cluster = SpanCluster(nodes, folder / "doubles", postgres, database)
        cluster.wait_serving(limit_s=START_S)
        yield cluster


def engines(cluster: SpanCluster, node: int, name: str) -> list[psutil.Process]:
    """Return the processes of a node's part that have a name."""
    return [each for each in cluster.tree(node) if name in "".join(each.cmdline())]


def test_its_answers_are_those_of_the_checkpoint(
    cluster: SpanCluster, checkpoints: list[Path], vllm_python: str
) -> None:
    """Through either node; then a trainer's weights reach both parts over gloo, and the answers are the new ones."""
    spoken = spoken_by(vllm_python, checkpoints)
    leader = cluster.nodes[cluster.leader()]
    for node in cluster.nodes:
        agrees(say(node, PROMPTS, HEAD), spoken[checkpoints[0]])
    with trainer(leader, vllm_python) as tell:
        told: Document = tell(checkpoint=str(checkpoints[1]), version=1)
        assert told["state"] == "completed", told
    turns = say(leader, PROMPTS, HEAD)
    assert {turn["weight_version"] for turn in turns} == {1}
    agrees(turns, spoken[checkpoints[1]])


def test_its_death_is_named_and_its_answers_go_on(cluster: SpanCluster) -> None:
    """The core of its leader: nothing is left after two seconds, and turns in flight end in the next generation."""
    span = cluster.wait_serving(limit_s=START_S)
    leader, follower = cluster.leader(), cluster.follower()
    trees = cluster.tree(leader) + cluster.tree(follower)
    node = cluster.nodes[leader]
    job = node.post_job(
        {
            "agents": [{"id": "a", "model": "policy", "params": {"max_tokens": 150, "ignore_eos": True}}],
            "rounds": 1,
            "conversations": [{"prompt": prompt} for prompt in PROMPTS],
        }
    )
    wait_for(lambda: node.get("/v1/workers")["workers"][0]["slots"]["in_use"] > 0, "turns are in flight")
    victim = engines(cluster, leader, "::EngineCore")[0]
    os.kill(victim.pid, signal.SIGKILL)
    wait_for(lambda: gone(trees), "nothing of the generation is left", GONE_S)
    ended = node.wait_ended(job, START_S)
    assert ended["state"] == "completed"
    assert "member 0 at 127.0.0.1" in node.log()
    assert f"({victim.pid}) died" in node.log()
    assert cluster.span()["generation"] > span["generation"]


def test_a_frozen_part_is_found_and_named(cluster: SpanCluster) -> None:
    """The engine itself waits for 300 s; the verdict names the stopped process, though the leader computes."""
    span = cluster.wait_serving(limit_s=START_S)
    node, follower = cluster.nodes[cluster.leader()], cluster.follower()
    frozen = engines(cluster, follower, "::Worker")[0]
    frozen.suspend()
    began_at = time.monotonic()
    job = node.post_job(
        {
            "agents": [{"id": "a", "model": "policy", "params": {"max_tokens": 4, "ignore_eos": True}}],
            "rounds": 1,
            "conversations": [{"prompt": "Are you there?"}],
        }
    )
    wait_for(lambda: f"({frozen.pid}) is stopped" in node.log(), "the stopped process is named", 120)
    assert time.monotonic() - began_at < 6 * STALL_S
    assert node.wait_ended(job, START_S)["state"] == "completed"
    assert cluster.span()["generation"] > span["generation"]

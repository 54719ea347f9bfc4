"""A change that is asked of one node and made on all of them; where one cannot make it, the answer is no success.

Source: specification, "One address".
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from roundhouse_client import Client, Refused, TrainerClient
from tests.engines.adapters import write_peft_adapter
from tests.faults.test_weights import _write_checkpoint
from tests.harness.postgres import PostgresServer
from tests.harness.programs import PROGRAMS
from tests.harness.service import Service, run_command, serving
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
LEASE_S = 2.0
KEY = "a-key-of-the-whole-cluster"
ODD = {b"accept": b"\xe9"}  # a byte that clients may send
UPDATE = "/v1/models/m/weights/update"


@pytest.fixture
def nodes(tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer) -> Iterator[list[Service]]:
    """Three nodes on one store: two serve ``m``, the third ``other``."""
    database = postgres.new_database()
    for name in ("launched", "one", "two"):
        _write_checkpoint(tmp_path / name)
    with ExitStack() as stack:
        found = []
        for number, name in enumerate(("m", "m", "other")):
            model = {
                "engine": "vllm",
                "command": [sys.executable, "-I", "-S", str(PROGRAMS / "vllm_engine.py")],
                "args": {"fault-file": str(tmp_path / f"fault-{number}")},
                "model": str(tmp_path / "launched"),
                "max_adapters": 2,
            }
            server = {"address": "127.0.0.1", "api_keys": [KEY], "roots": [str(tmp_path)]}
            store = {"url": database, "lease_s": LEASE_S}
            node = serving(tmp_path / f"node-{number}", free_ports(1), {name: model}, server, store=store)
            found.append(stack.enter_context(node))
        wait_for(lambda: all(len(node.get("/v1/nodes")["nodes"]) == 3 for node in found), "they know each other")
        wait_for(lambda: all("m" in str(node.get("/v1/models")) for node in found), "they know their models")
        yield found


def versions(nodes: list[Service]) -> list[int]:
    return [node.get("/v1/models/m/weights")["version"] for node in nodes[:2]]


def is_ready(node: Service) -> bool:
    return bool(node.get("/v1/workers")["workers"][0]["state"] == "ready")


def test_weights_reach_all_nodes_with_one_version(nodes: list[Service], tmp_path: Path) -> None:
    """Through any node, also one without the model; a request that does not say which nodes is refused."""
    first, _, third = nodes
    body = {"checkpoint": str(tmp_path / "one")}
    refused = first.http.post(UPDATE, json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "nodes_unnamed")
    assert versions(nodes) == [0, 0]
    assert first.http.post(f"{UPDATE}?nodes=this", json=body).status_code == 200
    assert versions(nodes) == [1, 0]
    answer = third.http.post(f"{UPDATE}?nodes=all", json={"checkpoint": str(tmp_path / "two")})
    assert answer.status_code == 200, answer.text
    assert sorted(each["status"] for each in answer.json()["nodes"]) == [200, 200]
    assert {each["url"] for each in answer.json()["nodes"]} == {node.url for node in nodes[:2]}
    assert versions(nodes) == [2, 2]
    with TrainerClient(first.url, "m", api_key=KEY, nodes="all") as trainer:
        assert trainer.look()["version"] == 2
    with Client(first.url, api_key=KEY) as client:
        update = client.update_weights("m", body, nodes="all")
        assert (update.version, len(update.document["nodes"])) == (3, 2)
    assert versions(nodes) == [3, 3]


def test_a_node_that_fails_is_named(nodes: list[Service], tmp_path: Path) -> None:
    """The answer says where the change was made and where not, and is no success."""
    first, second = sorted(nodes[:2], key=lambda node: node.url)
    second.http.post(f"{UPDATE}?nodes=this", json={"checkpoint": str(tmp_path / "one"), "version": 7})
    answer = first.http.post(f"{UPDATE}?nodes=all", json={"checkpoint": str(tmp_path / "two"), "version": 5})
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (502, "nodes_failed")
    assert [each["path"] for each in problem["errors"]] == [second.url, first.url]
    assert problem["errors"][1]["message"] == "has made the change"
    assert sorted(versions(nodes)) == [5, 7]
    third = nodes[2].http.post(f"{UPDATE}?nodes=all", json={"checkpoint": str(tmp_path / "two")}, headers=ODD)
    assert (third.status_code, versions(nodes)) == (200, [8, 8])
    second.kill()
    for _ in range(2):  # seen lately, and then no longer: it may be back with what it had
        with Client(first.url, api_key=KEY) as client, pytest.raises(Refused, match=second.url) as refused:
            client.update_weights("m", {"checkpoint": str(tmp_path / "two")}, nodes="all")
        assert "has made the change" not in str(refused.value)
        assert first.http.post(UPDATE, json={"checkpoint": str(tmp_path / "two")}).status_code == 409
        assert first.get("/v1/models/m/weights")["version"] == 8
        wait_for(partial(is_missed, first, second.url), "it has not been seen for a lease")


def is_missed(node: Service, url: str) -> bool:
    seats = node.get("/v1/nodes")["nodes"]
    return any(f":{seat['port']}" in url and seat["seen_s"] > 2 * LEASE_S for seat in seats)


def test_of_two_updates_at_once_none_is_half_a_success(nodes: list[Service], tmp_path: Path) -> None:
    """Each node has the weights of one of them, or the answer says that it has not."""
    bodies = [{"checkpoint": str(tmp_path / name)} for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(node.http.post, f"{UPDATE}?nodes=all", json=body)
            for node, body in zip(nodes, bodies, strict=False)
        ]
        statuses = [each.result().status_code for each in asked]
    assert 200 in statuses
    states = [node.get("/v1/models/m/weights") for node in nodes[:2]]
    by_version = {state["version"]: state["checkpoint"] for state in states}
    assert all(by_version[state["version"]] == state["checkpoint"] for state in states), (
        "one version has one checkpoint"
    )


@pytest.mark.parametrize(("query", "headers"), [("&wait=false", {}), ("", {"x-roundhouse-priority": "1"})])
def test_what_the_others_would_not_get_is_refused(nodes: list[Service], query: str, headers: dict[str, str]) -> None:
    """By each node in the same way, before any change."""
    for node in nodes:
        answer = node.http.post(f"/v1/workers/m-0/drain?nodes=all{query}", headers=headers)
        assert answer.status_code == 400, answer.text
    assert is_ready(nodes[0])
    assert is_ready(nodes[1])


def test_a_trainers_group_has_the_engines_of_one_node(nodes: list[Service]) -> None:
    """Broadcasts on several nodes are refused with the way out; nothing has begun."""
    body = {"master_port": 1}
    refused = nodes[0].http.post("/v1/models/m/weights/init?nodes=all", json=body)
    assert (refused.status_code, "?nodes=this" in refused.text) == (422, True)
    refused = nodes[0].http.post("/v1/models/m/weights/init", json=body)
    assert refused.json()["code"] == "nodes_unnamed"
    assert nodes[0].get("/v1/models/m/weights")["group"] is None


def test_adapters_reloads_and_drains_reach_all_nodes(nodes: list[Service], tmp_path: Path) -> None:
    """Each on the nodes that have the model; without the word, a change is the asked node's alone."""
    first, second, third = nodes
    write_peft_adapter(tmp_path / "poet", 1)
    with Client(third.url, api_key=KEY) as client:
        loaded = client.load_adapter("m", "poet", str(tmp_path / "poet"), nodes="all")
        assert len(loaded.document["nodes"]) == 2
        for node in (first, second):
            assert [each["name"] for each in node.get("/v1/models/m/adapters")["adapters"]] == ["poet"]
        client.unload_adapter("m", "poet", nodes="all")
        client.drain_worker("m-0", nodes="all")
        for node in (first, second):
            assert node.get("/v1/models/m/adapters")["adapters"] == []
            assert not is_ready(node)
        assert is_ready(third)
        client.resume_worker("m-0", nodes="all")
    for node in (first, second):
        wait_for(partial(is_ready, node), "it takes turns again")
    told = run_command("reload", "--all-nodes", "--url", first.url, "--api-key", KEY, folder=tmp_path)
    assert all(node.url in told.stdout for node in nodes), told.stdout + told.stderr
    second.config.write_text("models: {}")
    told = run_command("reload", "--all-nodes", "--url", first.url, "--api-key", KEY, folder=tmp_path)
    assert (told.returncode, second.url in told.stderr) == (3, True)


def test_what_one_node_refuses_is_refused_in_its_words(nodes: list[Service]) -> None:
    """Nothing is asked of others where none has the model."""
    for place in ("/v1/workers/none-0/drain", "/v1/models/none/load"):
        asked = [nodes[0].http.post(f"{place}{query}").json() for query in ("", "?nodes=all")]
        assert asked[0]["status"] == 404
        assert asked[1] == asked[0]


@pytest.mark.parametrize("query", ["nodes=some", "nodes=all&nodes=this", "nodes="])
def test_another_word_is_refused(nodes: list[Service], query: str) -> None:
    """So is the parameter where it means nothing."""
    assert nodes[0].http.post(f"/v1/config/reload?{query}").status_code == 400
    assert nodes[0].http.get(f"/v1/models/m/weights?{query}").status_code == 400
    headers = {"x-roundhouse-passed": "1.00"}
    assert nodes[0].http.post("/v1/config/reload", headers=headers).status_code == 400
    assert nodes[0].http.get("/v1/models/m/weights", headers=headers).status_code == 400

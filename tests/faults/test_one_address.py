"""Any node answers for models that only another one serves: whole, once, and only where the key is known there.

Source: specification, "One address".
"""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.postgres import PostgresServer
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for

pytestmark = pytest.mark.system
LEASE_S = 2.0
KEY, OTHER_KEY = "first-key-of-the-cluster", "key-of-one-node-only"


def asked(model: str, **fields: object) -> Document:
    return {"model": model, "messages": [{"role": "user", "content": "Say something."}], **fields}


def chat(service: Service, body: Document, **headers: str) -> Document:
    answer = service.http.post("/v1/chat/completions", json=body, headers=headers)
    return {"status": answer.status_code, "headers": dict(answer.headers), "body": answer.json()}


def knows(service: Service, model: str) -> bool:
    return model in {each["id"] for each in service.get("/v1/models")["data"]}


@pytest.fixture
def nodes(tmp_path: Path, free_ports: Callable[[int], int], postgres: PostgresServer) -> Iterator[list[Service]]:
    """Two nodes: the first has the models ``m`` and ``own``, the second ``m`` and ``slow``."""
    database = postgres.new_database()
    with ExitStack() as stack:
        found = []
        given: list[tuple[str, Document]] = [("own", {}), ("slow", {"tokens": 40, "interval": 0.1})]
        for number, (name, flags) in enumerate(given):
            models = {"m": scripted_model(free_ports(1)), name: scripted_model(free_ports(1), **flags)}
            keys = [KEY] if number else [KEY, OTHER_KEY]
            server = {"address": "127.0.0.1", "api_keys": keys, "drain_s": 20}
            node = serving(
                tmp_path / f"node-{number}",
                free_ports(1),
                models,
                server,
                store={"url": database, "lease_s": LEASE_S},
            )
            found.append(stack.enter_context(node))
        wait_for(lambda: knows(found[0], "slow") and knows(found[1], "own"), "they know each other")
        yield found


def test_a_request_is_answered_by_the_node_that_has_its_model(nodes: list[Service]) -> None:
    """Whole or streamed, in the forms of both APIs; each node's own models stay its own."""
    first, second = nodes
    passed, direct = chat(second, asked("own")), chat(first, asked("own"))
    assert passed["status"] == direct["status"] == 200
    assert passed["body"]["choices"][0]["message"] == direct["body"]["choices"][0]["message"]
    body = asked("slow", stream=True)
    with first.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert len(events) > 40
    refused = [node.http.post("/v1/messages", json={"model": "own", "messages": "none"}) for node in nodes]
    assert [each.status_code for each in refused] == [400, 400]
    assert refused[0].json() == refused[1].json()
    assert refused[0].json()["type"] == "error"


def test_a_key_that_the_other_node_does_not_know_is_refused_there(nodes: list[Service]) -> None:
    """The gate of the serving node decides, as for any request of its own."""
    first, _ = nodes
    answer = first.http.post(
        "/v1/chat/completions", json=asked("slow"), headers={"Authorization": f"Bearer {OTHER_KEY}"}
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "not_authorised"


def test_an_unknown_model_is_refused_with_the_names_of_none(nodes: list[Service]) -> None:
    """A model that no node has is unknown at each of them, in the form of the API."""
    answer = chat(nodes[0], asked("nowhere"))
    assert (answer["status"], answer["body"]["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "claim", ["", "1", "1.abc", f"{10**30}.00", "1e9.00", "9999999999.é".encode().decode("latin-1")]
)
def test_a_request_that_only_claims_to_be_passed_on_is_refused(nodes: list[Service], claim: str) -> None:
    """No client can write the proof, which is of this body, path and time."""
    answer = nodes[0].http.post(
        "/v1/chat/completions", json=asked("own"), headers={b"x-roundhouse-passed": claim.encode("latin-1")}
    )
    assert answer.status_code == 400, answer.text


def test_a_drain_waits_for_answers_of_other_nodes(nodes: list[Service]) -> None:
    """A stream that is passed on ends whole although its node is asked to stop meanwhile."""
    first, _ = nodes
    assert first.process is not None
    with first.http.stream("POST", "/v1/chat/completions", json=asked("slow", stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        first.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert first.process.wait(30) == 0


def test_a_stream_whose_node_dies_ends_with_an_error_event(nodes: list[Service]) -> None:
    """Its events are whole up to there, and the error says which node is gone."""
    first, second = nodes
    assert second.process is not None
    with first.http.stream("POST", "/v1/chat/completions", json=asked("slow", stream=True)) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        got = [next(lines) for _ in range(5)]
        second.process.kill()
        second.process.wait()
        got += lines
    events = [json.loads(line.removeprefix("data: ")) for line in got]
    assert events[-1]["error"]["code"] == "node_unreachable"
    assert all("choices" in event for event in events[:-1])


def test_a_frozen_node_does_not_hold_its_requests_for_ever(nodes: list[Service]) -> None:
    """A request that waits for it gets an error once the store has not seen it for its lease."""
    first, second = nodes
    assert second.process is not None
    with ThreadPoolExecutor(1) as pool:
        second.process.send_signal(signal.SIGSTOP)
        try:
            answer = pool.submit(chat, first, asked("slow")).result(60)
        finally:
            second.process.send_signal(signal.SIGCONT)
    assert (answer["status"], answer["body"]["error"]["code"]) == (502, "node_unreachable")


def test_a_client_that_leaves_ends_its_request_at_the_other_node(nodes: list[Service]) -> None:
    """The slot there is free again long before the answer would have ended."""
    first, second = nodes
    with first.http.stream("POST", "/v1/chat/completions", json=asked("slow", stream=True)) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        assert busy(second)
    wait_for(lambda: not busy(second), "the slot is free", 3)


def busy(service: Service) -> bool:
    return any(worker["slots"]["in_use"] for worker in service.get("/v1/workers")["workers"])


def test_a_session_is_one_on_all_nodes(nodes: list[Service]) -> None:
    """The node that has the model records; any node knows the session, and a key of another does not."""
    first, second = nodes
    opened = first.http.post("/v1/sessions", json={"model": "slow", "record": {"tokens": True}})
    assert opened.status_code == 201, opened.text
    session = opened.json()["id"]
    body = {"messages": [{"role": "user", "content": "Say something."}]}
    for node in nodes:
        for fields in ({}, {"stream": True}):
            answer = node.http.post(f"/sessions/{session}/v1/chat/completions", json={**body, **fields}, timeout=60)
            assert answer.status_code == 200, answer.text
    assert [node.get(f"/v1/sessions/{session}")["exchanges"] for node in nodes] == [4, 4]
    refused = first.http.post("/sessions/none/v1/messages", json={**body, "max_tokens": 3, "model": "slow"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    wrong = {"Authorization": f"Bearer {OTHER_KEY}"}
    assert first.http.post(f"/sessions/{session}/v1/chat/completions", json=body, headers=wrong).status_code == 401
    assert second.http.delete(f"/v1/sessions/{session}").status_code == 204
    assert first.http.get(f"/v1/sessions/{session}").status_code == 404

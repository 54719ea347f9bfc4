"""Keys at the front door: their rights, the headers that carry them, and their accounts."""

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

KEYS = {name: f"{name}-{'k' * 24}" for name in ("alice", "bob", "carol", "dora", "erin", "viewer", "root", "slow")}
SAID = [{"role": "user", "content": "Go."}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """Return a service with one slot, whose engine holds prompts that name a file until it exists."""
    folder = tmp_path_factory.mktemp("keys")
    keys = [
        {"name": "alice", "key": KEYS["alice"]},
        {"name": "bob", "key": KEYS["bob"], "max_priority": 5, "queued": 1},
        {"name": "carol", "key": KEYS["carol"]},
        {"name": "dora", "key": KEYS["dora"]},
        {"name": "erin", "key": KEYS["erin"], "queued": 2},
        {"name": "viewer", "key": KEYS["viewer"], "scopes": ["read"]},
        {"name": "root", "key": KEYS["root"], "scopes": ["admin"]},
        {"name": "slow", "key": KEYS["slow"], "requests_per_s": 0.001},
    ]
    models = {"m": scripted_model(free_ports(1), slots=1, hold="file=([^ ]+) ")}
    with serving(folder, free_ports(1), models, {"keys": keys}, ready=False) as running:
        headers = {"Authorization": f"Bearer {KEYS['root']}"}
        wait_for(lambda: httpx.get(f"{running.url}/readyz", headers=headers).is_success, "the engine is ready")
        yield running


@pytest.fixture(scope="module")
def clients(service: Service) -> Iterator[dict[str, openai.OpenAI]]:
    """Return OpenAI's client of each key; their open connections end with them."""
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0))
            for name, key in KEYS.items()
        }


def look(service: Service, path: str, name: str = "root") -> dict[str, object]:
    document: dict[str, object] = httpx.get(
        f"{service.url}{path}", headers={"Authorization": f"Bearer {KEYS[name]}"}
    ).json()
    return document


def test_stock_clients_send_their_keys(service: Service, clients: dict[str, openai.OpenAI]) -> None:
    """OpenAI's as a bearer token, Anthropic's in its own header; a wrong key gets an error in the client's form."""
    assert clients["alice"].chat.completions.create(model="m", messages=SAID).choices  # type: ignore[arg-type]
    with (
        anthropic.Anthropic(base_url=service.url, api_key="none-of-ours", max_retries=0) as ours,
        pytest.raises(anthropic.AuthenticationError, match="key"),
    ):
        ours.messages.create(model="m", max_tokens=3, messages=[{"role": "user", "content": "Go."}])
    with pytest.raises(openai.AuthenticationError, match="key"):
        clients["alice"].with_options(api_key="none-of-ours").models.list()
    answer = httpx.post(
        f"{service.url}/v1/chat/completions",
        headers={"x-api-key": KEYS["alice"]},
        json={"model": "m", "messages": SAID},
    )
    assert answer.status_code == 200


def test_a_key_that_may_only_read_asks_no_engine(clients: dict[str, openai.OpenAI]) -> None:
    """It sees the list of models."""
    client = clients["viewer"]
    assert [model.id for model in client.models.list().data] == ["m"]
    with pytest.raises(openai.PermissionDeniedError, match="scope submit"):
        client.chat.completions.create(model="m", messages=SAID)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("Authorization", "Bearer {carol}"), ("x-api-key", "{viewer}")], 200),  # some clients have both
        ([("x-api-key", "{carol}"), ("Authorization", "Bearer {viewer}")], 403),
        ([("Authorization", "Bearer none"), ("x-api-key", "{carol}")], 401),
        ([("Authorization", "Bearer {carol}"), ("authorization", "Bearer {carol}")], 200),
        ([("Authorization", "Bearer {carol}"), ("authorization", "Bearer {root}")], 400),
        ([("x-api-key", "{viewer}"), ("X-API-KEY", "{carol}")], 400),
        ([("Authorization", "Bearer {carol}, Bearer {root}")], 401),
    ],
    ids=["both", "of other scopes", "a wrong one counts", "twice the same", "two", "two of Anthropic's", "a list"],
)
def test_one_key_counts_and_two_of_a_kind_are_refused(
    service: Service, headers: list[tuple[str, str]], status: int
) -> None:
    """``Authorization`` is the one that counts; a proxy before us might read a doubled header differently."""
    sent = [(name, value.format(**KEYS)) for name, value in headers]
    answer = httpx.post(f"{service.url}/v1/chat/completions", headers=sent, json={"model": "m", "messages": SAID})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["type"] in {"invalid_request_error", "authentication_error", "permission_error"}


def test_requests_without_a_slot_count_for_the_rate(service: Service) -> None:
    """They need the scope of all requests to an engine."""

    def count(name: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[name]}"}
        return httpx.post(f"{service.url}/tokenize", headers=headers, json={"model": "m", "content": "a"})

    assert count("slow").status_code == 404  # this engine's own word
    refused = count("slow")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert count("viewer").status_code == 403


def test_priority_is_bounded_by_the_key(clients: dict[str, openai.OpenAI]) -> None:
    """A higher priority is refused, not lowered silently."""
    for name, most in (("alice", 0), ("bob", 5)):
        chat = clients[name].chat.completions
        headers = {"X-Roundhouse-Priority": str(most)}
        assert chat.create(model="m", messages=SAID, extra_headers=headers).choices  # type: ignore[arg-type]
        headers = {"X-Roundhouse-Priority": str(most + 1)}
        with pytest.raises(openai.BadRequestError, match=f"max_priority, {most}"):
            chat.create(model="m", messages=SAID, extra_headers=headers)  # type: ignore[arg-type]


def test_waiting_requests_of_a_key_are_bounded(
    service: Service, clients: dict[str, openai.OpenAI], tmp_path: Path
) -> None:
    """They count together with its turns; those of other keys do not."""
    held = [{"role": "user", "content": f"file={tmp_path}/go "}]

    def ask(name: str) -> object:
        return clients[name].chat.completions.create(model="m", messages=held)  # type: ignore[arg-type]

    def pools() -> object:
        found = look(service, "/v1/status")["pools"]
        assert isinstance(found, dict)
        return found["in_flight"], found["ready"]

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, "alice")]
        wait_for(lambda: pools() == (1, 0), "alice has the slot")
        asked.append(threads.submit(ask, "bob"))
        wait_for(lambda: pools() == (1, 1), "bob waits")
        with pytest.raises(openai.RateLimitError, match="queued") as refused:
            ask("bob")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        asked.append(threads.submit(ask, "alice"))
        wait_for(lambda: pools() == (1, 2), "alice may wait as well")
        (tmp_path / "go").touch()
        assert all(one.result(timeout=20) for one in asked)


def test_requests_that_come_at_once_count_once(
    service: Service, clients: dict[str, openai.OpenAI], tmp_path: Path
) -> None:
    """As many as may wait are taken, though the second is checked while the first joins the queue."""
    held = [{"role": "user", "content": f"file={tmp_path}/go "}]
    body = json.dumps({"model": "m", "messages": held}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['erin']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    place = ("127.0.0.1", int(service.url.rpartition(":")[2]))

    def waiting() -> object:
        found = look(service, "/v1/status")["pools"]
        assert isinstance(found, dict)
        return found["ready"]

    def ask() -> object:
        return clients["alice"].chat.completions.create(model="m", messages=held)  # type: ignore[arg-type]

    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        stack.callback((tmp_path / "go").touch)
        threads.submit(ask)
        wait_for(
            lambda: look(service, "/v1/workers/m-0")["slots"] == {"total": 1, "in_use": 1, "held": 0}, "it is full"
        )
        for _ in range(5):
            with closing(socket.create_connection(place)) as one, closing(socket.create_connection(place)) as other:
                for connection in (one, other):
                    connection.sendall(head.encode() + body)
                wait_for(lambda: waiting() == 2, "both wait")
            wait_for(lambda: waiting() == 0, "their clients have gone")


def test_requests_are_counted_for_their_keys(service: Service, clients: dict[str, openai.OpenAI]) -> None:
    """They have no job, and a key sees its own.

    No other test uses this key, since accounts are written a moment later.
    """
    before = used(service, "dora")
    assert clients["dora"].chat.completions.create(model="m", messages=SAID).choices  # type: ignore[arg-type]
    wait_for(lambda: used(service, "dora")["turns"] == before["turns"] + 1, "it is counted")
    now = used(service, "dora")
    assert now["answer_tokens"] == before["answer_tokens"] + 3
    assert (now["job"], now["agent"]) == (None, "request")


def used(service: Service, name: str) -> dict[str, Any]:
    rows = look(service, "/v1/usage?by=key,job,agent", name)["usage"]
    assert isinstance(rows, list)
    found: list[dict[str, Any]] = [row for row in rows if row["key"] == name]
    assert len(rows) == len(found), "of no other key"
    return found[0] if found else {"turns": 0, "answer_tokens": 0}

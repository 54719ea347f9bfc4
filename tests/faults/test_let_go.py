"""A request's memory is freed with its answer, not only by the garbage collector."""

import json
import socket
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.harness.service import Service, scripted_model, serving
from tests.harness.waiting import wait_for

BODY: dict[str, object] = {"model": "m", "messages": [{"role": "user", "content": "x" * 12_000_000}]}
COUNT, HELD = 24, 8  # bodies


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("held")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        yield running


def ask(service: Service) -> None:
    assert service.http.post("/v1/chat/completions", json=BODY).status_code == 200


def stream(service: Service) -> None:
    assert "[DONE]" in service.http.post("/v1/chat/completions", json={**BODY, "stream": True}).text


def leave(service: Service) -> None:
    """Hang up as soon as the request is sent: the service may still be connecting to the engine."""
    body = json.dumps(BODY).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.http.base_url.port or 0), timeout=10) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_for(lambda: service.get("/v1/status")["pools"]["in_flight"] == 0, "its slot is free")


@pytest.mark.system
@pytest.mark.parametrize("way", [ask, stream, leave])
def test_a_service_keeps_no_body_of_a_finished_request(service: Service, way: Callable[[Service], None]) -> None:
    """Requests, their runners and their answers once referred to each other, so each body stayed for minutes."""
    assert service.process is not None
    process = psutil.Process(service.process.pid)
    for _ in range(COUNT):  # the allocator keeps the memory of as many at once
        way(service)
    before = process.memory_info().rss
    for _ in range(COUNT):
        way(service)
    size = len(str(BODY))
    wait_for(lambda: process.memory_info().rss - before < HELD * size, "the bodies are let go")

"""An agent behind a session's URL, whose service is killed again and again (specification, "Sessions")."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from roundhouse_client import Client
from tests.harness.service import serving
from tests.harness.waiting import wait_for

KILLS, SOAK_KILLS = 5, 60
START_S = 60.0
AGAIN_S = 20.0


@pytest.mark.system
def test_what_an_agent_has_heard_is_in_its_row_once(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int], request: pytest.FixtureRequest
) -> None:
    """It asks again when its connection breaks; one row has each answer that it went on from, and no other."""
    kills = SOAK_KILLS if request.config.getoption("--soak") else KILLS
    chance = Random(kills)  # noqa: S311
    port = free_ports(2)
    about = {"engine": "embedded", "model": str(tiny_model), "slots": 2, "context": 4096, "args": {"threads": 1}}
    model = {**about, "port": port + 1}
    with serving(tmp_path, port, {"m": model}, limit_s=START_S) as service, Client(service.url) as client:
        session = client.open_session(model="m")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Say one."}]
        for number in range(kills):
            for _ in range(2):
                messages.append(_ask(session.url, messages, number))
                messages.append({"role": "user", "content": "Go on."})
            asked = httpx.Request("POST", f"{session.url}/chat/completions", json=_body(messages, number))
            with _sent(asked):
                until = time.monotonic() + chance.uniform(0.0, 0.06)
                wait_for(lambda at=until: time.monotonic() > at, "a random moment")  # type: ignore[misc]
                service.kill()
            service.start(ready=False, limit_s=START_S)
        messages.append(_ask(session.url, messages, kills))
        rows = client.get_session_rows(session.id, partial=True)
        (episode,) = client.get_session_episodes(session.id, partial=True)
        shown = client.get_session(session.id)
    row, *unread = rows  # answers that went out whole although nothing reads them: the service cannot know
    assert all(each.rounds[0] == each.rounds[1] for each in unread)
    heard = [each["content"] for each in messages if each["role"] == "assistant"]
    written = [each["message"]["content"] for each in episode["traces"][0]["nodes"] if each.get("sampled")]
    assert written == heard
    assert shown.exchanges - shown.uncertain - len(unread) == len(heard)
    assert sum(row.mask) == sum(call["usage"]["completion_tokens"] for call in episode["traces"][0]["calls"])


def _body(messages: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    return {"model": "any", "messages": messages, "max_tokens": 4, "seed": seed, "temperature": 1.0}


def _sent(asked: httpx.Request) -> socket.socket:
    """Send a request whose answer is not read."""
    connection = socket.create_connection((asked.url.host, asked.url.port or 80))
    head = f"POST {asked.url.path} HTTP/1.1\r\nHost: {asked.url.netloc.decode()}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(asked.content)}\r\n\r\n"
    connection.sendall(head.encode() + asked.content)
    return connection


def _ask(url: str, messages: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Ask until there is an answer."""
    found: list[dict[str, Any]] = []

    def answered() -> bool:
        try:
            answer = httpx.post(f"{url}/chat/completions", json=_body(messages, seed), timeout=START_S)
        except httpx.HTTPError:
            return False
        if answer.is_success:
            found.append(answer.json()["choices"][0]["message"])
        return answer.is_success

    wait_for(answered, "there is an answer", AGAIN_S)
    return {"role": "assistant", "content": found[0]["content"]}

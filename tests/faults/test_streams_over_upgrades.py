"""Streams of clients go on over an upgrade of the service, on the same connection."""

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.test_continued_streams import words_of
from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.upgrades import upgrade
from tests.harness.waiting import LIMIT_S, wait_for

Ports = Callable[[int], int]
TOKENS = 60
ANSWER = " ".join(f"word{number}" for number in range(TOKENS))
SERVER = {"drain_s": 0.1, "heartbeat_s": 0.3}
BODY: Document = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Go."}],
}


def model(port: int, **flags: object) -> Document:
    given = {"goes_on": "kept", "tokens": TOKENS, "interval": 0.1, **flags}
    return {**scripted_model(port), "args": given}


class Client(threading.Thread):
    """A client that asks on one connection, reads a stream to its end, and then asks for the models on it."""

    def __init__(self, service: Service, **changed: object) -> None:
        super().__init__()
        self.text = ""
        self.fault: httpx.HTTPError | None = None
        self.models = 0
        self._url = service.url
        self._headers = {"x-roundhouse-continue": str(changed.pop("header", "on"))}
        self._body = {**BODY, **changed}
        self.start()

    def run(self) -> None:
        """Ask."""
        limits = httpx.Limits(max_connections=1)
        try:
            with httpx.Client(base_url=self._url, timeout=60, trust_env=False, limits=limits) as http:
                with http.stream("POST", "/v1/chat/completions", json=self._body, headers=self._headers) as answer:
                    for piece in answer.iter_text():
                        self.text += piece
                self.models = http.get("/v1/models").status_code
        except httpx.HTTPError as error:
            self.fault = error

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The documents of the stream so far."""
        lines = [line[6:] for line in self.text.splitlines() if line.startswith("data: {") and line.endswith("}")]
        return [json.loads(line) for line in lines]

    def ended(self) -> list[dict[str, Any]]:
        """Return the documents of the whole stream, after its end."""
        self.join(LIMIT_S * 3)
        assert not self.is_alive()
        assert self.fault is None, self.fault
        return self.frames


@pytest.mark.system
def test_streams_go_on_in_the_next_program(tmp_path: Path, free_ports: Ports) -> None:
    """One is in the middle of its answer, others wait for the slot: each gets whole words, and its connection stays."""
    own = {**model(free_ports(1), record=str(tmp_path / "record")), "slots": 1}
    with serving(tmp_path, free_ports(1), {"m": own}, SERVER) as service:
        first = Client(service)
        wait_for(lambda: "word9" in first.text, "it is in the middle of its answer")
        second, third = Client(service), Client(service, max_tokens=5)
        wait_for(lambda: ": waiting" in second.text and ": waiting" in third.text, "the others wait")
        upgrade(service)
        for client, words in ((first, ANSWER), (second, ANSWER), (third, ANSWER[: ANSWER.index(" word5")])):
            frames = client.ended()
            assert words_of(frames) == words
            assert not any("error" in frame for frame in frames)
            (usage,) = [frame["usage"] for frame in frames if frame.get("usage")]
            assert usage["completion_tokens"] == len(words.split())
            assert client.text.count("data: [DONE]") == 1
            assert client.text.count('"finish_reason": "') + client.text.count('"finish_reason":"') == 1
            assert client.models == 200, "on the same connection"
    halves = [
        each["messages"][-1]["content"] for each in recorded(tmp_path / "record") if "continue_final_message" in each
    ]
    assert halves, "it went on with its half"
    assert all(ANSWER.startswith(half) and len(half.split()) > 9 for half in halves)


class WholeClient(threading.Thread):
    """A client of an unstreamed request, which then asks for the models on the same connection."""

    def __init__(self, service: Service, path: str = "/v1/chat/completions", **headers: str) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self.answered_at = 0.0
        self.models = 0
        self._url, self._path, self._headers = service.url, path, headers
        self.start()

    def run(self) -> None:
        """Ask."""
        limits = httpx.Limits(max_connections=1)
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False, limits=limits) as http:
            self.answer = http.post(self._path, json={**BODY, "stream": False}, headers=self._headers)
            self.answered_at = time.monotonic()
            self.models = http.get("/v1/models").status_code

    def ended(self) -> httpx.Response:
        self.join(LIMIT_S * 3)
        assert self.answer is not None
        return self.answer


@pytest.mark.system
def test_requests_without_an_answer_wait_for_the_next_program(tmp_path: Path, free_ports: Ports) -> None:
    """Streams that have not begun and whole answers; a page of another origin needs headers of its own program."""
    own = {**model(free_ports(1)), "slots": 1}
    with serving(tmp_path, free_ports(1), {"m": own}, {**SERVER, "heartbeat_s": 30.0}) as service:
        running = WholeClient(service)
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 1, "one is on the slot")
        queued = [WholeClient(service), WholeClient(service, **{"x-roundhouse-continue": "off"})]
        queued.append(WholeClient(service, connection="close"))
        streams = [Client(service, max_tokens=5), Client(service, max_tokens=5, header="off")]
        foreign = WholeClient(service, origin=service.url)
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] == 6, "the others wait")
        upgrade(service)
        for client in (running, *queued):
            answer = client.ended()
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == ANSWER
            assert answer.headers["x-roundhouse-attempts"] == ("2" if client is running else "1")
            assert client.models == 200
        assert queued[-1].ended().headers["connection"] == "close"
        assert running.answered_at < min(each.answered_at for each in queued), "the oldest goes first"
        for stream in streams:
            assert words_of(stream.ended()) == ANSWER[: ANSWER.index(" word5")]
            assert stream.models == 200
        answer = foreign.ended()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutdown")
        assert answer.headers["retry-after"]


class PipelinedClient(threading.Thread):
    """A client that sends requests at once on one connection, and reads to its end."""

    def __init__(self, service: Service, *requests: bytes) -> None:
        super().__init__()
        self.answers = b""
        host, _, port = service.url.removeprefix("http://").partition(":")
        self._connection = socket.create_connection((host, int(port)), timeout=60)
        self._connection.sendall(b"".join(requests))
        self.start()

    def run(self) -> None:
        """Read."""
        with self._connection:
            while piece := self._connection.recv(65536):
                self.answers += piece


def chat_request(*headers: str, **changed: object) -> bytes:
    body = json.dumps({**BODY, **changed}).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + body


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
def test_each_of_several_requests_on_a_connection_is_answered(
    tmp_path: Path, free_ports: Ports, *, stream: bool
) -> None:
    """The bytes of the later ones are read already: the earlier are refused, and the last one is handed over."""
    with serving(tmp_path, free_ports(1), {"m": {**model(free_ports(1)), "slots": 1}}, SERVER) as service:
        running = WholeClient(service)
        wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 1, "one is on the slot")
        ahead = chat_request(stream=stream)
        reader = PipelinedClient(service, ahead, ahead, chat_request("Connection: close"))
        wait_for(lambda: service.get("/v1/status")["pools"]["ready"] == 1, "the first of them waits")
        upgrade(service)
        assert running.ended().status_code == 200
        reader.join(60)
        assert not reader.is_alive()
    heads = re.findall(rb"HTTP/1.1 (\d+)", reader.answers)
    assert len(heads) == 3, reader.answers
    assert heads[-1] == b"200"
    assert len(re.findall(rb'"code": ?"shutdown"', reader.answers)) == 2
    assert reader.answers.count(b"data: [DONE]") == 1


@pytest.mark.system
@pytest.mark.parametrize("how", ["stop", "header"])
def test_other_streams_end_with_an_error(tmp_path: Path, free_ports: Ports, how: str) -> None:
    """A stop hands nothing over; a client that wants no continuation hears so."""
    with serving(tmp_path, free_ports(1), {"m": {**model(free_ports(1)), "slots": 1}}, SERVER) as service:
        client = Client(service, header="off" if how == "header" else "on")
        wait_for(lambda: "word9" in client.text, "it is in the middle of its answer")
        if how == "header":
            upgrade(service)
        else:
            assert service.process is not None
            service.process.send_signal(signal.SIGTERM)
        client.join(LIMIT_S)
        assert client.frames[-1]["error"]["code"] == "shutdown"
        assert words_of(client.frames) != ANSWER


@pytest.mark.system
def test_a_client_that_leaves_meanwhile_frees_its_place(tmp_path: Path, free_ports: Ports) -> None:
    """The next program finds its connection closed, and asks no engine for it."""
    with serving(tmp_path, free_ports(1), {"m": {**model(free_ports(1)), "slots": 1}}, SERVER) as service:
        with (
            httpx.Client(base_url=service.url, timeout=60, trust_env=False) as http,
            http.stream("POST", "/v1/chat/completions", json=BODY) as answer,
        ):
            lines = answer.iter_lines()
            assert any("word9" in line for line in lines)
            agreed = service.http.post("/v1/upgrade", timeout=60)
            assert agreed.status_code == 202
        wait_for(lambda: _is_free(service), "its slot is free", 60)


def _is_free(service: Service) -> bool:
    try:
        told = service.get("/v1/upgrade"), service.get("/v1/workers/m-0")
    except httpx.TransportError:
        return False
    return bool(told[0]["upgrades"] == 1 and told[1]["slots"]["in_use"] == 0)

"""Proof that an embedding engine works (specification, "Engine stalls" and "Circuit breaker")."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.embedding_model import write_embedding_model
from tests.harness.programs import PROGRAMS
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

TOO_LONG = "word " * 400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("embedder")
    model = {
        "engine": "embedded",
        "model": str(write_embedding_model(folder / "bert.gguf")),
        "slots": 2,
        "context": 512,
        "port": free_ports(1),
        "args": {"threads": 1, "embeddings": True},
        "timeouts": {"prefill_stall_s": 1, "busy_stall_s": 0},
        "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
    }
    with serving(folder, free_ports(1), {"m": model}) as running:
        yield running


def scripted(port: int, **flags: object) -> Document:
    return {
        "engine": "llama-server",
        "command": [sys.executable, "-I", "-S", str(PROGRAMS / "embedder.py")],
        "args": flags,
        "port": port,
        "slots": 2,
        "timeouts": {"prefill_stall_s": 1, "busy_stall_s": 0},
        "restart": {"initial_s": 0.1, "max_s": 0.2, "failures": 50},
    }


def embed(service: Service, text: str) -> httpx.Response:
    return service.http.post("/v1/embeddings", json={"model": "m", "input": text})


def state(service: Service) -> tuple[str, int]:
    worker = service.get("/v1/workers/m-0")
    return worker["state"], worker["incarnation"]


def test_a_refused_text_holds_no_worker_that_only_embeds(service: Service) -> None:
    """The engine answers 500 to a text that is too long, and to a chat.

    A vector proves that the requests are at fault.
    """
    assert len(embed(service, "word").json()["data"][0]["embedding"]) == 32
    refused = embed(service, TOO_LONG)
    assert (refused.status_code, refused.headers["x-roundhouse-attempts"]) == (400, "1")
    assert "too large" in refused.json()["error"]["message"]
    assert state(service) == ("ready", 1)
    assert embed(service, "word").status_code == 200


def test_a_chat_with_an_embedding_model_is_refused_in_its_engines_words(service: Service) -> None:
    """The engine goes on serving."""
    body = {"model": "m", "messages": [{"role": "user", "content": "word"}]}
    refused = service.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "logits" in refused.json()["error"]["message"]
    assert state(service) == ("ready", 1)


@pytest.mark.system
@pytest.mark.parametrize(("status", "state_then"), [(400, "ready"), (500, "draining")])
def test_a_template_that_refuses_our_chat_holds_no_worker(
    tmp_path: Path, free_ports: Callable[[int], int], status: int, state_then: str
) -> None:
    """A 400 to the canary's chat proves nothing against an engine that completes a text; a 500 does."""
    models = {"m": scripted(free_ports(1), serves="/v1/completions", status=status)}
    with serving(tmp_path, free_ports(1), models) as service:
        asked = {"model": "m", "prompt": "REFUSED"}
        refused = service.http.post("/v1/completions", json=asked, headers={"X-Roundhouse-Wait-S": "0.2"})
        assert refused.status_code >= 500
        assert state(service) == (state_then, 1)
        code = refused.json()["error"].get("code")
        assert code == (500 if state_then == "ready" else "queue_timeout")


def test_prompts_that_no_engine_takes_count_against_no_worker(
    tmp_path: Path, free_ports: Callable[[int], int], tiny_model: Path
) -> None:
    """Refusals of the template and prompts beyond the context get OpenAI's form, and no worker is blamed."""
    template = (
        "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('No such words') }}{% endif %}"
        "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    )
    args = {"threads": 1, "chat-template": template}
    model = {"engine": "embedded", "model": str(tiny_model), "slots": 1, "context": 512, "args": args}
    with serving(tmp_path, free_ports(1), {"m": {**model, "port": free_ports(1)}}) as service:

        def chat(content: str) -> httpx.Response:
            messages = [{"role": "user", "content": content}]
            return service.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 1})

        for content in ("bad", "word " * 600) * 6:
            refused = chat(content)
            assert (refused.status_code, refused.headers["x-roundhouse-attempts"]) == (400, "1")
            assert refused.json()["error"]["message"]
        worker = service.get("/v1/workers/m-0")
        assert (worker["state"], worker["incarnation"], worker["slots"]["in_use"]) == ("ready", 1, 0)
        assert chat("fine").status_code == 200
        assert service.get("/v1/workers/m-0")["restarts"] == 0


@pytest.mark.system
def test_an_embedding_engine_that_hangs_is_found(service: Service) -> None:
    """It answers no kind of canary, and the next engine embeds the text."""
    _, before = state(service)
    os.kill(service.get("/v1/workers/m-0")["pid"], signal.SIGSTOP)
    answer = embed(service, "word")
    assert (answer.status_code, answer.headers["x-roundhouse-attempts"]) == (200, "2")
    assert state(service) == ("ready", before + 1)


@pytest.mark.system
@pytest.mark.parametrize(("flag", "incarnation"), [("mute-on", 1), ("hang-on", 2)])
def test_a_vector_tells_a_stalled_request_from_a_hung_engine(
    tmp_path: Path, free_ports: Callable[[int], int], flag: str, incarnation: int
) -> None:
    """The silent request alone ends while the engine embeds for others."""
    with serving(tmp_path, free_ports(1), {"m": scripted(free_ports(1), **{flag: "STUCK"})}) as service:
        stalled = service.http.post(
            "/v1/embeddings", json={"model": "m", "input": "STUCK"}, headers={"X-Roundhouse-Deadline-S": "6"}
        )
        assert stalled.status_code in {500, 504}, stalled.text
        wait_for(lambda: state(service)[0] == "ready", "an engine is there")
        assert (state(service)[1] > 1) is (incarnation > 1)

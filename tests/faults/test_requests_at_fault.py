"""Refusals that concern a request: the engine is left alone, and the request fails at once with its words."""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

REPLAY: Final = Path(__file__).parents[1] / "harness" / "programs" / "replay.py"
SSE: Final = {"content-type": "text/event-stream"}


def told(status: int, document: object, headers: dict[str, str] | None = None) -> Document:
    body = document if isinstance(document, str) else json.dumps(document)
    return {"status": status, "body": body, "headers": headers or {}}


def nested(message: str, kind: str = "server_error", code: object = 500) -> Document:
    return {"error": {"code": code, "message": message, "type": kind}}


def frame(document: object) -> str:
    return f"data: {json.dumps(document)}\n\n"


# What servers answer to a request that is at fault, and the words that its caller is to hear.
AT_FAULT: Final[dict[str, tuple[Document, str]]] = {
    "jinja": (told(500, nested("Jinja Exception: System role not supported")), "System role not supported"),
    "alternate": (told(500, nested("Conversation roles must alternate user/assistant/...")), "must alternate"),
    "grammar": (told(500, nested("Cannot use both json_schema and grammar")), "Cannot use both"),
    "image": (told(500, nested("error: cannot make GET request")), "cannot make GET request"),
    "unheard": (told(500, nested("the frobnicator of this request is misaligned")), "misaligned"),
    "detail": (
        told(422, {"detail": [{"loc": ["body", "top_k"], "msg": "must be positive"}]}),
        "top_k: must be positive",
    ),
    "flat": (told(400, {"object": "error", "message": "bad role", "code": "3051"}), "bad role"),
    "null": (told(400, {"error": {"message": "no such thing", "type": None, "code": None}}), "no such thing"),
    "text": (told(400, "what do you want", {"content-type": "text/plain"}), "what do you want"),
    "in a stream": (told(200, frame(nested("role unheard of", "invalid_request_error", None)), SSE), "role unheard of"),
    "unreadable": (told(200, "data: {unreadable}\n\ndata: [DONE]\n\n", SSE), "{unreadable}"),
    "page": (told(200, "<html>Sign in</html>", {"content-type": "text/html"}), "Sign in"),
}
TOO_LONG: Final = {
    "llama.cpp": nested("it exceeds the available context size, try increasing it", "exceed_context_size_error", 400),
    "vllm": nested("The decoder prompt (length 9) is longer than the maximum model length of 8", "BadRequestError"),
    "sglang": {"object": "error", "message": "The input (9 tokens) is longer than the model's context length (8)."},
    "tgi": {"error": "Input validation error: `inputs` must have less than 8 tokens. Given: 9"},
    "llama-cpp-python": nested("Requested tokens (9) exceed context window of 8", "invalid_request_error", None),
    "ollama": {"error": "prompt too long; exceeded max context length by 1 tokens"},
    "openai": nested("Please reduce the length of the messages.", "invalid_request_error", "context_length_exceeded"),
    "xinference": {"detail": "[address=0] maximum context length is 8, you asked for 9"},
}  # fmt: skip


@pytest.fixture
def service_of(tmp_path: Path, free_ports: Callable[[int], int]) -> Callable[..., Any]:
    """Serve a model whose engine gives these answers."""

    def serve(answers: Document, *, rest: str | None = None) -> Any:  # noqa: ANN401 - a context
        (tmp_path / "answers").write_text(json.dumps(answers))
        command = [sys.executable, "-I", "-S", str(REPLAY), "--answers", str(tmp_path / "answers")]
        model = {
            "engine": "llama-server",
            "command": command + (["--rest", rest] if rest else []),
            "port": free_ports(1),
            "slots": 4,
            "restart": {"initial_s": 0.1, "max_s": 0.2},
        }
        return serving(tmp_path / "s", free_ports(1), {"m": model}, ready=rest is None)

    return serve


def ask(service: Service, text: str, *, stream: bool = False) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": f"<{text}>"}], "stream": stream}
    return service.http.post("/v1/chat/completions", json=body)


def turns_of(service: Service, prompts: list[str], limit_s: float = LIMIT_S) -> list[Document]:
    talks = [{"prompt": f"<{prompt}>"} for prompt in prompts]
    job = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": talks})
    service.wait_ended(job, limit_s)
    return [talk["turns"][0] for talk in service.get(f"/v1/jobs/{job}/result")["conversations"]]


@pytest.mark.system
def test_each_refusal_of_a_request_is_reported_at_once_and_its_engine_stays(service_of: Callable[..., Any]) -> None:
    """Jobs and clients get the engine's own words; other requests do not wait meanwhile."""
    with service_of({name: answer for name, (answer, _) in AT_FAULT.items()}) as service:
        pid = service.get("/v1/workers/m-0")["pid"]
        began_at = time.monotonic()
        turns = turns_of(service, [*AT_FAULT, "fine"])
        assert time.monotonic() - began_at < 15
        for turn, (_, words) in zip(turns, AT_FAULT.values(), strict=False):
            assert (turn["state"], turn["reason"]) == ("failed", "engine_rejected"), turn
            assert words in turn["detail"]
            assert len(turn["attempts"]) == 1
        assert turns[-1]["text"] == "pong"
        for name, (_, words) in AT_FAULT.items():
            for stream in (False, True):
                answer = ask(service, name, stream=stream)
                assert 400 <= answer.status_code < 500, (name, stream, answer.text)
                assert words in answer.json()["error"]["message"], (name, stream)
        assert (service.get("/v1/workers/m-0")["incarnation"], service.get("/v1/workers/m-0")["pid"]) == (1, pid)


def test_a_server_without_stream_options_is_asked_without_them(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """It names them in its refusal, once."""
    record = str(tmp_path / "record")
    body = json.dumps(nested("Unknown field: stream_options", "invalid_request_error", 400))
    flags: Document = {"reject": 400, "reject-on": '"stream_options"', "reject-body": body, "record": record}
    with serving(tmp_path / "s", free_ports(1), {"m": scripted_model(free_ports(1), **flags)}) as service:
        turns = turns_of(service, ["a", "b"])
        assert [turn["state"] for turn in turns] == ["completed"] * 2
    assert len(recorded(tmp_path / "record")) == 2


@pytest.mark.system
def test_a_thousand_requests_of_all_kinds_end_no_engine(service_of: Callable[..., Any]) -> None:
    """Good ones among them are answered as if they were alone."""
    with service_of({name: answer for name, (answer, _) in AT_FAULT.items()}) as service:
        names = [*AT_FAULT, "fine", "fine", "fine"]

        def one(number: int) -> tuple[str, int, float]:
            began_at = time.monotonic()
            name = names[number % len(names)]
            return name, ask(service, name).status_code, time.monotonic() - began_at

        with ThreadPoolExecutor(4) as clients:
            ended = list(clients.map(one, range(1000)))
        assert {status for name, status, _ in ended if name == "fine"} == {200}
        assert all(400 <= status < 500 for name, status, _ in ended if name != "fine"), set(ended)
        assert service.get("/v1/workers/m-0")["incarnation"] == 1
        print(f"good ones: at most {max(seconds for name, _, seconds in ended if name == 'fine'):.2f} s")


@pytest.mark.system
def test_an_engine_that_also_refuses_its_canary_is_ill(service_of: Callable[..., Any]) -> None:
    """The opposite case: a refusal of every request is no request's fault, and its turns wait for another engine."""
    with service_of({"jinja": AT_FAULT["unheard"][0]}, rest="jinja") as service:
        job = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": "Go."}]})
        wait_for(lambda: "misaligned" in str(service.get("/v1/workers/m-0")["because"]), "it gets no turns", LIMIT_S)
        assert service.get(f"/v1/jobs/{job}")["state"] == "running"


@pytest.mark.system
def test_a_prompt_that_is_too_long_is_reported_as_such(service_of: Callable[..., Any]) -> None:
    """In the words of eight servers; the error points its author to ``memory``."""
    answers = {name: told(500 if name == "xinference" else 400, each) for name, each in TOO_LONG.items()}
    answers["asked"] = told(400, nested("max_tokens is too large: 9. The maximum context length is 8", "", 400))
    with service_of(answers) as service:
        *turns, asked = turns_of(service, [*TOO_LONG, "asked"])
        for name, turn in zip(TOO_LONG, turns, strict=True):
            assert (turn["reason"], "memory: {keep: auto}" in turn["detail"]) == ("context_overflow", True), (
                name,
                turn,
            )
            assert ask(service, name).status_code == 400
        assert asked["reason"] == "engine_rejected", "its prompt fits"

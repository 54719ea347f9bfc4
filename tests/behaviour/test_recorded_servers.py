"""Recorded answers of real servers, replayed to a job and to clients at the front door: read correctly, or failed."""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.harness.processes import running_program
from tests.harness.recordings import Recording, recordings
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import LIMIT_S, wait_for

REPLAY: Final = Path(__file__).parents[1] / "harness" / "programs" / "replay.py"
ASKED_AGAIN: Final = (408, 429, 500, 502, 503, 504)
REFUSAL_S: Final = 0.5


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    """A service with such a server attached."""
    folder = tmp_path_factory.mktemp("recorded")
    told = {each.id: {"status": each.status, "headers": each.told_headers, "body": each.body} for each in recordings()}
    (folder / "answers.json").write_text(json.dumps(told))
    command = [sys.executable, "-I", "-S", str(REPLAY), "--answers", str(folder / "answers.json")]
    port, mute = free_ports(1), free_ports(1)
    common = {"engine": "attached", "slots": 16, "timeouts": {"refusal_s": REFUSAL_S}}
    models = {name: {**common, "url": f"http://127.0.0.1:{of}/v1"} for name, of in (("m", port), ("mute", mute))}
    rest = next(each.id for each in recordings() if tells_no_reason(each))
    with (
        running_program([*command, "--port", str(port)]),
        running_program([*command, "--port", str(mute), "--rest", rest]),
        serving(folder / "service", free_ports(1), models) as running,
    ):
        yield running


def tells_no_reason(recording: Recording) -> bool:
    """Return whether its server gives finish reasons: without one in this answer, the answer was cut off."""
    return recording.is_stream and recording.error is None and not recording.expected.get("finish_reason")


@pytest.fixture(scope="module")
def turns(service: Service) -> dict[str, Document]:
    """The turn of each recording, from one job that asks for all of them."""
    names = sorted({call["name"] for each in recordings() for call in each.expected.get("tool_calls") or []})
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    agent = {"id": "a", "model": "m", "exit_tools": tools}
    conversations = [
        {"id": each.id, "prompt": f"<{each.id}>"}
        | ({"agents": {"a": {"model": "mute"}}} if tells_no_reason(each) else {})
        for each in recordings()
    ]
    job = service.post_job({"rounds": 1, "agents": [agent], "conversations": conversations})
    service.wait_ended(job, 2 * LIMIT_S)
    result = service.get(f"/v1/jobs/{job}/result")
    return {each["id"]: each["turns"][0] for each in result["conversations"]}


def words_of(recording: Recording) -> str:
    return " ".join(str(recording.expected.get("text") or "").split())


@pytest.mark.parametrize("recording", recordings(), ids=lambda each: each.id)
def test_a_job_reads_an_answer_as_recorded(recording: Recording, turns: dict[str, Document]) -> None:
    """It has the recorded words, calls and end, or fails with the server's own message."""
    turn, expected = turns[recording.id], recording.expected
    if recording.error is not None:
        assert turn["state"] == "failed"
        assert recording.error["message"] in turn["detail"]
        return
    assert turn["state"] == "completed", turn["detail"]
    if "<think" not in words_of(recording) and "</think" not in words_of(recording):
        assert " ".join(turn["text"].split()) == words_of(recording)
    calls = [(signal["name"], signal["raw"] or signal["arguments"] or {}) for signal in turn["signals"]]
    told = [(call["name"], _read(call["arguments"])) for call in expected.get("tool_calls") or []]
    # A call that was cut off does not count, nor does a signal.
    assert calls == (told[:-1] if expected.get("finish_reason") == "length" else told)
    assert (turn["finish_reason"] or None) == (expected.get("finish_reason") or None)


def _read(arguments: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def ask(service: Service, recording: Recording) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": f"<{recording.id}>"}]}
    return service.http.post("/v1/chat/completions", json={**body, "stream": recording.kind == "sse"})


@pytest.fixture(scope="module")
def answers(service: Service) -> dict[str, httpx.Response]:
    """The front door's answer for each recording."""
    with ThreadPoolExecutor(16) as clients:
        return dict(clients.map(lambda each: (each.id, ask(service, each)), recordings()))


@pytest.mark.parametrize("recording", recordings(), ids=lambda each: each.id)
def test_a_client_gets_an_answer_as_recorded(recording: Recording, answers: dict[str, httpx.Response]) -> None:
    """A good one passes unchanged. An error has OpenAI's form, a fitting status, and the server's message."""
    answer = answers[recording.id]
    if recording.error is None:
        assert answer.status_code == 200
        assert recording.body.encode().strip() in answer.content
        return
    errors = [answer.json()] if answer.status_code != 200 else _errors_in(answer.text)
    assert errors, answer.text
    assert recording.error["message"] in errors[-1]["error"]["message"]
    if answer.status_code != 200:
        status = recording.error.get("status") or 0
        is_own = recording.error.get("requests_own") or recording.error.get("overflow")
        assert answer.status_code >= (429 if status in ASKED_AGAIN and not is_own else 400)
        assert answer.status_code < 500 or not is_own


def _errors_in(stream: str) -> list[Document]:
    frames = [line.removeprefix("data:").strip() for line in stream.splitlines() if line.startswith("data:")]
    found = [json.loads(frame) for frame in frames if frame.startswith("{") and '"error"' in frame and "}" in frame]
    return [each for each in found if isinstance(each.get("error"), dict)]


def test_no_recording_counts_against_its_server(service: Service, turns: dict[str, Document]) -> None:
    """They are faults of requests: the server answers all others."""
    assert turns
    wait_for(lambda: service.get("/v1/workers/m-0")["state"] == "ready", "it serves")

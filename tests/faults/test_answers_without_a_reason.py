"""Answers whose server does not confirm that they are complete: accepted with a finding, or treated as broken off."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.harness.processes import running_program
from tests.harness.service import Document, Service, serving

REPLAY: Final = Path(__file__).parents[1] / "harness" / "programs" / "replay.py"
DONE: Final = "data: [DONE]\n\n"
HALF: Final = 'data: {"choices":[{"index":0,"delta":{"content":"Half an ans"}}]}\n\n' + DONE
REFUSED: Final = (
    'data: {"choices":[{"index":0,"delta":{"refusal":"I may not."}}]}\n\n'
    'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)
FAILED: Final = (
    'data: {"choices":[{"index":0,"delta":{"content":"Half an ans"}}]}\n\n'
    'data: {"object":"error","message":"CUDA out of memory","code":500}\n\ndata: [DONE]\n\n'
)
EMPTY: Final = ("data: [DONE]\n\n", 'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\ndata: [DONE]\n\n')


@contextmanager
def attached(folder: Path, free_ports: Callable[[int], int], **bodies: str) -> Iterator[Service]:
    """Serve a model by an attached server that gives this answer, and "pong" to other requests."""
    port = free_ports(1)
    told = {name: {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": body}
            for name, body in bodies.items()}  # fmt: skip
    (folder / "answers").write_text(json.dumps(told))
    command = [sys.executable, "-I", "-S", str(REPLAY), "--port", str(port), "--answers", str(folder / "answers")]
    model = {"engine": "attached", "url": f"http://127.0.0.1:{port}/v1", "timeouts": {"refusal_s": 0.2}}
    with running_program(command), serving(folder / "s", free_ports(1), {"m": model}) as service:
        yield service


def turn_of(service: Service, prompt: str) -> Document:
    job = service.post_job({"agents": [{"id": "a", "model": "m"}], "conversations": [{"prompt": f"<{prompt}>"}]})
    service.wait_ended(job)
    (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    turn: Document = talk["turns"][0]
    return turn


@pytest.mark.system
def test_half_an_answer_is_marked_until_its_server_reports_reasons(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Some servers never report one.

    Without a reason, an answer of a server that has once reported one was broken off.
    """
    with attached(tmp_path, free_ports, half=HALF) as service:
        first = turn_of(service, "half")
        assert (first["state"], first["text"], first["finish_reason"]) == ("completed", "Half an ans", None)
        assert first["findings"] == ["no_finish_reason"]
        table = service.http.get(f"/v1/jobs/{service.get('/v1/jobs')['jobs'][0]['id']}/result?format=csv").text
        assert table.splitlines()[1].endswith(",no_finish_reason")
        assert turn_of(service, "well")["findings"] == []
        assert turn_of(service, "half")["state"] == "failed"


@pytest.mark.system
@pytest.mark.parametrize("body", [*EMPTY, FAILED])
def test_a_stream_without_an_answer_fails(tmp_path: Path, free_ports: Callable[[int], int], body: str) -> None:
    """So does half an answer that ends with an error; the error's message is reported."""
    with attached(tmp_path, free_ports, odd=body) as service:
        turn = turn_of(service, "odd")
        assert (turn["state"], turn["finish_reason"]) == ("failed", None)
        assert ("CUDA out of memory" in turn["detail"]) is ("CUDA" in body)


def test_a_refusal_is_no_valid_answer_and_ends_no_conversation(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Although its words contain a choice."""
    body = REFUSED.replace("I may not.", "I cannot say yes.")
    with attached(tmp_path, free_ports, refused=body) as service:
        agent: Document = {"id": "a", "model": "m", "validation": {"choices": ["yes", "no"], "retries": 0}}
        until = [{"agent": "a", "says": ["I cannot say yes"]}]
        plain: Document = {"id": "a", "model": "m"}
        talk = {"conversations": [{"prompt": "<refused>"}], "until": until, "rounds": 2}
        jobs = [service.post_job({"agents": [{**agent, "validation": agent["validation"]}], **talk, "until": []})]
        jobs.append(service.post_job({"agents": [plain], **talk}))
        for job in jobs:
            service.wait_ended(job)
        judged, said = (service.get(f"/v1/jobs/{job}/result")["conversations"][0] for job in jobs)
        assert (judged["turns"][0]["reason"], "declined" in judged["turns"][0]["detail"]) == (
            "validation_exhausted",
            True,
        )
        assert (said["ended_by"], len(said["turns"])) == ("rounds", 2)


def test_a_refusal_counts_as_words_and_is_marked(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its conversation goes on with them."""
    with attached(tmp_path, free_ports, refused=REFUSED) as service:
        turn = turn_of(service, "refused")
        assert (turn["state"], turn["text"], turn["findings"]) == ("completed", "I may not.", ["refusal"])


def test_an_answer_whose_server_ends_before_its_usage_is_whole(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """The finish reason came, so no word is missing; a count of ours would not be the server's."""
    cut = HALF.removesuffix(DONE) + 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    chat: Document = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    with attached(tmp_path, free_ports, cut=cut) as service:
        turn = turn_of(service, "cut")
        assert (turn["state"], turn["text"], turn["findings"]) == ("completed", "Half an ans", [])
        assert turn["usage"]["completion_tokens"] is None
        asked = {**chat, "messages": [{"role": "user", "content": "<cut>"}]}
        assert service.http.post("/v1/chat/completions", json=asked).text.endswith(cut)

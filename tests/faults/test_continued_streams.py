"""A client's stream goes on where its engine broke off: one opening, each word once, one end, one account."""

import json
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_continued_answers import ANSWER, TOKENS, chats, dying
from tests.harness.service import Document, Service, scripted_model, serving
from tests.harness.waiting import wait_for
from transport.events import ReasoningDelta, TextDelta
from transport.relay import Passage
from transport.request import BegunAnswer
from workers.requests.generation import ContinuedGeneration
from workers.requests.halves import GoingOn
from workers.requests.sent import SentStream
from workers.requests.splice import Splice

UNKNOWN = 2**30  # no process has this id
Ports = Callable[[int], int]
BODY: Document = {
    "model": "m",
    "stream": True,
    "max_tokens": 40,
    "stream_options": {"include_usage": True},
    "messages": [{"role": "user", "content": "Go."}],
}


def streamed(service: Service, **changed: object) -> tuple[list[dict[str, Any]], str]:
    """Return the documents of a stream, and all of its text."""
    headers = {"x-roundhouse-continue": str(changed.pop("header"))} if "header" in changed else {}
    answer = service.http.post("/v1/chat/completions", json={**BODY, **changed}, headers=headers)
    assert answer.status_code == 200, answer.text
    frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(frame) for frame in frames], answer.text


def words_of(frames: list[dict[str, Any]]) -> str:
    return "".join(each["delta"].get("content") or "" for frame in frames for each in frame.get("choices", ()))


def test_a_stream_goes_on_after_its_engine_has_died(tmp_path: Path, free_ports: Ports) -> None:
    """The client hears a comment, and no error."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1))}) as service:
        frames, text = streamed(service)

        def answered() -> int:
            return sum(row["answer_tokens"] for row in service.get("/v1/usage")["usage"])

        wait_for(lambda: answered() == TOKENS, "each token counts once")
    assert words_of(frames) == ANSWER
    assert not any("error" in frame for frame in frames)
    ends = [each["finish_reason"] for frame in frames for each in frame["choices"] if each.get("finish_reason")]
    assert ends == ["stop"]
    (usage,) = [frame["usage"] for frame in frames if frame.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, TOKENS)
    assert text.count("data: [DONE]") == 1
    assert "\n: waiting\n" in text
    assert [line.rpartition("attempts=")[2] for line in text.splitlines() if "worker=m-0" in line][-1] == "2"
    first, second = chats(tmp_path / "record")
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": ANSWER.partition(" word7")[0]}]
    assert second["max_tokens"] == 33


def test_a_model_without_a_file_of_its_own_is_the_same_after_a_death(
    tmp_path: Path, free_ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the service is not its model, though files come and go there."""
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1))}) as service:
        frames, _ = streamed(service)
    assert words_of(frames) == ANSWER
    assert not any("error" in frame for frame in frames)


def test_a_stream_that_is_written_again_unseen_is_kept_open(tmp_path: Path, free_ports: Ports) -> None:
    """A proxy would cut off a long silence: comments come while the request is on a slot, and has no place to tell."""
    model = dying(tmp_path, free_ports(1), interval=0.2)
    with serving(tmp_path, free_ports(1), {"m": model}, {"heartbeat_s": 0.1}) as service:
        frames, text = streamed(service, logprobs=True)
    assert words_of(frames) == ANSWER
    assert re.search(r": waiting\n\n(?!: (place|m-0|m ))", text)


def test_a_stream_whose_client_wants_no_continuation_ends_with_an_error(tmp_path: Path, free_ports: Ports) -> None:
    """The client is told, and gets no word twice."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1))}) as service:
        frames, text = streamed(service, header="off")
    assert words_of(frames) == ANSWER.partition(" word7")[0]
    assert "error" in frames[-1]
    assert "[DONE]" not in text


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        pytest.param("kept", {"response_format": {"type": "json_object"}}, id="a constraint"),
        pytest.param("kept", {"frequency_penalty": 0.5}, id="a penalty on its own words"),
        pytest.param("kept", {"logprobs": True}, id="logprobs"),
        pytest.param("rewritten", {}, id="a template that rewrites the half"),
        pytest.param("unlike", {}, id="an engine that repeats another half"),
        pytest.param("refused", {}, id="an engine that refuses the half"),
        pytest.param("declined", {}, id="an engine that fails with the half"),
        pytest.param("closed", {}, id="an engine that closes its connection on the half"),
    ],
)
def test_an_answer_is_written_again_unseen_where_no_half_can_be_asked_for(
    tmp_path: Path, free_ports: Ports, how: str, changed: dict[str, object]
) -> None:
    """The engine writes it from its beginning; the client gets the rest, since the beginning is the same."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1), goes_on=how)}) as service:
        frames, text = streamed(service, **changed)

        def counted() -> dict[str, int]:
            (row,) = service.get("/v1/usage")["usage"]
            return {name: row[name] for name in ("turns", "answer_tokens")}

        wait_for(lambda: counted() == {"turns": 1, "answer_tokens": TOKENS}, "each token counts once")
        (row,) = service.get("/v1/usage")["usage"]
    assert words_of(frames) == ANSWER
    assert text.count("data: [DONE]") == 1
    assert not any("error" in frame for frame in frames)
    (usage,) = [frame["usage"] for frame in frames if frame.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, TOKENS)
    assert row["wasted_tokens"] >= 7, "those that were written again"
    assert "continue_final_message" not in chats(tmp_path / "record")[-1]


def test_an_engine_that_writes_another_answer_ends_a_stream_with_an_error(tmp_path: Path, free_ports: Ports) -> None:
    """Not one word of another answer reaches the client, and the loss is counted."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1), goes_on="other")}) as service:
        frames, _ = streamed(service)
        (worker,) = service.get("/v1/workers")["workers"]
        metrics = service.http.get("/metrics").text
    assert words_of(frames) == ANSWER.partition(" word7")[0]
    assert "error" in frames[-1]
    assert "no prefill" in worker["not_continued"]
    assert 'roundhouse_worker_continuations_refused_total{model="m",worker="m-0"} 1.0' in metrics


def test_a_stream_ends_with_an_error_if_no_way_of_asking_is_taken(tmp_path: Path, free_ports: Ports) -> None:
    """The next engine refuses the half, and then all of it: the client does not take its half for the answer."""
    with serving(tmp_path, free_ports(1), {"m": dying(tmp_path, free_ports(1), goes_on="spent")}) as service:
        frames, text = streamed(service)
    assert words_of(frames) == ANSWER.partition(" word7")[0]
    assert "error" in frames[-1]
    assert "[DONE]" not in text


def test_a_call_whose_pieces_went_out_is_written_again_unseen(tmp_path: Path, free_ports: Ports) -> None:
    """The text before it goes on; the new call begins with the pieces that were sent, and the rest follows."""
    arguments = json.dumps({"city": "Paris", "days": list(range(40))})
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"content": "I look.", "tool_calls": [{"name": "look", "arguments": arguments}]}]))
    model = dying(tmp_path, free_ports(1), script=str(script), die_after=4)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        frames, _ = streamed(service, tools=[tool])
    deltas = [each["delta"] for frame in frames for each in frame.get("choices", ())]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert words_of(frames) == "I look."
    assert [call["id"] for call in calls if call.get("id")] == ["c0"]
    assert [call["function"]["name"] for call in calls if call["function"].get("name")] == ["look"]
    assert "".join(call["function"].get("arguments") or "" for call in calls) == arguments
    assert not any("error" in frame for frame in frames)


def test_a_stream_that_the_service_leaves_ends_with_an_error(tmp_path: Path, free_ports: Ports) -> None:
    """A service that stops runs no attempt again: its client does not wait for one."""
    model = scripted_model(free_ports(1), goes_on="kept", tokens=10_000, interval=0.01)
    lines: list[str] = []
    body = {**BODY, "max_tokens": 10_000}
    with (
        serving(tmp_path, free_ports(1), {"m": model}, {"drain_s": 0.1}) as service,
        service.http.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                assert service.process is not None
                service.process.send_signal(signal.SIGTERM)
    (error,) = [json.loads(line[6:])["error"] for line in lines if line.startswith("data: ") and '"error"' in line]
    assert error["code"] == "shutdown"


FRAME = b'data: {"id": "2", "choices": [{"index": 0, "delta": {%b}}]}\n\n'


@pytest.mark.parametrize(
    ("begun", "delta"),
    [
        (BegunAnswer(text="So"), b'"reasoning_content": "Hm"'),
        (BegunAnswer(reasoning="Hm"), b'"content": "So"'),
    ],
    ids=["a thought after words", "words in a thought"],
)
def test_words_of_another_kind_than_the_half_are_not_passed_on(begun: BegunAnswer, delta: bytes) -> None:
    """The engine's parser has lost its place: a thought would be shown as the answer, or the reverse."""
    passed: list[bytes] = []

    class Client(Passage):
        def pass_frames(self, content_type: str, frames: bytes) -> None:
            passed.append(content_type.encode() + frames)

        def pass_whole(self, status: int, content_type: str, body: bytes) -> None:
            raise AssertionError((status, content_type, body))

    generation = ContinuedGeneration(lambda: 0.0, begun, 1, ("", ""))
    generation.receive(ReasoningDelta("Hm") if begun.text else TextDelta("So"))
    assert generation.has_strayed
    sent = SentStream("/v1/chat/completions")
    sent.add(FRAME % (b'"content": "So"' if begun.text else b'"reasoning_content": "Hm"'))
    sent.catch_up()
    Splice(Client(), sent, GoingOn(begun=begun, tokens=1, echoes=False)).pass_frames("x", FRAME % delta)
    assert passed == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Go."}]}),
        ("/v1/completions", {"prompt": "Once upon a time"}),
    ],
)
def test_a_real_engine_goes_on_with_a_stream(
    tmp_path: Path, free_ports: Ports, tiny_model: Path, path: str, asked: Document
) -> None:
    """llama.cpp is killed twice in the middle; the client counts every token once."""
    model = {"engine": "embedded", "model": str(tiny_model), "port": free_ports(1), "slots": 1, "args": {"threads": 1}}
    model |= {"context": 2048, "restart": {"initial_s": 0.1, "max_s": 0.2}}
    tokens = 600
    body = {**asked, "model": "m", "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    frames: list[dict[str, Any]] = []
    with serving(tmp_path, free_ports(1), {"m": model}) as service:
        kills = [400, 100]
        with service.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    frames.append(json.loads(line[6:]))
                if kills and len(frames) > kills[-1]:
                    (worker,) = service.get("/v1/workers")["workers"]
                    with suppress(ProcessLookupError):  # frames from before the last kill may be read after it
                        os.kill(worker["pid"] or UNKNOWN, signal.SIGKILL)
                        kills.pop()
    assert kills == []
    assert [frame["error"] for frame in frames if "error" in frame] == []
    assert len({frame["id"] for frame in frames}) == 1
    (usage,) = [frame["usage"] for frame in frames if frame.get("usage")]
    assert usage["completion_tokens"] == tokens
    ends = [each["finish_reason"] for frame in frames for each in frame["choices"] if each.get("finish_reason")]
    assert ends == ["length"]

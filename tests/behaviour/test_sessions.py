"""Sessions: agents as they are, behind a base URL whose requests are recorded (specification, "Sessions")."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from roundhouse_client import Client
from tests.engines.adapters import write_gguf_adapter
from tests.harness.service import Document, Service, serving
from tests.harness.waiting import wait_for

START_S = 60.0
PARAMS = {"max_tokens": 6, "temperature": 0, "seed": 7}
ARRAYS = ("prompt_ids", "completion_ids", "mask", "versions", "stop_reason", "logprobs_mode", "partial")
TOOL = {"type": "object", "properties": {"a": {"type": "number"}}}


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from tests.harness.ports import find_ports  # noqa: PLC0415 - a module's fixture cannot take the function's

    port = find_ports(3)
    model = {
        "engine": "embedded",
        "model": str(tiny_model),
        "port": port + 1,
        "context": 4096,
        "slots": 2,
        "args": {"threads": 1},
        "bios": {"template": "$context"},
    }
    theirs = {"engine": "attached", "model": "tiny", "url": f"http://127.0.0.1:{port + 2}"}
    folder = tmp_path_factory.mktemp("sessions")
    with serving(folder, port, {"tiny": model, "theirs": theirs}, ready=False) as running:
        wait_for(lambda: running.get("/v1/workers/tiny-0")["state"] == "ready", "the engine is ready", START_S)
        yield running


def opened(service: Service, **fields: Any) -> Document:  # noqa: ANN401 - parts of a document
    document = {"model": "tiny", "record": {"tokens": True, "logprobs": True}, **fields}
    answer = service.http.post("/v1/sessions", json=document)
    assert answer.status_code == 201, answer.text
    session: Document = answer.json()
    assert answer.headers["location"] == f"/v1/sessions/{session['id']}"
    return session


def rows(service: Service, session: Document, **query: str | bool) -> list[Document]:
    answer = service.http.get(f"/v1/sessions/{session['id']}/rollouts", params={"partial": True, **query})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def ask(service: Service, session: Document, messages: list[Document], **fields: Any) -> str:  # noqa: ANN401
    body = {"messages": messages, **PARAMS, **fields}
    answer = service.http.post(f"/sessions/{session['id']}/v1/chat/completions", json=body, timeout=START_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def talk(service: Service, session: Document, count: int, first: str = "Say one") -> list[Document]:
    """Ask ``count`` times, each time with all that was said before."""
    messages: list[Document] = [{"role": "user", "content": first}]
    for _ in range(count):
        messages.append({"role": "assistant", "content": ask(service, session, messages)})
        messages.append({"role": "user", "content": "Go on."})
    return messages


def test_a_session_has_the_rows_of_the_same_conversation_as_a_job(service: Service) -> None:
    """The same prompts and answers: the ids are equal."""
    job = {
        "agents": [
            {"id": "a", "model": "tiny", "params": PARAMS},
            {"id": "you", "by": "caller", "speak_after_within_round": ["a"]},
        ],
        "rounds": 3,
        "conversations": [{"id": "c", "prompt": "Say one"}],
        "record": {"tokens": True, "logprobs": True},
    }
    job_id = service.post_job(job)
    for number in range(3):
        path = f"/v1/jobs/{job_id}/conversations/c/turns/you/{number}"
        wait_for(lambda at=path: service.http.post(at, json={"text": "Go on."}).is_success, "it waits")  # type: ignore[misc]
    answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"partial": True})
    (wanted,) = [json.loads(line) for line in answer.text.splitlines()]
    session = opened(service)
    for round_number in range(3):
        prompt = service.get(f"/v1/jobs/{job_id}/conversations/c/turns/a/{round_number}/prompt")
        ask(service, session, prompt["attempts"][0]["messages"])
    (row,) = rows(service, session)
    assert {name: row[name] for name in ARRAYS} == {name: wanted[name] for name in ARRAYS}
    pairs = zip(row["logprobs"], wanted["logprobs"], strict=True)  # a prompt read in other pieces rounds differently
    assert all((one is None and other is None) or abs(one - other) < 0.02 for one, other in pairs)
    assert (row["job"], row["conversation"], row["agent"], row["rounds"]) == (session["id"], "0", "request", [1, 3])
    assert row["params"] == wanted["params"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_clients_of_each_api_are_recorded_as_they_are(service: Service, *, is_streamed: bool) -> None:
    """OpenAI's and Anthropic's own clients: one chain over two requests each, whatever model they name."""
    texts = [_chat, _respond, _message]
    found = []
    for speak in texts:
        session = opened(service)
        first, second = speak(session["url"], is_streamed)
        (row,) = rows(service, session)
        assert (row["rounds"], sum(row["mask"])) == ([1, 2], 12)
        (episode,) = rows(service, session, form="episode")
        said = [node["message"]["content"] for node in episode["traces"][0]["nodes"]]
        assert said == ["Say one", first, "Go on.", second]
        found.append(row)
    assert found[0]["completion_ids"] == found[1]["completion_ids"] == found[2]["completion_ids"]


def _chat(url: str, is_streamed: bool) -> tuple[str, str]:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Say one"}]
    texts: list[str] = []
    for _ in range(2):
        about: dict[str, Any] = {"model": "gpt", "messages": messages, **PARAMS}
        if is_streamed:
            text = ""
            usage = None
            for chunk in client.chat.completions.create(**about, stream=True, stream_options={"include_usage": True}):
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                usage = chunk.usage or usage
            assert usage is not None
        else:
            whole = client.chat.completions.create(**about)
            text, usage = whole.choices[0].message.content or "", whole.usage
            assert (whole.model, whole.choices[0].finish_reason) == ("tiny", "length")
        assert usage is not None
        assert usage.completion_tokens == 6
        texts.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return texts[0], texts[1]


def _respond(url: str, is_streamed: bool) -> tuple[str, str]:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    items: list[Any] = [{"role": "user", "content": "Say one"}]
    texts = []
    for _ in range(2):
        about: dict[str, Any] = {"model": "gpt", "input": items, "max_output_tokens": 6, "temperature": 0}
        about["extra_body"] = {"seed": 7}
        if is_streamed:
            *_, last = client.responses.create(**about, stream=True)
            assert last.type == "response.incomplete"
            whole = last.response
        else:
            whole = client.responses.create(**about)
        assert whole.usage is not None
        assert (whole.status, whole.usage.output_tokens) == ("incomplete", 6)
        texts.append(whole.output_text)
        items += [*(item.model_dump() for item in whole.output), {"role": "user", "content": "Go on."}]
    return texts[0], texts[1]


def _message(url: str, is_streamed: bool) -> tuple[str, str]:
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Say one"}]
    texts = []
    for _ in range(2):
        about: dict[str, Any] = {"model": "claude", "messages": messages, "max_tokens": 6}
        about["extra_body"] = {"seed": 7, "temperature": 0}
        if is_streamed:
            with client.messages.stream(**about) as stream:
                whole = stream.get_final_message()
        else:
            whole = client.messages.create(**about)
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)
        assert whole.content[0].type == "text"
        texts.append(whole.content[0].text)
        messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": "Go on."}]
    return texts[0], texts[1]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_connection_that_ends_with_the_answer_has_taken_it(service: Service, fields: Document) -> None:
    """A proxy may ask for a connection for each request: its last answer is certain like any other."""
    session = opened(service)
    body = {"messages": [{"role": "user", "content": "Say one"}], **PARAMS, **fields}
    url = f"{session['url']}/chat/completions"
    answer = httpx.post(url, json=body, headers={"Connection": "close"}, timeout=START_S)
    assert answer.is_success
    assert answer.headers.get("connection", "close") == "close"
    shown = service.get(f"/v1/sessions/{session['id']}")
    assert (shown["exchanges"], shown["uncertain"]) == (1, 0)
    assert len(rows(service, session)) == 1


def test_branches_share_what_was_written_only_once(service: Service) -> None:
    """Two ways to go on from one answer: the row of the older has that answer in its prompt."""
    session = opened(service)
    messages = talk(service, session, 1)
    for word in ("left", "right"):
        ask(service, session, [*messages[:2], {"role": "user", "content": word}])
    one, two = rows(service, session)
    assert ([one["rounds"], two["rounds"]], sum(one["mask"]), sum(two["mask"])) == ([[1, 3], [2, 2]], 12, 6)
    shared = [*one["prompt_ids"], *one["completion_ids"][:6]]
    assert two["prompt_ids"][: len(shared)] == shared


def test_a_prompt_that_rewrites_the_past_begins_a_row(service: Service) -> None:
    """No row joins tokens that were not read together."""
    session = opened(service)
    messages = talk(service, session, 1)
    messages[1] = {"role": "assistant", "content": "something else"}
    ask(service, session, messages)
    assert [row["rounds"] for row in rows(service, session)] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("chat/completions", {"n": 2}, "one answer"),
        ("chat/completions", {"logprobs": True}, "logprobs"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("chat/completions", {"include_reasoning": False}, "include_reasoning"),
        ("chat/completions", {"messages": ["x"]}, "messages"),
        ("responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": "x", "store": True}, "store"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("messages", {"max_tokens": 3, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ("messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ("completions", {"prompt": "x"}, "not recorded"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(service: Service, path: str, change: Document, words: str) -> None:
    """An option that would be ignored, or an answer that would not be recorded."""
    session = opened(service)
    body = {"messages": [{"role": "user", "content": "x"}], **change}
    answer = service.http.post(f"/sessions/{session['id']}/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert service.get(f"/v1/sessions/{session['id']}")["exchanges"] == 0


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({}, "record"),
        ({"record": {"tokens": False}}, "record.tokens"),
        ({"record": {"tokens": True}, "model": "tinny"}, "model"),
        ({"record": {"tokens": True}, "model": "theirs"}, "record"),
        ({"record": {"tokens": True}, "ttl_s": 0}, "ttl_s"),
        ({"record": {"tokens": True}, "max_staleness": -1}, "max_staleness"),
        ({"record": {"tokens": True}, "ttl": 5}, "ttl"),
    ],
)
def test_a_session_that_cannot_be_is_refused(service: Service, document: Document, path: str) -> None:
    """With the place of the fault, as jobs are."""
    answer = service.http.post("/v1/sessions", json=document)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_session")
    assert answer.json()["errors"][0]["path"] == path


def test_a_model_that_tells_no_tokens_is_refused_with_the_request(service: Service) -> None:
    """A session without a model takes the one that each request names."""
    session = opened(service, model=None)
    path = f"/sessions/{session['id']}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}], **PARAMS}
    refused = service.http.post(path, json={**body, "model": "theirs"})
    assert (refused.status_code, "cannot be recorded" in refused.text) == (400, True)
    missing = service.http.post(path, json={**body, "model": "none"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert service.http.post(path, json={**body, "model": "tiny"}, timeout=START_S).json()["model"] == "tiny"


def test_the_rest_of_the_front_door_is_there_too(service: Service) -> None:
    """Models, and paths that write nothing; a path that is none of the front door's is not found."""
    session = opened(service)
    base = f"/sessions/{session['id']}"
    assert {each["id"] for each in service.http.get(f"{base}/v1/models").json()["data"]} == {"tiny", "theirs"}
    tokens = service.http.post(f"{base}/tokenize", json={"content": "abc", "model": "gpt"})
    assert tokens.is_success, tokens.text
    for path in (f"{base}/v1/files", f"{base}/v1/chat/completion"):
        unknown = service.http.post(path, json={})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert service.http.post(f"{base}/v1/models/tiny/load").status_code == 404
    for path in (f"{base}/v1/jobs", f"{base}/v1/sessions", base, "/sessions/"):
        assert service.http.get(path).status_code == 404
    assert service.get(f"/v1/sessions/{session['id']}")["exchanges"] == 0


def test_unknown_sessions_are_not_found_in_each_form(service: Service) -> None:
    """Each API's clients know their own form of errors."""
    body = {"messages": [{"role": "user", "content": "x"}]}
    chat = service.http.post("/sessions/none/v1/chat/completions", json=body)
    assert (chat.status_code, chat.json()["error"]["code"]) == (404, "session_not_found")
    message = service.http.post("/sessions/none/v1/messages", json={**body, "max_tokens": 3})
    assert (message.status_code, message.json()["error"]["type"]) == (404, "not_found_error")
    assert service.http.get("/sessions/none/v1/models").status_code == 404
    for path in ("", "/rollouts"):
        assert service.http.get(f"/v1/sessions/none{path}").json()["code"] == "session_not_found"
    assert service.http.delete("/v1/sessions/none").status_code == 404


def test_a_reward_is_there_once_and_deletion_takes_all(service: Service) -> None:
    """By the client: rows and episodes have the reward, and nothing is left after the deletion."""
    with Client(service.url) as client:
        session = client.open_session(model="tiny", ttl_s=600)
        talk(service, {"id": session.id}, 1)
        for _ in range(2):
            stored = client.post_session_reward(session.id, 0.5, metrics={"steps": 2.0})
            assert (stored.reward, stored.metrics) == (0.5, {"steps": 2.0})
        other = service.http.post(f"/v1/sessions/{session.id}/reward", json={"reward": 1.0})
        assert (other.status_code, other.json()["code"]) == (409, "reward_conflict")
        (row,) = client.get_session_rows(session.id, partial=True)
        assert (row.reward, row.metrics) == (0.5, {"steps": 2.0})
        (episode,) = client.get_session_episodes(session.id, partial=True)
        assert episode["traces"][0]["rewards"]["reward"]["score"] == 0.5
        shown = client.get_session(session.id)
        assert (shown.exchanges, shown.uncertain, shown.reward) == (1, 0, 0.5)
        assert shown.expires_at > session.expires_at
        client.delete_session(session.id)
        assert service.http.get(f"/v1/sessions/{session.id}").status_code == 404


def test_a_deleted_session_ends_its_requests(service: Service) -> None:
    """Their slots are free at once."""
    session = opened(service)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3500, "ignore_eos": True}
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(
            service.http.post, f"/sessions/{session['id']}/v1/chat/completions", json=body, timeout=START_S
        )
        wait_for(lambda: service.get("/v1/workers/tiny-0")["requests"], "it is on a slot")
        assert service.http.delete(f"/v1/sessions/{session['id']}").status_code == 204
        wait_for(lambda: not service.get("/v1/workers/tiny-0")["requests"], "its slot is free")
        answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


def test_a_session_without_logprobs_has_none(service: Service) -> None:
    """``logprobs`` is null in its rows."""
    session = opened(service, record={"tokens": True})
    talk(service, session, 1)
    assert [row["logprobs"] for row in rows(service, session)] == [None]


def test_a_session_outlives_the_service_and_its_key_alone_has_it(
    tiny_model: Path, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """A kill between two requests: the chain goes on. Another key learns nothing."""
    port = free_ports(2)
    model = {"engine": "embedded", "model": str(tiny_model), "port": port + 1, "context": 4096, "args": {"threads": 1}}
    keys = [{"name": name, "key": name * 8, "scopes": ["read", "submit"]} for name in ("ann", "bob")]
    with serving(tmp_path, port, {"tiny": model}, ready=False, limit_s=START_S, server={"keys": keys}) as service:
        service.http.headers["Authorization"] = "Bearer annannannannannannannann"
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready", START_S)
        session = opened(service)
        messages = talk(service, session, 1)
        service.kill()
        service.start(limit_s=START_S, ready=False)
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready", START_S)
        ask(service, session, messages)
        assert [row["rounds"] for row in rows(service, session)] == [[1, 2]]
        service.http.headers["Authorization"] = "Bearer bobbobbobbobbobbobbobbob"
        for path in ("", "/rollouts"):
            assert service.http.get(f"/v1/sessions/{session['id']}{path}").status_code == 404
        body = {"messages": messages}
        assert service.http.post(f"/sessions/{session['id']}/v1/chat/completions", json=body).status_code == 404
        assert service.http.get(f"/sessions/{session['id']}/v1/models").status_code == 404
        assert service.http.delete(f"/v1/sessions/{session['id']}").status_code == 404


@pytest.mark.system
def test_a_session_of_an_adapter_has_the_rows_of_a_job_with_it(
    tiny_model: Path, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Its model's name in requests does not matter, and each adapter writes other tokens."""
    adapters = {name: str(write_gguf_adapter(tmp_path / f"{name}.gguf", seed)) for seed, name in enumerate(("x", "y"))}
    port = free_ports(2)
    model = {"engine": "embedded", "model": str(tiny_model), "port": port + 1, "context": 4096, "args": {"threads": 1}}
    model |= {"adapters": adapters, "bios": {"template": "$context"}}
    written = []
    with serving(tmp_path, port, {"tiny": model}, limit_s=START_S) as service:
        for name in ("tiny", "x", "y"):
            agent = {"id": "a", "model": name, "params": PARAMS}
            record = {"tokens": True, "logprobs": True}
            talks = [{"id": "c", "prompt": "Say one"}]
            job_id = service.post_job({"agents": [agent], "conversations": talks, "record": record})
            service.wait_ended(job_id)
            answer = service.http.get(f"/v1/jobs/{job_id}/rollouts", params={"partial": True})
            prompt = service.get(f"/v1/jobs/{job_id}/conversations/c/turns/a/0/prompt")["attempts"][0]
            session = opened(service, model=name)
            ask(service, session, prompt["messages"], model="gpt")
            (row,), (wanted,) = rows(service, session), [json.loads(line) for line in answer.text.splitlines()]
            assert {part: row[part] for part in ARRAYS} == {part: wanted[part] for part in ARRAYS}
            written.append(tuple(row["completion_ids"]))
    assert len(set(written)) == 3

"""Jobs and the door on foreign servers: missing abilities are reported, and no figure is invented."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.engines.conftest import foreign_server
from tests.engines.test_front_door import lasting
from tests.engines.theirs import KEY, ForeignServer, LiteLlmProxy, LlamaCppPython, TransformersServe
from tests.harness.service import Document, Service, check_debate, debate, serving
from tests.harness.waiting import wait_for

START_S = 180.0
SAID: Any = [{"role": "user", "content": "Tell me of roundhouses."}]
GREEDY: Document = {"temperature": 0, "max_tokens": 24}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "enum": [2]}, "b": {"type": "integer", "enum": [3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module", params=["transformers", "litellm", "llama-cpp-python"])
def server(request: pytest.FixtureRequest) -> Iterator[ForeignServer]:
    theirs = foreign_server(request, request.param)
    theirs.change(args={"threads": 1, "jinja": True})
    with theirs.running():
        wait_for(theirs.answers, "somebody else's server is up", START_S)
        yield theirs


@pytest.fixture(scope="module")
def service(
    server: ForeignServer, tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "mytools.py").write_text("def add(a, b): return a + b\n")
    model = {
        "engine": "attached",
        "url": f"{server.spec.endpoint.base_url}/v1",
        "model": server.model,
        "headers": HEADERS,
        "slots": 1 if isinstance(server, LlamaCppPython) else 2,
        "bios": {"enabled": False},
        "repetition": {"lines": None},
        "restart": {"initial_s": 0.1, "max_s": 0.2},
        "tools": {"python": {"add": "mytools:add"}, "iterations": 1},
    }
    with serving(folder, free_ports(1), {"m": model}) as running:
        yield running


def run(service: Service, agents: list[Document], prompt: str = "Go.", **fields: object) -> Document:
    """Run a job of one conversation; return the conversation."""
    job = service.post_job({"agents": agents, "conversations": [{"prompt": prompt}], **fields})
    service.wait_ended(job, START_S)
    (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    return talk  # type: ignore[no-any-return]


def account(*talks: Document) -> str:
    """Return the end of each turn and each attempt, for the reader of a failure."""
    lines = [f"{talk['state']} {talk['reason']}" for talk in talks]
    for turn in (turn for talk in talks for turn in talk["turns"]):
        told = [turn[key] for key in ("agent", "round", "state", "reason", "finish_reason", "text")]
        lines.append(" ".join(str(each)[:80] for each in told))
        lines += [
            " ".join(str(attempt[key])[:300] for key in ("outcome", "reason", "detail", "constrained_by"))
            + f" {len(attempt['text'])} letters"
            for attempt in turn["attempts"]
        ]
    return "\n".join(lines)


def post(server: ForeignServer, path: str, body: Document) -> httpx.Response:
    """Post a request to the server itself."""
    url = f"{server.spec.endpoint.base_url}{path}"
    return httpx.post(url, json=body, headers=HEADERS, timeout=60, trust_env=False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID, **GREEDY}),
        ("/v1/completions", {"prompt": "Once", **GREEDY}),
        ("/v1/chat/completions", {"messages": SAID, **GREEDY, "max_tokens": "no number"}),
        ("/v1/chat/completions", {"messages": "no list"}),
        ("/v1/chat/completions", {"messages": SAID, **GREEDY, "ignore_eos": True}),
        ("/v1/embeddings", {"input": "Once"}),
        ("/v1/responses", {"input": "Tell me.", "max_output_tokens": 8, "temperature": 0, "stream": False}),
        ("/v1/messages", {"messages": SAID, **GREEDY}),
        ("/tokenize", {"content": "Once", "prompt": "Once"}),
    ],
)
def test_the_door_answers_as_the_server_does(
    server: ForeignServer, service: Service, path: str, body: Document
) -> None:
    """The same status, and the same document except for parts that always differ; a refusal has the surface's form."""
    direct = post(server, path, {"model": server.model, **body})
    answer = service.http.post(path, json={"model": "m", **body}, timeout=60)
    if direct.status_code in {404, 501}:  # the server does not have it: the door says so in its own words
        assert answer.status_code == 404
        return
    if direct.is_success:
        assert answer.is_success, answer.text
        assert lasting(answer.json()) == lasting(direct.json())
    else:  # we refuse an invalid request ourselves; theirs answer 500 to it
        assert answer.status_code in {direct.status_code, 400}, answer.text
        assert answer.json()["error"]["message"]


def test_a_streamed_chat_ends_as_a_whole_one_does(service: Service) -> None:
    """With the server's own finish reason."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        whole = client.chat.completions.create(model="m", messages=SAID, extra_body=GREEDY)
        with client.chat.completions.create(model="m", messages=SAID, stream=True, extra_body=GREEDY) as frames:
            choices = [choice for frame in frames for choice in frame.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert len(whole.choices[0].message.content or "") > 0
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.choices[0].finish_reason]


def test_an_answer_is_one_of_the_choices_or_is_recorded_as_invalid(server: ForeignServer, service: Service) -> None:
    """Noise fits no choice by chance: without a constraint each attempt is recorded as invalid."""
    agents = [
        {"id": name, "model": "m", "params": {"max_tokens": 60}, "validation": {"choices": ["yes", "no"]}}
        for name in "abc"
    ]
    talk = run(service, agents)
    attempts = [attempt for turn in talk["turns"] for attempt in turn["attempts"]]
    if isinstance(server, LiteLlmProxy):
        assert [turn["text"] in {'"yes"', '"no"'} for turn in talk["turns"]] == [True] * 3, account(talk)
        assert {attempt["constrained_by"] for attempt in attempts} == {"response_format"}
    else:
        failed = [turn for turn in talk["turns"] if turn["state"] == "failed"]
        assert (talk["state"], {turn["reason"] for turn in failed}) == ("failed", {"validation_exhausted"}), account(
            talk
        )
        assert {attempt["reason"] for turn in failed for attempt in turn["attempts"]} == {"invalid_answer"}
        assert {attempt["constrained_by"] for attempt in attempts} == {None}


def test_a_call_is_the_models_own(server: ForeignServer, service: Service) -> None:
    """llama-cpp-python constrains noise to the named tool; with the other servers noise makes no call."""
    demand = {"type": "function", "function": {"name": "add"}} if isinstance(server, LlamaCppPython) else "required"
    params = {"tool_choice": demand, "temperature": 0, "max_tokens": 200}
    talk = run(service, [{"id": "a", "model": "m", "tools": [ADD], "params": params}])
    (turn,) = talk["turns"]
    made = [(call["name"], call["arguments"], call["result"]) for call in turn["tool_calls"]]
    if isinstance(server, LlamaCppPython):
        assert made == [("add", {"a": 2, "b": 3}, 5)], account(talk)
    else:
        assert (turn["state"], turn["finish_reason"], made) == ("completed", "length", []), account(talk)


def test_a_prompt_beyond_the_context_ends_its_conversation(server: ForeignServer, service: Service) -> None:
    """It is not asked for ever, whatever the server answers."""
    if isinstance(server, TransformersServe):
        pytest.skip("it has no bound of its own")
    talk = run(service, [{"id": "a", "model": "m", "params": {"max_tokens": 8}}], "word " * 2000)
    (turn,) = talk["turns"]
    reason = "engine_unreachable" if isinstance(server, LlamaCppPython) else "context_overflow"
    assert (talk["state"], turn["reason"]) == ("failed", reason), account(talk)


def test_a_killed_server_costs_no_turn_and_doubles_none(server: ForeignServer, service: Service) -> None:
    """It is killed in the middle of a job, and started: lost turns run again, and each turn is there once."""
    conversations, rounds = 3, 2
    talks = debate(conversations=conversations, rounds=rounds)
    params = {"max_tokens": 400}  # six answers fit the context
    job = service.post_job({**talks, "agents": [{**agent, "params": params} for agent in talks["agents"]]})

    def is_under_way() -> bool:
        turns = service.get(f"/v1/jobs/{job}")["progress"]["turns"]
        (worker,) = service.get("/v1/workers")["workers"]
        return bool(turns["completed"] >= 1 and worker["slots"]["in_use"] > 0)

    wait_for(is_under_way, "turns run", START_S)
    server.kill()
    assert service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] < 3 * conversations * rounds
    server.start()
    ended = service.wait_ended(job, START_S)
    talked = service.get(f"/v1/jobs/{job}/result")["conversations"]
    assert ended["state"] == "completed", account(*talked)
    for transcript in talked:
        check_debate(transcript, rounds)
    turns = [turn for transcript in talked for turn in transcript["turns"]]
    assert {turn["finish_reason"] for turn in turns} <= {"length", "stop"}
    lost = {attempt["reason"] for turn in turns for attempt in turn["attempts"]} - {None}
    assert lost <= {"engine_unreachable", "engine_died"}
    assert lost


def test_an_engine_behind_a_proxy_may_die(server: ForeignServer, service: Service) -> None:
    """The proxy lives and answers: no partial answer counts, and the job waits for the engine."""
    if server.behind is None:
        pytest.skip("it is no proxy")
    talks = debate(conversations=3, rounds=2)
    params = {"max_tokens": 400}
    job = service.post_job({**talks, "agents": [{**agent, "params": params} for agent in talks["agents"]]})

    def turns() -> dict[str, int]:
        return service.get(f"/v1/jobs/{job}")["progress"]["turns"]  # type: ignore[no-any-return]

    def outcomes() -> set[str]:
        return {attempt["outcome"] for attempt in service.get(f"/v1/jobs/{job}/timeline")["attempts"]}

    wait_for(lambda: turns()["completed"] and turns()["in_flight"], "turns run", START_S)
    server.behind.kill()
    wait_for(lambda: "failed" in outcomes(), "an attempt has failed")
    server.behind.start()
    ended = service.wait_ended(job, START_S)
    talked = service.get(f"/v1/jobs/{job}/result")["conversations"]
    assert ended["state"] == "completed", account(*talked)
    for transcript in talked:
        check_debate(transcript, 2)
    assert {turn["finish_reason"] for transcript in talked for turn in transcript["turns"]} <= {"length", "stop"}


def test_an_answer_that_is_broken_off_does_not_count(server: ForeignServer, service: Service) -> None:
    """llama-cpp-python ends a stream with [DONE] and without a reason when any other request arrives."""
    if not isinstance(server, LlamaCppPython):
        pytest.skip("it answers several at once")
    tokens = 1000
    params = {"max_tokens": tokens, "temperature": 0, "logit_bias": {"2": -100}}
    job = service.post_job(
        {"agents": [{"id": "a", "model": "m", "params": params}], "conversations": [{"prompt": "Go."}]}
    )
    wait_for(lambda: service.get("/v1/workers")["workers"][0]["slots"]["in_use"], "the turn runs")
    for _ in range(3):
        server.answers()
    service.wait_ended(job, START_S)
    (talk,) = service.get(f"/v1/jobs/{job}/result")["conversations"]
    (turn,) = talk["turns"]
    assert (turn["state"], turn["finish_reason"]) == ("completed", "length"), account(talk)
    assert len(turn["attempts"]) > 1, "it was broken off"
    assert len(turn["text"]) >= tokens

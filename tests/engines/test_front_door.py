"""Stock clients on real engines: the same requests to the engine and to the door, llama.cpp's binary and vLLM."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.engines.test_weights import vllm_model
from tests.engines.theirs import KEY
from tests.harness.service import Document, Service, check_debate, debate, serving
from tests.harness.upgrades import engines_of, upgrade
from tests.harness.waiting import wait_for

START_S = 180.0
SAID: Any = [{"role": "user", "content": "Tell me of roundhouses."}]
GREEDY: Document = {"temperature": 0, "seed": 3, "max_tokens": 24}
# Parts that differ between any two answers.
FLEETING = frozenset(
    {"id", "created", "created_at", "timings", "model", "system_fingerprint", "usage", "cached_tokens"}
)


@pytest.fixture(scope="module", params=["llama-server", "vllm"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]
) -> Iterator[Service]:
    if request.param == "vllm":
        python = request.getfixturevalue("vllm_python")
        model = vllm_model(python, request.getfixturevalue("checkpoint"), free_ports(1), replicas=1, socket_dir=False)
        model["env"] |= {"VLLM_API_KEY": KEY}
    else:
        binary = request.config.getoption("--llama-server")
        if binary is None:
            pytest.skip("make test-engines builds the binary and names it")
        tiny = str(request.getfixturevalue("tiny_model"))
        args = {"threads": 1, "jinja": True}
        model = {"engine": "llama-server", "command": [binary], "model": tiny, "args": args, "port": free_ports(1)}
        model["env"] = {"LLAMA_API_KEY": KEY}
    with serving(tmp_path_factory.mktemp("door"), free_ports(1), {"m": model}, ready=False) as running:
        wait_for(lambda: running.http.get("/readyz").is_success, "the engine is ready", START_S)
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def lasting(value: object) -> object:
    """Return an answer without the parts that always differ."""
    if isinstance(value, dict):
        return {key: lasting(each) for key, each in value.items() if key not in FLEETING}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def test_a_streamed_chat_equals_a_whole_one(client: openai.OpenAI) -> None:
    """Its usage comes where it was requested."""
    whole = client.chat.completions.create(model="m", messages=SAID, extra_body=GREEDY)
    with client.chat.completions.create(
        model="m", messages=SAID, stream=True, stream_options={"include_usage": True}, extra_body=GREEDY
    ) as frames:
        seen = list(frames)
    text = "".join(choice.delta.content or "" for frame in seen for choice in frame.choices)
    assert text == whole.choices[0].message.content
    assert len(text) > 0
    assert whole.model == seen[0].model == "m"
    assert seen[-1].usage is not None
    assert whole.usage is not None
    assert seen[-1].usage.completion_tokens == whole.usage.completion_tokens == GREEDY["max_tokens"]


def test_log_probabilities_and_several_answers_pass(client: openai.OpenAI) -> None:
    """``n`` takes that many slots."""
    answer = client.chat.completions.create(
        model="m", messages=SAID, n=2, logprobs=True, top_logprobs=3, extra_body={"max_tokens": 4}
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [len(each.top_logprobs) for each in choice.logprobs.content] == [3] * 4


def test_a_text_is_completed(client: openai.OpenAI) -> None:
    """The older interface, as a stream too."""
    whole = client.completions.create(model="m", prompt="Once upon", extra_body=GREEDY)
    with client.completions.create(model="m", prompt="Once upon", stream=True, extra_body=GREEDY) as frames:
        text = "".join(choice.text for frame in frames for choice in frame.choices)
    assert text == whole.choices[0].text


def test_responses_and_messages_are_asked(service: Service, client: openai.OpenAI) -> None:
    """OpenAI's newer surface, and Anthropic's."""
    answer = client.responses.create(model="m", input="Tell me.", max_output_tokens=8, temperature=0)
    assert answer.status in {"completed", "incomplete"}
    with anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "Tell me."}])
        assert message.usage.output_tokens == 8
        with other.messages.stream(
            model="m", max_tokens=8, messages=[{"role": "user", "content": "Tell me."}]
        ) as stream:
            assert stream.get_final_message().usage.output_tokens == 8


FORMS = ["chat", "completions", "messages", "responses"]
LONG = 1200  # tokens, of which some are written when the engine is killed


def told_by(service: Service, form: str, most: int = LONG) -> Iterator[str]:
    """Ask as a stock client does; give each piece of the text, and check the account at the end."""
    with (
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=300) as ours,
        anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0, timeout=300) as theirs,
    ):
        tokens = 0
        unbounded: Any = {"extra_body": {"temperature": 0, "ignore_eos": True}}
        more: Any = {"temperature": 0, **unbounded}
        counted: Any = {**more, "stream": True, "max_tokens": most, "stream_options": {"include_usage": True}}
        if form == "chat":
            for frame in ours.chat.completions.create(model="m", messages=SAID, **counted):
                yield from (choice.delta.content or "" for choice in frame.choices)
                tokens = frame.usage.completion_tokens if frame.usage else 0
        elif form == "completions":
            for frame in ours.completions.create(model="m", prompt="Once upon", **counted):
                yield from (choice.text for choice in frame.choices)
                tokens = frame.usage.completion_tokens if frame.usage else 0
        elif form == "messages":
            with theirs.messages.stream(model="m", max_tokens=most, messages=SAID, **unbounded) as stream:
                yield from stream.text_stream
                message = stream.get_final_message()
            tokens = message.usage.output_tokens
            assert len(message.content) == 1
            yield END + getattr(message.content[0], "text", "")
        else:
            response: Any = None
            asked: Any = {"max_output_tokens": most, "input": "Tell me.", **more}
            for event in ours.responses.create(model="m", stream=True, **asked):
                if event.type == "response.output_text.delta":
                    yield event.delta
                if event.type in ("response.completed", "response.incomplete"):
                    response = event.response
            tokens = response.usage.output_tokens if response.usage else 0
            assert len(response.output) == 1
            yield END + response.output_text
        assert tokens == most


KILLED_AT = 2  # pieces
TRIES = 6
SETTLED_S = 3.0  # usage is written once a second
END = "\0"  # before a whole text, as its client put it together


def spent_by(service: Service) -> tuple[int, int]:
    """Return the tokens and the attempts of all answers so far."""
    rows = service.get("/v1/usage")["usage"]
    return sum(row["answer_tokens"] for row in rows), sum(row["attempts"] for row in rows)


def attempts_beside_a_kill(service: Service, form: str) -> int:
    """Kill the engine when its answer has begun; check that each word comes once; return how many attempts it took."""
    tokens, attempts = spent_by(service)
    (engine,) = engines_of(service)
    pieces: list[str] = []
    for piece in told_by(service, form):
        pieces.append(piece)
        if len(pieces) == KILLED_AT:
            os.kill(engine.pid, signal.SIGKILL)
    text, _, whole = "".join(pieces).partition(END)
    assert whole in ("", text)
    wait_for(lambda: spent_by(service)[0] == tokens + LONG, "each token counts once")
    wait_for(lambda: engine.pid != service.get("/v1/workers")["workers"][0]["pid"], "its death is noticed")
    return spent_by(service)[1] - attempts


@pytest.mark.parametrize("form", FORMS)
def test_a_stock_client_hears_of_no_killed_engine(service: Service, form: str) -> None:
    """Its stream goes on: each word comes once, in one block, and the account is that of one answer."""
    wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready", START_S)
    seen = [(time.monotonic(), spent_by(service))]

    def is_settled() -> bool:
        if seen[-1][1] != spent_by(service):
            seen.append((time.monotonic(), spent_by(service)))
        return time.monotonic() - seen[-1][0] > SETTLED_S

    wait_for(is_settled, "the usage of earlier tests is counted")
    tokens, attempts = seen[-1][1]
    assert list(told_by(service, form, 4)), "its client is prepared, and reads as fast as the engine writes"
    wait_for(lambda: spent_by(service) == (tokens + 4, attempts + 1), "the first answer counts")
    # Beside other work vLLM sometimes sends its first frame after its last token: then no stream breaks off.
    for _ in range(TRIES):
        wait_for(lambda: service.http.get("/readyz").is_success, "the engine is ready", START_S)
        taken = attempts_beside_a_kill(service, form)
        if taken == 2:
            return
        assert taken == 1
    pytest.fail(f"none of {TRIES} engines was killed within an answer")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": SAID, **GREEDY}),
        ("/v1/completions", {"prompt": "Once", **GREEDY}),
        ("/v1/chat/completions", {"messages": SAID, **GREEDY, "max_tokens": -7}),
        ("/v1/chat/completions", {"messages": "no list"}),
        ("/v1/embeddings", {"input": "Once"}),
        ("/tokenize", {"content": "Once", "prompt": "Once"}),
        ("/v1/messages/count_tokens", {"messages": SAID}),
    ],
)
def test_the_door_answers_as_the_engine_does(service: Service, path: str, body: Document) -> None:
    """The same status, and the same document except for parts that always differ; refusals too."""
    (worker,) = service.get("/v1/workers")["workers"]
    posted = {"model": "m", **body}
    url, headers = f"http://127.0.0.1:{worker['port']}{path}", {"Authorization": f"Bearer {KEY}"}
    direct = httpx.post(url, json=posted, headers=headers, timeout=60, trust_env=False)
    answer = service.http.post(path, json=posted, timeout=60)
    if direct.status_code in {404, 501}:  # the engine does not have it: the door says so in its own words
        assert answer.status_code == 404
        return
    assert answer.status_code == direct.status_code, answer.text
    if direct.is_success:
        assert lasting(answer.json()) == lasting(direct.json())
    else:
        assert answer.json()["error"]["message"] or direct.json()


def test_a_client_that_disconnects_frees_a_real_engines_slot(service: Service, client: openai.OpenAI) -> None:
    """At once, and the engine goes on."""

    def leave() -> bool:
        """Return whether the answer was running: on few cores vLLM's front sometimes sends all of it at once."""
        with client.chat.completions.create(
            model="m", messages=SAID, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
        ) as frames:
            next(iter(frames))
            return int(service.get("/v1/workers")["workers"][0]["slots"]["in_use"]) == 1

    (engine,) = engines_of(service)
    wait_for(leave, "a client goes away in the middle", START_S)
    wait_for(lambda: service.get("/v1/workers")["workers"][0]["slots"]["in_use"] == 0, "its slot is free")
    assert client.chat.completions.create(model="m", messages=SAID, max_tokens=2).choices
    assert engines_of(service) == [engine]


def test_an_upgrade_keeps_the_engine(service: Service, client: openai.OpenAI) -> None:
    """With a running job: the same process goes on, each turn is there once, and answers do not change."""
    before = engines_of(service)
    said = client.chat.completions.create(model="m", messages=SAID, extra_body=GREEDY).choices[0].message.content
    params = {"max_tokens": 60, "ignore_eos": True}
    conversations = 10 * service.get("/v1/workers/m-0")["slots"]["total"]  # several times as long as an upgrade
    talks = debate(conversations=conversations, rounds=4)
    job = service.post_job({**talks, "agents": [{**agent, "params": params} for agent in talks["agents"]]})
    wait_for(lambda: service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"], "turns run")
    now = upgrade(service)
    assert service.get(f"/v1/jobs/{job}")["progress"]["turns"]["completed"] < 12 * conversations, "it was under way"
    assert (now["upgrades"], now["last"]["kept"]) == (1, ["m-0"])
    assert engines_of(service) == before
    assert service.wait_ended(job, START_S)["state"] == "completed"
    for transcript in service.get(f"/v1/jobs/{job}/result")["conversations"]:
        check_debate(transcript, 4)
    again = client.chat.completions.create(model="m", messages=SAID, extra_body=GREEDY).choices[0].message.content
    assert again == said

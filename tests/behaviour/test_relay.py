"""OpenAI's and Anthropic's surfaces, used by their own clients on a real engine (specification, "Front door")."""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from service.api.errors.forms import SERVED, is_of_surface
from service.api.openai.envelope import fill_body
from tests.engines.adapters import write_gguf_adapter
from tests.harness.service import Document, Service, recorded, scripted_model, serving
from tests.harness.waiting import wait_for

KEY = "sesame"
HI: Any = {"role": "user", "content": "Hello there."}


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, free_ports: Callable[[int], int]
) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("relay")
    write_gguf_adapter(folder / "poet.gguf", 1)
    model: Document = {
        "engine": "embedded",
        "model": str(tiny_model),
        "slots": 2,
        "context": 1024,
        "args": {"threads": 1},
    }
    model["env"] = {"LLAMA_API_KEY": KEY}  # so that the engine can be asked directly as well
    models = {
        "tiny": {**model, "port": free_ports(1), "adapters": {"poet": "poet.gguf"}},
        "embedder": {**model, "port": free_ports(1), "args": {"embeddings": True, "pooling": "mean"}},
    }
    with serving(folder, free_ports(1), models) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with (
        httpx2.Client(trust_env=False) as http,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


def chat(service: Service, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "messages": [HI], "max_tokens": 4, "temperature": 0, **fields}
    return service.http.post("/v1/chat/completions", json=body)


def ask_engine(service: Service, body: dict[str, object]) -> httpx.Response:
    url = f"http://127.0.0.1:{service.get('/v1/workers/tiny-0')['port']}/v1/chat/completions"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)


def frames(text: str) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_the_stock_client_chats(client: openai.OpenAI) -> None:
    """The streamed and the whole answer are the same."""
    told = client.chat.completions.create(model="tiny", messages=[HI], max_tokens=8, temperature=0)
    assert told.usage is not None
    assert (told.model, told.usage.completion_tokens) == ("tiny", 8)
    stream = client.chat.completions.create(
        model="tiny",
        messages=[HI],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    words = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert words == told.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_every_field_of_the_engine_comes_through(service: Service) -> None:
    """Token ids, log probabilities, timings and progress: no field of the engine's is lost, and none is added."""
    body = {
        "messages": [HI],
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "return_tokens": True,
        "timings_per_token": True,
        "return_progress": True,
        "cache_prompt": False,
        "stream": True,
    }
    through = frames(service.http.post("/v1/chat/completions", json=body).text)
    direct = frames(ask_engine(service, body).text)

    assert len(through) > 3
    assert {"prompt_progress", "timings"} <= {key for frame in through for key in frame}
    assert [sorted(frame) for frame in through] == [sorted(frame) for frame in direct]
    assert "logprob" in json.dumps(through)
    assert [frame.get("choices") for frame in through] == [frame.get("choices") for frame in direct]


def test_an_answer_names_its_worker(service: Service) -> None:
    """It also gives the waiting time and the number of attempts."""
    for is_streamed in (False, True):
        headers = chat(service, stream=is_streamed).headers
        assert headers["x-roundhouse-worker"] == "tiny-0"
        assert headers["x-roundhouse-attempts"] == "1"
        assert 0 <= int(headers["x-roundhouse-wait-ms"]) < 5000
        assert headers["content-type"].startswith("text/event-stream" if is_streamed else "application/json")


def test_the_other_surfaces_are_relayed(service: Service, client: openai.OpenAI) -> None:
    """Completions, Responses, embeddings, and the engine's own paths such as /tokenize."""
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=3).choices[0].finish_reason == "length"
    response = client.responses.create(model="tiny", input="Once", max_output_tokens=3)
    assert response.usage is not None
    assert response.usage.output_tokens == 3
    events = list(client.responses.create(model="tiny", input="Once", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.completed"
    vectors = client.embeddings.create(model="embedder", input=["one", "two"], encoding_format="float").data
    assert [len(vector.embedding) for vector in vectors] == [64, 64]
    tokens = service.http.post("/tokenize", json={"model": "tiny", "content": "one"}).json()["tokens"]
    assert len(tokens) >= 3


def test_anthropics_client_is_served(service: Service) -> None:
    """Messages, streamed and whole, and its own form of errors."""
    with httpx2.Client(trust_env=False) as http:
        client = anthropic.Anthropic(base_url=service.url, api_key="none", http_client=http, max_retries=0)
        message = client.messages.create(model="tiny", max_tokens=4, messages=[HI])
        assert (message.usage.output_tokens, message.stop_reason) == (4, "max_tokens")
        with client.messages.stream(model="tiny", max_tokens=4, messages=[HI]) as stream:
            assert stream.get_final_message().stop_reason == "max_tokens"
        with pytest.raises(anthropic.NotFoundError) as refused:
            client.messages.create(model="nobody", max_tokens=4, messages=[HI])
    assert refused.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "nobody is not a model; models that are: embedder, tiny, poet"},
    }


def test_adapters_are_models(client: openai.OpenAI, service: Service) -> None:
    """An adapter is requested as a model, listed as one, and answers with that name."""
    listed = {model.id: model for model in client.models.list().data}
    assert set(listed) == {"tiny", "embedder", "poet"}
    assert client.models.retrieve("poet").model_extra == {"root": "tiny", "max_model_len": 1024}
    texts = {}
    for name in ("tiny", "poet"):
        for is_streamed in (False, True):
            answer = chat(service, model=name, stream=is_streamed, max_tokens=12, ignore_eos=True)
            assert f'"model":"{name}"' in answer.text, answer.text
        texts[name] = chat(service, model=name, max_tokens=12, ignore_eos=True).json()["choices"][0]["message"]
    assert texts["tiny"] != texts["poet"]


def test_several_parts_and_pictures_reach_the_engine(service: Service) -> None:
    """Content in parts passes unchanged; the engine itself refuses pictures that the model cannot see."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there."}]
    assert chat(service, messages=[{"role": "user", "content": parts}]).status_code == 200
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    refused = chat(service, messages=[{"role": "user", "content": [picture]}])
    direct = ask_engine(service, {"model": "tiny", "messages": [{"role": "user", "content": [picture]}]})
    assert direct.status_code == 500
    assert (refused.status_code, refused.json()) == (400, direct.json()), "it is the request's fault, and told as that"


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 3.0}, {"n": 1.0}, {"prompt_cache_key": 5}, {"max_completion_tokens": "?", "max_tokens": 3}],
)
def test_fields_that_only_the_engine_understands_are_accepted(service: Service, fields: dict[str, object]) -> None:
    """JSON numbers are whole or not by value alone, and unknown fields may mean something to an engine."""
    body = {"model": "tiny", "messages": [HI], "max_tokens": 4, "temperature": 0, **fields}
    status = ask_engine(service, body).status_code
    assert chat(service, **fields).status_code == status


def test_tokens_are_counted(service: Service) -> None:
    """On each surface's own path; the engine's own count of the prompt is the same."""
    with anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model="tiny", messages=[HI]).input_tokens
    assert counted == chat(service).json()["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"):
        told = service.http.post(path, json={"model": "tiny", "messages": [HI], "input": [HI]})
        assert told.json()["input_tokens"] == counted, told.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/models/some/nope", 404, "model_not_found"),
        ("DELETE", "/v1/models/tiny", 405, "method_not_allowed"),
        ("GET", "/v1/files", 404, "not_found"),
        ("POST", "/v1/responses/resp_1/cancel", 404, "not_found"),
    ],
)
def test_clients_understand_the_form_of_every_error(
    service: Service, method: str, path: str, status: int, code: str
) -> None:
    """This includes errors before any engine is asked."""
    answer = service.http.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"


def test_clients_can_read_why_a_path_does_not_exist(service: Service, client: openai.OpenAI) -> None:
    """Each in its own form; Roundhouse's own paths have none of these."""
    with pytest.raises(openai.NotFoundError, match="Roundhouse does not serve /v1/files"):
        client.files.list()
    told = service.http.post("/v1/messages/batches", json={"requests": []}).json()
    message = "Roundhouse does not serve /v1/messages/batches"
    assert told == {"type": "error", "error": {"type": "not_found_error", "message": message}}
    served = {path for path in service.get("/openapi.json")["paths"] if is_of_surface(path.replace("{model}", "m"))}
    assert served - {"/v1/models", "/v1/models/m", "/v1/models/{model}"} == SERVED


def test_a_compressed_body_is_refused_by_its_encoding(service: Service) -> None:
    """The error is not about invalid JSON."""
    packed = gzip.compress(json.dumps({"model": "tiny", "messages": [HI]}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = service.http.post("/v1/chat/completions", content=packed, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "media_type_unknown")
    assert "gzip" in answer.json()["error"]["message"]
    plain = {**headers, "Content-Encoding": "identity"}
    body = json.dumps({"model": "tiny", "messages": [HI], "max_tokens": 1})
    assert service.http.post("/v1/chat/completions", content=body, headers=plain).status_code == 200


def test_a_byte_order_mark_before_a_request_is_skipped(service: Service) -> None:
    """The engine skips it too."""
    body = b"\xef\xbb\xbf" + json.dumps({"model": "poet", "messages": [HI], "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{service.get('/v1/workers/tiny-0')['port']}/v1/chat/completions"
    assert httpx.post(url, content=body, headers=headers, trust_env=False).status_code == 200
    assert service.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_bytes_that_are_no_text_are_no_internal_error(service: Service) -> None:
    """They are in a field that we do not read; the engine decides."""
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "prompt_cache_key": "\xff"}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    url = f"http://127.0.0.1:{service.get('/v1/workers/tiny-0')['port']}/v1/chat/completions"
    told = httpx.post(url, content=body, headers=headers, trust_env=False)
    answer = service.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == told.status_code
    assert answer.json()["error"]["type"] == told.json()["error"]["type"]


def test_an_engines_refusal_passes_unchanged(service: Service) -> None:
    """The engine says what is wrong with a request, and is asked once."""
    refused = chat(service, messages=["no message"])
    assert refused.status_code == 400
    assert refused.headers["x-roundhouse-attempts"] == "1"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    long = chat(service, messages=[{"role": "user", "content": "word " * 3000}])
    assert (long.status_code, long.json()["error"]["type"]) == (400, "exceed_context_size_error")
    none = service.http.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    assert (none.status_code, none.json()["error"]["code"]) == (404, "not_found")
    assert "does not support embeddings" in none.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "nobody", "messages": []}', 404, "model_not_found"),
        (b'{"model": "hf:org/Repo", "messages": []}', 404, "model_not_found"),
        (b'{"messages": []}', 400, "invalid_parameter"),  # the service has several models
        (b"{nonsense", 400, "body_malformed"),
        (b"[]", 400, "body_malformed"),
        (b'{"model": "tiny", "n": 0}', 400, "body_malformed"),
        (b'{"model": "tiny", "stream": "yes"}', 400, "body_malformed"),
        (b'{"model": "tiny", "messages": {}}', 400, "body_malformed"),
    ],
)
def test_our_own_refusals_have_openais_form(service: Service, body: bytes, status: int, code: str) -> None:
    """Stock clients know no other form."""
    answer = service.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("given", ["soon", "1_0"])
@pytest.mark.parametrize("name", ["X-Roundhouse-Priority", "X-Roundhouse-Wait-S", "X-Roundhouse-Deadline-S"])
def test_headers_without_effect_are_refused(service: Service, name: str, given: str) -> None:
    """Otherwise a request would run differently than its client expects."""
    answer = service.http.post("/v1/completions", json={"model": "tiny"}, headers={name: given})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_parameter")


def test_keys_are_required_in_openais_form(tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]) -> None:
    """Refusals of the gate have the surface's form as well."""
    models = {"tiny": {"engine": "embedded", "model": str(tiny_model), "port": free_ports(1)}}
    with serving(tmp_path, free_ports(1), models, {"api_keys": ["sesame"]}) as service:
        bad = {"Authorization": "Bearer wrong"}
        answer = service.http.post("/v1/chat/completions", json={}, headers=bad)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        answer = service.http.post("/v1/messages", json={}, headers=bad)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert chat(service).status_code == 200  # the only model need not be named, and here it is
        unnamed = {"messages": [HI], "max_tokens": 1}
        assert service.http.post("/v1/chat/completions", json=unnamed).status_code == 200


def test_params_of_a_model_hold_at_the_door(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """They fill in what the request leaves out; a bound counts under any of the surface's names."""
    record = tmp_path / "record"
    model = scripted_model(free_ports(1), record=str(record)) | {"params": {"max_tokens": 48, "temperature": 0.5}}
    plain = scripted_model(free_ports(1), record=str(tmp_path / "plain")) | {
        "params": {"seed": 1},
        "door": {"params": False},
    }
    bound = scripted_model(free_ports(1), record=str(tmp_path / "bound")) | {"max_answer": 32}
    with serving(tmp_path, free_ports(1), {"m": model, "plain": plain, "bound": bound}) as service:

        def sent(name: str = "m", **fields: object) -> Document:
            service.http.post("/v1/chat/completions", json={"model": name, "messages": [HI], **fields})
            (*_, body) = recorded(record if name == "m" else tmp_path / name)
            return {key: value for key, value in body.items() if key not in ("model", "messages")}

        assert sent() == {"max_tokens": 48, "temperature": 0.5}
        assert sent(temperature=0, max_completion_tokens=7) == {"temperature": 0, "max_completion_tokens": 7}
        assert sent(max_tokens=None) == {"max_tokens": 48, "temperature": 0.5}, "null says nothing"
        assert sent("plain") == {}
        assert sent("bound") == {"max_tokens": 32}
        long = {"note": "x" * 40_000}
        assert sent(metadata=long) == {"metadata": long, "max_tokens": 48, "temperature": 0.5}


@pytest.mark.parametrize(
    ("path", "given", "bound"),
    [
        ("/v1/responses", {}, {"max_output_tokens": 48}),
        ("/v1/responses", {"max_output_tokens": 9}, {}),
        ("/v1/messages", {"max_tokens": 9}, {}),
        ("/v1/completions", {}, {"max_tokens": 48}),
        ("/completion", {}, {"n_predict": 48}),
        ("/completion", {"n_predict": 3}, {}),
    ],
)
def test_a_bound_has_the_name_of_its_surface(path: str, given: Document, bound: Document) -> None:
    """A bound given under any of its names is kept."""
    filled = json.loads(fill_body(json.dumps(given).encode(), path, {"max_tokens": 48, "top_k": 5}))
    assert filled == {**given, **bound, "top_k": 5}
    body = b'{ "top_k" : 1,"max_tokens":2 }'
    assert fill_body(body, path, {"max_tokens": 48, "top_k": 5}) is body


@pytest.mark.parametrize(
    ("path", "given", "bound"),
    [
        ("/v1/chat/completions", {"n_predict": 9}, {"max_tokens": 48}),
        ("/v1/chat/completions", {"max_completion_tokens": 9}, {}),
        ("/v1/completions", {"max_completion_tokens": 9}, {"max_tokens": 48}),
        ("/v1/responses", {"max_tokens": 9}, {"max_output_tokens": 48}),
        ("/v1/responses", {"max_output_tokens": 9}, {}),
        ("/v1/messages", {"max_tokens": 9}, {}),
    ],
)
def test_a_bound_that_an_engine_ignores_counts_as_none(path: str, given: Document, bound: Document) -> None:
    """Only llama.cpp reads all names on all surfaces. A null in the model's params counts as none too."""
    params = {"max_completion_tokens": None, "n_predict": 48}
    filled = json.loads(fill_body(json.dumps(given).encode(), path, params, reads_all=False))
    assert filled == {**given, **bound}


def test_an_incomplete_request_reaches_no_engine(service: Service) -> None:
    """Each surface refuses it in its own form, and no canary is sent for it."""
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
        answer = service.http.post(path, json={"model": "tiny"})
        assert answer.status_code == 400, answer.text
        assert "messages is required" in answer.json()["error"]["message"]
    answer = service.http.post("/v1/responses", json={"model": "tiny", "input": "Hi.", "background": True})
    assert (answer.status_code, "background" in answer.json()["error"]["message"]) == (400, True)
    answer = service.http.post("/v1/responses", json={"model": "tiny", "input": "Hi.", "background": False})
    assert answer.status_code == 200, answer.text


def test_paths_of_the_engine_are_relayed(service: Service) -> None:
    """Those that this engine has, also without the version; others are a 404 that names the engine."""
    tokens = service.http.post("/tokenize", json={"model": "tiny", "content": "Hello there."}).json()["tokens"]
    text = service.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["content"]
    assert text.strip() == "Hello there."
    rendered = service.http.post("/apply-template", json={"model": "tiny", "messages": [HI]}).json()
    assert str(HI["content"]) in rendered["prompt"]
    answer = service.http.post("/completion", json={"model": "tiny", "prompt": "Hello", "n_predict": 4}).json()
    assert answer["tokens_predicted"] == 4
    assert service.http.post("/chat/completions", json={"model": "tiny", "messages": [HI]}).json()["choices"]
    for path in ("/v1/score", "/score", "/pooling"):
        told = service.http.post(path, json={"model": "tiny", "text_1": "a", "text_2": "b", "input": "a"})
        assert (told.status_code, told.json()["error"]["code"]) == (404, "not_found"), told.text
    assert service.http.get("/version", params={"model": "tiny"}).status_code == 404
    assert service.http.get("/version", params={"model": "none"}).status_code == 404


@pytest.mark.parametrize("slip", ["//v1/chat/completions", "/v1/chat/completions/", "/v1/v1/chat/completions"])
def test_a_path_with_an_extra_slash_is_refused_with_the_right_one(service: Service, slip: str) -> None:
    """Base URLs often end with a slash, or have a version of their own."""
    answer = httpx.post(f"{service.url}{slip}", json={"model": "tiny", "messages": []}, trust_env=False)
    message = f"Roundhouse does not serve {slip}; it serves /v1/chat/completions"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", ""])
def test_an_unknown_path_is_reported_before_anything_else(service: Service, kind: str) -> None:
    """The body does not matter: an upload must not be parsed as JSON."""
    headers = {"Content-Type": kind} if kind else {}
    answer = service.http.post("/v1/audio/transcriptions", content=b"--x--", headers=headers)
    message = "Roundhouse does not serve /v1/audio/transcriptions"
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, message)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny/weights/update", "POST"),
        ("OPTIONS", "/v1/models/tiny/adapters/poet", "DELETE"),  # this path lies below the one of a model
    ],
)
def test_an_unserved_method_is_refused_with_the_served_ones(
    service: Service, method: str, path: str, allowed: str
) -> None:
    """The list is for this path, not for a wider one."""
    answer = service.http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert f"{path} does not take {method}; it takes {allowed}" in answer.text


def test_an_engines_refusal_has_the_form_of_the_surface(service: Service) -> None:
    """llama.cpp answers Messages in OpenAI's form; its text is kept."""
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 400}
    talk = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    answer = service.http.post("/v1/messages", json={"model": "tiny", "max_tokens": 4, "messages": talk})
    told = answer.json()
    assert (400 <= answer.status_code < 500, told["type"], set(told["error"])) == (
        True,
        "error",
        {"type", "message"},
    ), told
    assert told["error"]["message"]


SURFACES: tuple[tuple[str, Document], ...] = (
    ("/v1/chat/completions", {"messages": [HI], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "Hello there.", "max_tokens": 4}),
    ("/v1/responses", {"input": "Hello there.", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": [HI], "max_tokens": 4}),
    ("/completion", {"prompt": "Hello there.", "n_predict": 4}),
)


def test_a_streamed_answer_costs_what_a_whole_one_costs(
    tmp_path: Path, tiny_model: Path, free_ports: Callable[[int], int]
) -> None:
    """Messages give a prompt's tokens at the start and an answer's at the end."""
    model = {"engine": "embedded", "model": str(tiny_model), "context": 1024, "args": {"threads": 1}}
    with serving(tmp_path, free_ports(1), {"tiny": {**model, "port": free_ports(1)}}) as service:
        for path, body in SURFACES:
            costs = []
            for is_streamed in (False, True):
                before = used(service)
                asked = {"model": "tiny", "temperature": 0, "stream": is_streamed, **body}
                assert service.http.post(path, json=asked).status_code == 200
                wait_for(lambda asked=before[0]: used(service)[0] > asked, "it is in the accounts")  # type: ignore[misc]
                now = used(service)
                costs.append((now[1] - before[1], now[2] - before[2]))
            assert (costs[0][0] > 0, costs[0][1]) == (True, 4), path
            assert costs[1] == costs[0], path


def used(service: Service) -> tuple[int, int, int]:
    """Return attempts, and tokens of prompts and answers, from the accounts."""
    rows = service.get("/v1/usage")["usage"]
    attempts, prompts, answers = (
        sum(row[name] for row in rows) for name in ("attempts", "prompt_tokens", "answer_tokens")
    )
    return attempts, prompts, answers

import msgspec
import pytest

from transport.dialects import openai, vllm
from transport.dialects.dialect import PLAIN
from transport.dialects.llama_server import COUNT_PATH, LLAMA_SERVER, decode_count, decode_thought
from transport.dialects.refusals import decode_error
from transport.dialects.vllm import VLLM
from transport.endpoint import Endpoint
from transport.errors import CacheFull, ContextOverflow, EngineOverloaded, EngineRejected, MalformedFrame
from transport.events import Event, Finished, ReasoningDelta, TextDelta, Usage
from transport.request import ChatRequest, Message, Thought

REQUEST = ChatRequest(model="m", messages=(Message(role="user", content="Go."),))
# As vLLM 0.32 sent them; what Roundhouse does not read is left out.
CHUNK = (
    b'{"id":"chatcmpl-b5","object":"chat.completion.chunk","model":"tiny","choices":[{"index":0,"delta":{"content":"f,!"},'
    b'"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],'
    b'"usage":{"prompt_tokens":22,"total_tokens":39,"completion_tokens":17,"completion_tokens_details":null}}'
)
LAST = (
    b'{"choices":[],"usage":{"prompt_tokens":22,"total_tokens":25,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":16,"created_cache_tokens":0}},"system_fingerprint":"vllm-0.32.0"}'
)
OVERFLOW = (
    b'{"error":{"message":"This model\'s maximum context length is 2048 tokens. However, your prompt contains at least '
    b'2049 input tokens.","type":"BadRequestError","param":"input_tokens","code":400}}'
)
DEAD = b'{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}'
PAUSED = b'{"error": {"message": "paused", "type": "ServiceUnavailable", "param": null, "code": 503}}'


def metrics(*lines: str) -> bytes:
    return "\n".join(["# HELP vllm:x y", *lines, ""]).encode()


def body(dialect: object, request: ChatRequest) -> dict[str, object]:
    encoded = dialect.encode(request)  # type: ignore[attr-defined]
    decoded: dict[str, object] = msgspec.json.decode(encoded)
    return decoded


class TestAsking:
    def test_each_engine_is_asked_for_its_own_extras(self) -> None:
        """Prompt progress from llama-server, usage in every chunk from vLLM, nothing special elsewhere."""
        plain = body(PLAIN, REQUEST)
        assert body(LLAMA_SERVER, REQUEST) == {**plain, "return_progress": True}
        options = {"include_usage": True, "continuous_usage_stats": True}
        assert body(VLLM, REQUEST) == {**plain, "stream_options": options}

    def test_unwatched_answers_come_in_larger_pieces(self) -> None:
        """A frame holds sixteen tokens, unless the caller sets the number."""
        unwatched = ChatRequest(model="m", messages=(), is_watched=False)
        assert body(VLLM, unwatched)["stream_interval"] == vllm.UNWATCHED_INTERVAL
        told = ChatRequest(model="m", messages=(), is_watched=False, params={"stream_interval": 2})
        assert body(VLLM, told)["stream_interval"] == 2
        assert "stream_interval" not in body(LLAMA_SERVER, unwatched)

    @pytest.mark.parametrize(("salt", "expected"), [(None, "weights-3"), ("mine", "mine.weights-3")])
    def test_prefixes_are_shared_only_within_their_scope(self, salt: str | None, expected: str) -> None:
        """Prefix caches never mix versions of weights; a caller's own salt is added."""
        params = {} if salt is None else {"cache_salt": salt}
        request = ChatRequest(model="m", messages=(), params=params, cache_scope="weights-3")
        assert body(VLLM, request)["cache_salt"] == expected


class TestReading:
    @pytest.mark.parametrize(
        ("frame", "events"),
        [
            (CHUNK, [TextDelta("f,!"), Finished("length"), Usage(22, 17, 0)]),
            (LAST, [Usage(22, 3, 16)]),
            (b'{"choices":[{"delta":{"reasoning":"hm"}}]}', [ReasoningDelta("hm")]),
            (b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', [ReasoningDelta("hm")]),
        ],
    )
    def test_frames_of_vllm_are_read(self, frame: bytes, events: list[Event]) -> None:
        """Both names of the reasoning, and a usage in every chunk."""
        found: list[Event] = []
        assert openai.decode(frame, found) is any(type(event) is Finished for event in events)
        assert found == events

    @pytest.mark.parametrize(
        ("answer", "kind", "about_the_request"),
        [(OVERFLOW, ContextOverflow, True), (DEAD, EngineRejected, False), (PAUSED, EngineOverloaded, False)],
    )
    def test_errors_before_the_stream_and_in_it(
        self, answer: bytes, kind: type[EngineRejected], about_the_request: bool
    ) -> None:
        """VLLM sends most of its errors inside a stream that began with 200."""
        error = decode_error(400 if kind is ContextOverflow else 500, {}, answer)
        with pytest.raises(kind) as raised:
            openai.decode(answer, [])
        assert type(error) is type(raised.value) is kind
        assert error.is_about_the_request is raised.value.is_about_the_request is about_the_request

    def test_openai_names_an_overflow_by_its_code(self) -> None:
        """An attached server may use any wording."""
        answer = (
            b'{"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}'
        )
        assert type(decode_error(400, {}, answer)) is ContextOverflow

    @pytest.mark.parametrize(
        ("status", "message", "kind"),
        [
            (500, "Context size has been exceeded.", CacheFull),
            (500, "send_error: Context size has been exceeded. Sorry.", CacheFull),
            (500, "Compute error.", EngineRejected),
            (400, "Context size has been exceeded.", EngineRejected),
            (503, "Context size has been exceeded.", EngineOverloaded),
        ],
    )
    def test_a_full_cache_is_known_by_its_message(self, status: int, message: str, kind: type[EngineRejected]) -> None:
        """Before the stream and in it. It is no overflow of one request, and not the request's fault."""
        answer = msgspec.json.encode({"error": {"code": status, "message": message, "type": "server_error"}})
        error = decode_error(status, {}, answer)
        with pytest.raises(kind) as raised:
            openai.decode(answer, [])
        assert type(error) is type(raised.value) is kind
        assert error.is_about_the_request is (status == 400)
        assert not isinstance(error, ContextOverflow)


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://h", "/v1/chat/completions"),
        ("http://h/", "/v1/chat/completions"),
        ("http://h/v1", "/v1/chat/completions"),
        ("http://h/v1/chat/completions", "/v1/chat/completions"),
        ("http://h/v1/models/", "/v1/chat/completions"),
        ("http://h/api/paas/v4", "/api/paas/v4/chat/completions"),
        ("http://h/v3/", "/v3/chat/completions"),
        ("http://h/v1beta", "/v1beta/chat/completions"),
        ("http://h/openai", "/openai/v1/chat/completions"),
        ("http://h/video", "/video/v1/chat/completions"),
    ],
)
def test_the_version_of_an_address_stays(url: str, asked: str) -> None:
    """Some servers have their API below a version other than v1; a full endpoint URL stays as well."""
    endpoint = Endpoint.of_url(url)
    assert endpoint.head("/v1/chat/completions").split()[1].decode() == asked
    assert f"{endpoint.base_path}{endpoint.path_of('/health')}".endswith("/health")


class TestCounting:
    def test_only_llama_cpp_is_asked_to_count(self) -> None:
        """Other engines end no request because another one is large."""
        assert LLAMA_SERVER.count is not None
        assert LLAMA_SERVER.count.path == COUNT_PATH == "/v1/chat/completions/input_tokens"
        assert (VLLM.count, PLAIN.count) == (None, None)

    def test_the_count_is_read_from_an_answer(self) -> None:
        """Other fields are ignored."""
        assert decode_count(b'{"object": "response.input_tokens", "input_tokens": 4711}') == 4711

    @pytest.mark.parametrize("answer", [b"{}", b"", b"[]", b'{"input_tokens": "9"}', b"\xff"])
    def test_an_answer_without_a_count_is_an_error(self, answer: bytes) -> None:
        """The error has the path and the answer."""
        with pytest.raises(MalformedFrame, match=COUNT_PATH):
            decode_count(answer)


class TestCounters:
    def test_steps_and_tokens_of_every_engine_behind_the_server_are_read(self) -> None:
        """Data parallel engines have a label each; a step counts as progress even without a token."""
        lines = (
            'vllm:num_requests_running{engine="0",model_name="m"} 2.0',
            'vllm:num_requests_running{engine="1",model_name="m"} 1.0',
            'vllm:iteration_tokens_total_count{engine="0",model_name="m"} 54.0',
            'vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 3.0',
            'vllm:iteration_tokens_total_count{engine="1",model_name="m"} 7.0',
            'vllm:generation_tokens_total{engine="0",model_name="m"} 53.0',
            'vllm:prompt_tokens_total{engine="0",model_name="m"} 22.0',
        )
        told = vllm.decode_counters(metrics(*lines))
        assert [(work.prompt_tokens, work.output_tokens, work.steps) for work in told.work] == [(22, 53, 54), (0, 0, 7)]
        assert (told.running, told.busy_work) == (3, ())
        later = vllm.decode_counters(metrics(*lines[:4], lines[4].replace("7.0", "8.0"), *lines[5:]))
        assert (later.advances_since(told), told.advances_since(told)) == (1, 0)
        assert "61 steps" in str(told)

    def test_a_server_without_counters_does_not_seem_to_stand_still(self) -> None:
        """VLLM has none with --disable-log-stats."""
        with pytest.raises(MalformedFrame):
            vllm.decode_counters(metrics("python_gc_objects_collected_total 1.0"))

    @pytest.mark.parametrize(
        ("labels", "length", "expected"),
        [
            (['kv_cache_max_concurrency="21.84",num_gpu_blocks="1",block_size="1"'], 8192, 21),
            (['engine="0",kv_cache_max_concurrency="3.5"', 'engine="1",kv_cache_max_concurrency="3.5"'], 8192, 6),
            (['kv_cache_max_concurrency="0.9"'], 8192, 1),
            (['num_gpu_blocks="16384",block_size="128",kv_cache_max_concurrency="None"'], 2048, 1024),
            (
                ['engine="0",num_gpu_blocks="64",block_size="16"', 'engine="1",num_gpu_blocks="64",block_size="16"'],
                512,
                2,
            ),
            (['num_gpu_blocks="None",block_size="16"'], 512, None),
            ([], 512, None),
        ],
    )
    def test_the_capacity_is_what_fits_at_full_length(
        self, labels: list[str], length: int, expected: int | None
    ) -> None:
        """Per engine since 0.24; before, the number of blocks is the sum over all engines, repeated with each."""
        lines = [f"vllm:cache_config_info{{{each}}} 1.0" for each in labels]
        models = msgspec.json.encode({"data": [{"id": "m", "max_model_len": length}, {"id": "a", "parent": "m"}]})
        assert vllm.decode_capacity(metrics(*lines), models) == expected

    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            (['cache_config_info{engine="0",kv_cache_size_tokens="1000",num_gpu_blocks="1"} 1.0'], (1000, 0, 0, 1)),
            (
                [
                    'cache_config_info{engine="0",kv_cache_size_tokens="1000"} 1.0',
                    'cache_config_info{engine="1",kv_cache_size_tokens="3000"} 1.0',
                    'kv_cache_usage_perc{engine="0"} 0.5',
                    'kv_cache_usage_perc{engine="1"} 0.25',
                    'num_preemptions_total{engine="0"} 3.0',
                    'num_preemptions_total{engine="1"} 4.0',
                ],
                (4000, 1500, 7, 1),
            ),
            (
                [
                    'cache_config_info{engine="0",num_gpu_blocks="64",block_size="16"} 1.0',
                    'cache_config_info{engine="1",num_gpu_blocks="64",block_size="16"} 1.0',
                ],
                (1024, 0, 0, 16),
            ),
            (['cache_config_info{kv_cache_size_tokens="1024",block_size="128"} 1.0'], (1024, 0, 0, 128)),
            (['cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0'], None),
            ([], None),
        ],
    )
    def test_the_cache_is_that_of_all_engines(
        self, lines: list[str], expected: tuple[int, int, int, int] | None
    ) -> None:
        """Each engine reports tokens since 0.24; before, each repeats the sum of blocks."""
        found = vllm.decode_kv_cache(metrics(*(f"vllm:{line}" for line in lines)))
        assert (None if found is None else (found.tokens, found.used, found.preemptions, found.block)) == expected


class TestThoughts:
    @pytest.mark.parametrize(
        ("prompt", "template", "expected"),
        [
            ("<|assistant|><think>", "{{ '<think>' }}", Thought.OPEN),
            ("<|assistant|><think>\n", "", Thought.OPEN),
            ("<|assistant|>\n<think>\n\n</think>\n\n", "{{ '<think>' }}", Thought.NONE),
            ("<|assistant|></think>", "{{ '<think>' }}", Thought.NONE),
            ("<|assistant|>", "{{ '<think>' }}", Thought.OPTIONAL),
            ("<think>Go.</think><|assistant|>", "{{ '<think>' }}", Thought.OPTIONAL),
            ("<|assistant|>", "{{ '<thinking>' }}", Thought.NONE),
            ("<|assistant|>", None, Thought.NONE),
        ],
    )
    def test_the_end_of_a_prompt_shows_where_the_thought_begins(
        self, prompt: str, template: str | None, expected: Thought
    ) -> None:
        """If it does not, the template does; older builds have none in GET /props."""
        props = {"total_slots": 4} if template is None else {"chat_template": template}
        rendered = msgspec.json.encode({"prompt": prompt})
        assert decode_thought(rendered, msgspec.json.encode(props)) is expected

    @pytest.mark.parametrize(
        ("rendered", "props"),
        [
            (b"<html>", b"{}"),
            (b"{}", b"{}"),
            (b'{"prompt": 5}', b"{}"),
            (b'{"prompt": "\xff"}', b"{}"),
            (b'{"prompt": "?"}', b"<html>"),
            (b'{"prompt": "?"}', b'{"chat_template": 5}'),
        ],
    )
    def test_invalid_json_of_this_dialect_is_an_engines_error(self, rendered: bytes, props: bytes) -> None:
        """It is like any other error of the engine."""
        with pytest.raises(MalformedFrame):
            decode_thought(rendered, props)


class TestEndpoint:
    @pytest.mark.parametrize(
        ("url", "base", "port"),
        [
            ("http://localhost:11434", "http://localhost:11434", 11434),
            ("http://localhost:11434/v1/", "http://localhost:11434", 11434),
            ("https://example.org/openai/v1", "https://example.org:443/openai", 443),
            ("http://[::1]:80", "http://[::1]:80", 80),
        ],
    )
    def test_urls_are_read_with_or_without_v1(self, url: str, base: str, port: int) -> None:
        """Users copy both forms."""
        endpoint = Endpoint.of_url(url)
        assert (endpoint.base_url, endpoint.port) == (base, port)

    @pytest.mark.parametrize("url", ["localhost:11434", "ftp://x", "http://", "http://user:password@x"])
    def test_an_invalid_url_is_refused(self, url: str) -> None:
        """A password belongs into headers, where it is masked."""
        with pytest.raises(ValueError, match="is not an http"):
            Endpoint.of_url(url)

    def test_the_head_of_a_request_is_built_from_the_url(self) -> None:
        """The URL's path comes before ours, and the headers are sent with every request."""
        endpoint = Endpoint.of_url("http://h:1/a/v1", {"Authorization": "Bearer k"})
        head = endpoint.head("/v1/chat/completions")
        assert head.startswith(b"POST /a/v1/chat/completions HTTP/1.1\r\nHost: h:1\r\n")
        assert b"\r\nAuthorization: Bearer k\r\n" in head
        assert head.endswith(b"\r\nContent-Length: ")

    def test_the_query_of_a_url_is_sent_with_every_request(self) -> None:
        """Some servers take their version from it; parameters that no server accepts are refused."""
        endpoint = Endpoint.of_url("http://h:1/a/v1?api-version=2&x=%20y")
        assert endpoint.head("/v1/x").startswith(b"POST /a/v1/x?api-version=2&x=%20y HTTP/1.1\r\n")
        assert (endpoint.base_url, str(endpoint)) == ("http://h:1/a", "http://h:1/a"), "it may hold a key"
        with pytest.raises(ValueError, match="sent to no server"):
            Endpoint.of_url("http://h:1/a#b")

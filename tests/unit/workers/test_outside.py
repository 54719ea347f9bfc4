"""Input from outside that may be false: model files, results of tools, and reports about caches."""

import json
import struct
from pathlib import Path

import pytest

from service.config.load import build_config
from service.config.workers import worker_specs
from service.errors import ConfigError
from workers.errors import InvalidTensors
from workers.files.gguf_header import MAX_ENTRIES, companion_of, read_gguf_header
from workers.requests.cache_veil import CacheVeil
from workers.tools.results import MAX_RESULT_BYTES, MAX_RESULT_VALUES, ResultTooLarge, decode_result, encode_bounded


def gguf(*entries: bytes, count: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries) if count is None else count)
    return head + b"".join(entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def test_numbers_texts_and_short_lists_of_a_header_are_read(tmp_path: Path) -> None:
    """Other values are skipped, and entries after them are found."""
    file = tmp_path / "model.gguf"
    words = struct.pack("<IQ", 8, 2) + text("a") + text("b")
    layers = struct.pack("<IQ3I", 4, 3, 1, 2, 3)
    file.write_bytes(
        gguf(
            entry("general.architecture", 8, text("llama")),
            entry("tokenizer.ggml.tokens", 9, words),
            entry("llama.attention.head_count_kv", 9, layers),
            entry("llama.block_count", 4, struct.pack("<I", 7)),
        )
    )
    assert read_gguf_header(file) == {
        "general.architecture": "llama",
        "llama.attention.head_count_kv": [1, 2, 3],
        "llama.block_count": 7,
    }


@pytest.mark.parametrize(
    ("told", "kind"),
    [("mmproj", "a projector"), ("adapter", "an adapter"), ("imatrix", "an importance matrix"), ("model", None)],
)
def test_a_file_declares_itself_that_it_is_no_model(tmp_path: Path, told: str, kind: str | None) -> None:
    """Converters write an entry for it; a configuration that names the file as a model is refused."""
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(entry("general.type", 8, text(told))))
    assert companion_of(file) == kind
    config = build_config({"models": {"m": {"engine": "embedded", "model": "model.gguf"}}}, {}, "a test", {})
    if kind is None:
        assert worker_specs(config, tmp_path, tmp_path)
        return
    with pytest.raises(ConfigError, match=f"is {kind} by its own header, not a model"):
        worker_specs(config, tmp_path, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + bytes(100),
        gguf(count=MAX_ENTRIES + 1),
        gguf(count=3),
        gguf(entry("x", 9, struct.pack("<IQ", 4, 2**60))),
        gguf(entry("x", 9, struct.pack("<IQ", 8, 2**60))),
        gguf(entry("x", 9, struct.pack("<IQ", 9, 2**60))),
        gguf(entry("x", 8, struct.pack("<Q", 2**63))),
        gguf(entry("x", 77, b"")),
        gguf(struct.pack("<Q", 2**60)),
        gguf(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0) + b"\0"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    """No memory is taken for data that is not there."""
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidTensors):
        read_gguf_header(file)


@pytest.mark.parametrize(
    "result",
    ["x" * (MAX_RESULT_BYTES + 1), [0] * (MAX_RESULT_VALUES + 1), {str(n): [] for n in range(MAX_RESULT_VALUES)}],
    ids=["letters", "list", "object"],
)
async def test_a_result_of_a_tool_is_bounded(result: object) -> None:
    """In characters and in values, both ways."""
    with pytest.raises(ResultTooLarge):
        await encode_bounded(result)
    with pytest.raises(ResultTooLarge):
        await decode_result(json.dumps(result).encode())


async def test_a_result_within_the_bounds_comes_through() -> None:
    """Large ones are handled in a thread."""
    for result in ({"a": [1, None, "é"]}, ["x" * 1000] * 1000):
        assert json.loads(await encode_bounded(result)) == result
        assert await decode_result(json.dumps(result).encode()) == result


class Kept:
    """A passage that keeps what it gets."""

    def __init__(self) -> None:
        self.came = b""

    def pass_frames(self, content_type: str, frames: bytes) -> None:
        assert content_type == "text/event-stream"
        self.came += frames

    def pass_whole(self, status: int, _content_type: str, body: bytes) -> None:
        assert status == 200
        self.came += body


CHAT = {"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 90}}, "tokens_cached": 95}
MESSAGE = {"message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 90}}}
TIMINGS = {"timings": {"cache_n": 90, "prompt_n": 10, "prompt_ms": 100.0, "prompt_per_second": 100.0}}


def test_a_whole_answer_reports_no_more_cached_tokens_than_its_own() -> None:
    """Cached tokens beyond that are reported as read, so sums stay the same."""
    for document, seen in (
        (CHAT, {"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 20}}, "tokens_cached": 20}),
        (MESSAGE, {"message": {"usage": {"input_tokens": 80, "cache_read_input_tokens": 20}}}),
        (TIMINGS, {"timings": {"cache_n": 20, "prompt_n": 80, "prompt_ms": 100.0, "prompt_per_second": 800.0}}),
    ):
        kept = Kept()
        CacheVeil(kept, 20).pass_whole(200, "application/json", json.dumps(document).encode())
        assert json.loads(kept.came) == seen


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_stream_reports_no_more_however_it_is_divided(size: int) -> None:
    """Every other byte passes unchanged."""
    frames = [b'data: {"choices": [{"delta": {"content": "the cache"}}]}\n\n', b": a comment of a cache\n\n"]
    told = b"data: " + json.dumps(CHAT).encode() + b"\n\n"
    stream = b"".join(frames) + told + b"data: [DONE]\n\n"
    kept = Kept()
    veil = CacheVeil(kept, 0)
    for start in range(0, len(stream), size):
        veil.pass_frames("text/event-stream", stream[start : start + size])
    veil.flush()
    assert kept.came.startswith(b"".join(frames))
    assert kept.came.endswith(b"data: [DONE]\n\n")
    (line,) = [line for line in kept.came.splitlines() if b"usage" in line]
    usage = json.loads(line.removeprefix(b"data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_an_answer_without_cache_figures_is_unchanged() -> None:
    """It need not be JSON."""
    for body in (b'{"cache": ', b"[1, 2]", b'{"x":1,  "y": "cached"}'):
        kept = Kept()
        CacheVeil(kept, 0).pass_whole(200, "application/json", body)
        assert kept.came == body

"""Answers of engines with unreliable fields: every field of every surface, missing, odd, huge or cut.

Each seed gives the same answer each time.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

Json = object
HUGE: Final = 10**30
ODD: Final[tuple[Callable[[], Json], ...]] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: -(2**63),
    lambda: 2**31,
    lambda: 2**62,
    lambda: 2**63,
    lambda: HUGE,
    lambda: 1e300,
    lambda: 0.5,
    lambda: "",
    lambda: "12",
    lambda: "x" * 70_000,
    lambda: "\udc80",
    lambda: "\u2028\0\n",
    list,
    dict,
    lambda: [None] * 3,
    lambda: [{}] * 500,
    lambda: [[[[[[[[[]]]]]]]]],
    lambda: {"a": {"b": {"c": [1, 2, 3]}}},
)
CHAT: Final[Mapping[str, Json]] = {
    "id": "c",
    "choices": [
        {
            "index": 0,
            "delta": {
                "content": "hi",
                "reasoning": "hm",
                "reasoning_content": "hm",
                "tool_calls": [{"index": 0, "id": "t", "function": {"name": "add", "arguments": "{}"}}],
            },
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
    "timings": {"prompt_n": 9, "prompt_ms": 1.5, "cache_n": 3, "predicted_n": 2, "predicted_ms": 2.5},
    "prompt_progress": {"total": 9, "cache": 3, "processed": 6, "time_ms": 1.0},
}
ERROR: Final[Mapping[str, Json]] = {"error": {"code": 500, "message": "no", "type": "server_error"}}
RESPONSE: Final[Mapping[str, Json]] = {
    "type": "response.completed",
    "delta": "hi",
    "response": {
        "usage": {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}},
        "error": None,
    },
}
MESSAGE: Final[Mapping[str, Json]] = {
    "type": "content_block_delta",
    "delta": {"text": "hi", "stop_reason": None},
    "message": {"usage": {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 3}},
}
EMBEDDING: Final[Mapping[str, Json]] = {
    "data": [{"index": 0, "embedding": [0.1, 0.2]}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 0},
}
PROBES: Final[Mapping[str, Json]] = {
    "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
    "/slots": [{"id_task": 1, "is_processing": True, "n_prompt_tokens_processed": 3, "next_token": [{"n_decoded": 2}]}],
    "/props": {"total_slots": 4, "chat_template": "<think>"},
    "/apply-template": {"prompt": "<think>"},
    "/v1/chat/completions/input_tokens": {"input_tokens": 9},
}
METRICS: Final = (
    'vllm:iteration_tokens_total_count{engine="0"} 12\n'
    'vllm:prompt_tokens_total{engine="0"} 9\n'
    'vllm:generation_tokens_total{engine="0"} 2\n'
    'vllm:num_requests_running{engine="0"} 1\n'
    'vllm:cache_config_info{engine="0",num_gpu_blocks="10",block_size="16",kv_cache_size_tokens="160",'
    'kv_cache_max_concurrency="2.5"} 1\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    'vllm:num_preemptions_total{engine="0"} 0\n'
)
IDLE: Final = (b": ping\n\n", b"\n" * 300, b"event: x\n\n", b"data\n\n", b"data: \n\n", b"id: 1\nretry: 2\n")
BREAKS: Final = (b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n")
NUMBERS: Final = ("NaN", "+Inf", "-Inf", "-1", "1e300", "9" * 40, "", "x", "0x10", "1 2", "\u0663")


@dataclass(frozen=True, slots=True, kw_only=True)
class WireAnswer:
    """The bytes of one answer, in the pieces in which they arrive; ``is_stream`` says what was requested."""

    pieces: tuple[bytes, ...]
    is_stream: bool


def answer(seed: int) -> WireAnswer:
    """Return one answer of an engine to a chat, or to another request."""
    chance = random.Random(seed)  # noqa: S311 - the same each time
    is_stream = chance.random() < 0.7
    body = (
        b"".join(_frames(chance)) if is_stream else _document(chance, chance.choice((CHAT, EMBEDDING, RESPONSE, ERROR)))
    )
    wire = _head(chance, body, is_stream=is_stream) + body
    if chance.random() < 0.15:
        wire = wire[: chance.randrange(len(wire) + 1)]
    return WireAnswer(pieces=tuple(_pieces(chance, wire)), is_stream=is_stream)


def probe(seed: int) -> tuple[str, bytes]:
    """Return the path of a probe, and an engine's answer to it."""
    chance = random.Random(seed)  # noqa: S311 - the same each time
    if chance.random() < 0.3:
        return "/metrics", _broken(chance, _metrics(chance).encode("utf-8", "surrogatepass"))
    path = chance.choice(tuple(PROBES))
    return path, _document(chance, PROBES[path])


def _frames(chance: random.Random) -> Iterator[bytes]:
    surface = chance.choice((CHAT, CHAT, RESPONSE, MESSAGE))
    for _ in range(chance.randint(0, 6)):
        what = chance.random()
        if what < 0.1:
            yield chance.choice(
                (b": ping\n\n", b"\n" * 300, b"event: x\n\n", b"data\n\n", b"data: \n\n", b"id: 1\nretry: 2\n")
            )
        elif what < 0.2:
            yield b"data: " + _document(chance, ERROR) + b"\n\n"
        else:
            yield (
                b"data: " + _document(chance, surface) + chance.choice((b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n"))
            )
    if chance.random() < 0.7:
        yield chance.choice((b"data: [DONE]\n\n", b"data: [DONE]", b"data: [DONE]\n\ndata: {}\n\n"))


def _document(chance: random.Random, document: Json) -> bytes:
    mutated = json.loads(json.dumps(document))
    for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
        mutated = _mutated(chance, mutated)
    text = json.dumps(mutated, ensure_ascii=chance.random() < 0.5)
    return _broken(chance, text.encode("utf-8", "surrogatepass"))


def _mutated(chance: random.Random, value: Json) -> Json:
    """Return a value with one field of it changed, or the value itself."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(list(value))
        if chance.random() < 0.15:
            del value[name]
        else:
            value[name] = _mutated(chance, value[name])
        return value
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        value[place] = _mutated(chance, value[place])
        return value
    return chance.choice(ODD)()


def _broken(chance: random.Random, text: bytes) -> bytes:
    what = chance.random()
    if what < 0.04:
        return text[: chance.randrange(len(text) + 1)]
    if what < 0.07:
        place = chance.randrange(len(text) + 1)
        return text[:place] + bytes([chance.randrange(256)]) + text[place:]
    if what < 0.08:
        return b"[" * chance.choice((100, 100_000))
    return text


def _metrics(chance: random.Random) -> str:
    lines = METRICS.splitlines(keepends=True)
    for _ in range(chance.randint(0, 3)):
        place = chance.randrange(len(lines))
        head, _, _ = lines[place].rpartition(" ")
        lines[place] = chance.choice((f"{head} {chance.choice(NUMBERS)}\n", "", head, head.replace('"', "")))
        if chance.random() < 0.3:
            lines[place] = lines[place].replace("160", chance.choice(NUMBERS)).replace("16", chance.choice(NUMBERS))
    return "".join(lines) * chance.choice((1, 1, 1, 3))


def _head(chance: random.Random, body: bytes, *, is_stream: bool) -> bytes:
    status = chance.choice((200,) * 12 + (500, 503, 429, 400, 404, 204, 301, 100, 101, 600, 999))
    kind = "text/event-stream" if is_stream else "application/json"
    lines = [f"Content-Type: {chance.choice((kind, kind, kind, kind, 'text/html', ''))}"]
    if chance.random() < 0.5:
        lines.append(f"Content-Length: {chance.choice((len(body),) * 8 + (0, len(body) + 9, -1, HUGE))}")
    if chance.random() < 0.1:
        lines.append(f"Content-Encoding: {chance.choice(('gzip', 'identity', 'x'))}")
    if chance.random() < 0.1:
        lines.append(f"Retry-After: {chance.choice(('1', '9' * 5000, 'soon', '-1'))}")
    if chance.random() < 0.05:
        lines.append(f"X: {'y' * chance.choice((10, 70_000, 200_000))}")
    interim = b"HTTP/1.1 103 Early Hints\r\n\r\n" * chance.choice((0, 0, 0, 0, 1, 3))
    return (
        interim
        + f"HTTP/1.1 {status} X\r\n{chr(13) + chr(10)}".encode()[:-2]
        + "".join(f"{line}\r\n" for line in lines).encode()
        + b"\r\n"
    )


def _pieces(chance: random.Random, wire: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(wire):
        size = chance.choice((1, 7, 100, 4096, 65_536, 1_000_000))
        yield wire[at : at + max(size, len(wire) // 200)]
        at += max(size, len(wire) // 200)

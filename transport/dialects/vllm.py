"""vLLM's dialect: its counters, its capacity, and its own fields.

Source: vLLM 0.32 and 0.33, ``v1/metrics/loggers.py``, ``entrypoints/openai``. One chunk of its streams may hold many
tokens, so tokens are counted by the usage that comes with every chunk.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from transport.counters import EngineCounters, KvCache, SlotWork
from transport.dialects.dialect import REWRITTEN, BegunQuery, BegunReading, Dialect, EngineQuery
from transport.dialects.grammar import without_anchors
from transport.dialects.openai import MODELS_PATH, ask_to_go_on, body_of
from transport.dialects.recording import DETOKENIZE_PATH, OF_VLLM, TOKENIZE_PATH, Post
from transport.errors import UNDECODABLE, MalformedFrame
from transport.request import BegunAnswer, ChatRequest, Constraint, Thought, TokenDetail

HEALTH_PATH: Final = "/health"
METRICS_PATH: Final = "/metrics"
STEPS: Final = "vllm:iteration_tokens_total_count"  # one per step of the engine
PROMPT: Final = "vllm:prompt_tokens_total"
OUTPUT: Final = "vllm:generation_tokens_total"
RUNNING: Final = "vllm:num_requests_running"
CACHE: Final = "vllm:cache_config_info"
USAGE: Final = "vllm:kv_cache_usage_perc"  # from 0 to 1
PREEMPTIONS: Final = "vllm:num_preemptions_total"
MOST_COUNT: Final = 2**53  # above it a float cannot hold every integer
THOUGHT: Final = r"(<think>[^<]*</think>\s*)?"
UNWATCHED_INTERVAL: Final = 16  # tokens per chunk; leaves a sixteenth of the frames to make, send and read


class _Model(Struct, gc=False):
    max_model_len: int | None = None


class _Models(Struct, gc=False):
    data: list[_Model] = []


class _Asked(Struct, gc=False):
    model: str


class _Tokens(Struct, gc=False):
    tokens: list[int]


class _Text(Struct, gc=False):
    prompt: str


_decode_tokens = msgspec.json.Decoder(_Tokens).decode
_decode_text = msgspec.json.Decoder(_Text).decode
_decode_models = msgspec.json.Decoder(_Models).decode


def encode(request: ChatRequest) -> bytes:
    """Return the JSON body; prefixes are shared only among requests of the same ``cache_scope``."""
    body = body_of(request)
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if request.begun is not None:
        ask_to_go_on(body, request.begun)
    if not request.is_watched and request.records is None:  # in a larger frame a change of weights would have no place
        body.setdefault("stream_interval", UNWATCHED_INTERVAL)
    if request.cache_scope is not None:
        salt = body.get("cache_salt")
        body["cache_salt"] = f"{salt}.{request.cache_scope}" if isinstance(salt, str) else request.cache_scope
    if request.records is not None:
        OF_VLLM.ask(body, request.records is TokenDetail.LOGPROBS)
    return msgspec.json.encode(body)


def constrain(constraint: Constraint) -> Mapping[str, object] | None:
    """Return vLLM's ``structured_outputs``; with a reasoning parser they apply after the thought."""
    may_think = constraint.thought is not Thought.NONE
    if constraint.json_schema is not None:
        return None if may_think else {"structured_outputs": {"json": constraint.json_schema}}
    if constraint.pattern is None and not may_think:
        return {"structured_outputs": {"choice": list(constraint.choices)}}
    pattern = constraint.pattern
    answer = "|".join(map(re.escape, constraint.choices)) if pattern is None else without_anchors(pattern)
    thought = THOUGHT if may_think else ""
    return {"structured_outputs": {"regex": f"{thought}({answer})"}}


async def count_text(post: Post, model: object, text: str) -> int:
    """Return the tokens of a text."""
    body = msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
    return len(_tokens_in(await post(TOKENIZE_PATH, body)))


async def read_begun(post: Post, begun: BegunAnswer, without: bytes, whole: bytes) -> BegunReading:
    """Return the tokens of the beginning of an answer, if the template writes it as it is."""
    before, prompt = [_tokens_in(await post(TOKENIZE_PATH, body)) for body in (without, whole)]
    model = msgspec.json.decode(whole, type=_Asked).model
    texts = []
    for tokens in (before, prompt):
        body = msgspec.json.encode({"model": model, "tokens": tokens})
        texts.append(_text_in(await post(DETOKENIZE_PATH, body)))
    if not begun.is_end_of(texts[1], texts[0]):
        return REWRITTEN
    return BegunReading(tokens=max(1, len(prompt) - len(before)))


def _tokens_in(answer: bytes) -> list[int]:
    try:
        return _decode_tokens(answer).tokens
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {TOKENIZE_PATH}: {error}: {answer[:200]!r}") from error


def _text_in(answer: bytes) -> str:
    try:
        return _decode_text(answer).prompt
    except UNDECODABLE as error:
        raise MalformedFrame(f"POST {DETOKENIZE_PATH}: {error}: {answer[:200]!r}") from error


def decode_counters(metrics: bytes) -> EngineCounters:
    """Return the progress of each engine behind the server.

    Raises:
        MalformedFrame: no metrics of vLLM's; a server with ``--disable-log-stats`` reports none.
    """
    values_by_engine: dict[str, dict[str, int]] = {}
    for sample in _samples(metrics, STEPS, PROMPT, OUTPUT, RUNNING):
        values_by_engine.setdefault(sample.labels.get("engine", "0"), {})[sample.name] = _count(sample.value)
    if not values_by_engine:
        raise MalformedFrame("GET /metrics has none of the counters of vLLM")
    # Running requests are not reported as busy slots: a step writes the gauge, so it stands still with the engine.
    return EngineCounters(
        work=tuple(
            SlotWork(
                task=number,
                prompt_tokens=values.get(PROMPT, 0),
                output_tokens=values.get(OUTPUT, 0),
                steps=values.get(STEPS, 0),
                is_busy=False,
            )
            for number, values in enumerate(values_by_engine.values())
        ),
        running=sum(values.get(RUNNING, 0) for values in values_by_engine.values()),
    )


def decode_capacity(metrics: bytes, models: bytes) -> int | None:
    """Return how many requests of the longest length fit its KV cache at once, over all of its engines.

    Raises:
        MalformedFrame: these are not vLLM's answers.
    """
    try:
        lengths = [
            model.max_model_len
            for model in _decode_models(models).data
            if model.max_model_len and model.max_model_len > 0
        ]
    except UNDECODABLE as error:
        raise MalformedFrame(f"GET {MODELS_PATH}: {error}") from error
    engines = [sample.labels for sample in _samples(metrics, CACHE)]
    concurrency = [_number(labels.get("kv_cache_max_concurrency")) for labels in engines]
    known = [_count(value) for value in concurrency if value]
    if known and len(known) == len(engines):
        return max(1, sum(known))
    # Before 0.24 each engine repeats the blocks of all engines.
    labels = engines[0] if engines else {}
    blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
    return max(1, _count(blocks * size // lengths[0])) if blocks and size and lengths else None


def decode_kv_cache(metrics: bytes) -> KvCache | None:
    """Return its KV cache over all of its engines; None if it does not report the size.

    Raises:
        MalformedFrame: these are not vLLM's answers.
    """
    samples = list(_samples(metrics, CACHE, USAGE, PREEMPTIONS))
    engines = [sample.labels for sample in samples if sample.name == CACHE]
    sizes = [_number(labels.get("kv_cache_size_tokens")) for labels in engines]
    if engines and all(sizes):
        tokens = _count(sum(sizes))
    else:  # before 0.24 each engine repeats the blocks of all engines
        labels = engines[0] if engines else {}
        tokens = _count(_number(labels.get("num_gpu_blocks")) * _number(labels.get("block_size")))
    if not tokens:
        return None
    used = [min(1.0, max(0.0, sample.value)) for sample in samples if sample.name == USAGE]
    return KvCache(
        tokens=tokens,
        used=_count(tokens * sum(used) / max(1, len(used))),
        preemptions=sum(_count(sample.value) for sample in samples if sample.name == PREEMPTIONS),
        block=max(1, *(_count(_number(labels.get("block_size"))) for labels in engines)),
    )


def _number(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def _count(value: float) -> int:
    """Return a count from metrics.

    Raises:
        MalformedFrame: it is no count.
    """
    if not 0 <= value <= MOST_COUNT:
        raise MalformedFrame(f"GET {METRICS_PATH}: {value} is no count")
    return int(value)


def _samples(metrics: bytes, *names: str) -> Iterator[Sample]:
    """Parse only the named lines: there are hundreds, and most are buckets."""
    starts = tuple(f"{name}{after}" for name in names for after in ("{", " "))
    try:
        wanted = "\n".join(line for line in metrics.decode().splitlines() if line.startswith(starts))
        for family in text_string_to_metric_families(wanted + "\n"):
            yield from family.samples
    except (ValueError, KeyError, IndexError) as error:
        raise MalformedFrame(f"GET {METRICS_PATH}: {error}") from error


VLLM: Final = Dialect(
    name="vllm",
    ready_paths=(HEALTH_PATH, MODELS_PATH),
    encode=encode,
    counters=EngineQuery(paths=(METRICS_PATH,), decode=decode_counters),
    capacity=EngineQuery(paths=(METRICS_PATH, MODELS_PATH), decode=decode_capacity),
    kv_cache=EngineQuery(paths=(METRICS_PATH,), decode=decode_kv_cache),
    constrain=constrain,
    begun=BegunQuery(ask=ask_to_go_on, read=read_begun, count=count_text),
    recording=OF_VLLM,
)

"""A llama.cpp whose slots share their KV cache: its flags, its specification, and the memory that it takes."""

from pathlib import Path

import pytest

from workers.engine.launch import command_for
from workers.engine.launch.flags import named
from workers.errors import InvalidSpec
from workers.lanes.lane_spec import memory_need
from workers.spec import Capacity, EngineKind, WorkerSpec


def spec(**changes: object) -> WorkerSpec:
    values: dict[str, object] = {
        "engine": EngineKind.LLAMA_SERVER,
        "model": "/m.gguf",
        "slots": 16,
        "context": 1000,
        "capacity": Capacity.TOKENS,
        **changes,
    }
    return WorkerSpec(**values)  # type: ignore[arg-type]


def flags_of(told: WorkerSpec) -> dict[str, str | None]:
    """Return the flags of a command by name, each with its value."""
    argv = command_for(told, {}).argv
    pairs = zip(argv, (*argv[1:], "--"), strict=True)
    return {flag: None if value.startswith("--") else value for flag, value in pairs if flag.startswith("--")}


@pytest.mark.parametrize("engine", [EngineKind.LLAMA_SERVER, EngineKind.EMBEDDED])
@pytest.mark.parametrize(("kv_tokens", "pool"), [(None, "16000"), (4000, "4000"), (1000, "1000")])
def test_slots_share_one_pool_and_each_has_a_bound(engine: EngineKind, kv_tokens: int | None, pool: str) -> None:
    """--ctx-size is then the pool's, and no slot may take more than one request may."""
    flags = flags_of(spec(engine=engine, kv_tokens=kv_tokens))
    assert (flags["--kv-unified"], flags["--kv-unified-per-slot"], flags["--ctx-size"]) == (None, "1000", pool)
    assert flags["--parallel"] == "16"
    assert "--no-kv-unified" not in flags


def test_slots_of_full_length_have_a_part_each() -> None:
    """As before, with no flags that older builds lack."""
    flags = flags_of(spec(capacity=Capacity.SLOTS))
    assert (flags["--ctx-size"], flags["--no-kv-unified"]) == ("16000", None)
    assert not {"--kv-unified", "--kv-unified-per-slot"} & flags.keys()


@pytest.mark.parametrize("flag", ["kv_unified", "--no-kv-unified", "kvu", "-no-kvu", "kv-unified-per-slot"])
def test_flags_that_the_capacity_decides_are_refused_in_args(flag: str) -> None:
    """With a capacity in slots, args may set them."""
    with pytest.raises(InvalidSpec, match="is decided by the key 'capacity'"):
        command_for(spec(args={flag: True}), {})
    argv = command_for(spec(capacity=Capacity.SLOTS, args={flag: True}), {}).argv
    assert set(named({flag: True})) <= {each.lstrip("-") for each in argv}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"engine": "attached", "url": "http://h"}, "capacity: an attached engine does not say how"),
        ({"capacity": "slots", "kv_tokens": 9000}, "kv_tokens: only of llama.cpp with capacity: tokens"),
        ({"engine": "vllm", "kv_tokens": 9000}, "kv_tokens: only of llama.cpp with capacity: tokens"),
        ({"kv_tokens": 999}, "kv_tokens: 999 has no room for one request of 1000 tokens"),
        ({"kv_tokens": -1}, "kv_tokens: -1 has no room"),
        ({"kv_tokens": 1000.5}, "kv_tokens: 1000.5 has no room"),
        ({"kv_tokens": True}, "kv_tokens: True has no room"),
        ({"kv_tokens": 2**31}, "kv_tokens: llama.cpp has no KV cache of 2147483648 tokens"),
        ({"slots": 4, "context": 2**29}, "context: llama.cpp has no KV cache of 2147483648 tokens"),
    ],
)
def test_an_impossible_capacity_is_refused(changes: dict[str, object], fault: str) -> None:
    """Each fault has a message."""
    with pytest.raises(InvalidSpec, match=fault):
        spec(**changes)


def test_a_capacity_may_be_a_plain_word() -> None:
    """As an engine may; a string must not be read as a capacity in slots."""
    assert spec(capacity="tokens", kv_tokens=4000).shares_pool
    assert not spec(capacity="slots").shares_pool
    assert not spec(engine="vllm").shares_pool
    with pytest.raises(ValueError, match="'token' is not a valid Capacity"):
        spec(capacity="token")


def test_the_memory_taken_is_the_pools(tiny_model: Path) -> None:
    """It is not that of all slots at full length."""
    for changes, tokens in (
        ({"kv_tokens": 4000}, 4000),
        ({}, 16_000),
        ({"capacity": "slots"}, 16_000),
        ({"engine": "vllm"}, 1000),
    ):
        need = memory_need(spec(model=str(tiny_model), **changes), {}, is_on_cpu=True)
        assert need is not None
        assert need.tokens == tokens


def test_the_largest_cache_is_taken() -> None:
    """llama.cpp's own limit counts; other engines count for themselves."""
    assert spec(kv_tokens=2**31 - 1).cache_tokens == 2**31 - 1
    assert spec(engine="vllm", slots=4096, context=2**20).slots == 4096

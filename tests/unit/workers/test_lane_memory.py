"""The memory that a model on a lane is planned with: from its files, corrected for flags, or given by its author."""

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from service.config.load import load_config
from service.config.workers import worker_specs
from service.errors import ConfigError
from workers.devices.device_health import DeviceHealth
from workers.devices.readers import MachineReader
from workers.errors import InvalidSpec
from workers.files.model_memory import model_memory
from workers.lanes.lane_spec import MemoryNeed, memory_need
from workers.lanes.memory_flags import Estimate, estimate_of
from workers.lanes.memory_use import MemoryUse
from workers.spec import EngineKind, WorkerSpec

LAYERS: Final = 32
RIGHT, AT_LEAST, WORTHLESS = Estimate.RIGHT, Estimate.AT_LEAST, Estimate.WORTHLESS


def spec(engine: EngineKind = EngineKind.LLAMA_SERVER, **fields: Any) -> WorkerSpec:  # noqa: ANN401 - of any field
    return WorkerSpec(engine=engine, model="/m.gguf", **fields)


def worth(given: WorkerSpec, environment: dict[str, str] | None = None, *, is_on_cpu: bool = False) -> Estimate:
    return estimate_of(given, environment or {}, layers=LAYERS, is_on_cpu=is_on_cpu)


@pytest.mark.parametrize(
    ("args", "on_gpu", "on_cpu"),
    [
        ({}, RIGHT, RIGHT),
        ({"n-cpu-moe": 10}, WORTHLESS, RIGHT),
        ({"ncmoe": 10}, WORTHLESS, RIGHT),
        ({"n_cpu_moe": 0}, RIGHT, RIGHT),
        ({"cpu-moe": True}, WORTHLESS, RIGHT),
        ({"--cpu-moe": True}, WORTHLESS, RIGHT),
        ({"cpu-moe": False}, RIGHT, RIGHT),
        ({"override-tensor": "exps=CPU"}, WORTHLESS, RIGHT),
        ({"ot": ["a=CPU", "b=CPU"]}, WORTHLESS, RIGHT),
        ({"no-kv-offload": True}, WORTHLESS, RIGHT),
        ({"rpc": "10.0.0.2:50052"}, WORTHLESS, RIGHT),
        ({"n-gpu-layers": 1}, WORTHLESS, RIGHT),
        ({"-ngl": 0}, WORTHLESS, RIGHT),
        ({"gpu-layers": LAYERS}, WORTHLESS, RIGHT),  # the output stays in the host's memory
        ({"gpu-layers": LAYERS + 1}, RIGHT, RIGHT),
        ({"ngl": 99}, RIGHT, RIGHT),
        ({"ngl": "all"}, RIGHT, RIGHT),
        ({"ngl": -1}, RIGHT, RIGHT),
        ({"cache-type-k": "q4_0"}, WORTHLESS, WORTHLESS),
        ({"ctv": "q8_0"}, WORTHLESS, WORTHLESS),
        ({"ctk": "f32"}, WORTHLESS, WORTHLESS),
        ({"ctk": "f16", "ctv": "bf16"}, RIGHT, RIGHT),
        ({"mmproj": "/p.gguf"}, AT_LEAST, AT_LEAST),
        ({"model-draft": "/d.gguf"}, AT_LEAST, AT_LEAST),
        ({"threads": 4, "flash-attn": "on"}, RIGHT, RIGHT),
    ],
)
def test_flags_that_keep_a_model_off_its_device_void_the_estimate(
    args: dict[str, Any], on_gpu: Estimate, on_cpu: Estimate
) -> None:
    """On lanes of the CPU all of it is in the same memory."""
    assert worth(spec(args=args)) is on_gpu
    assert worth(spec(args=args), is_on_cpu=True) is on_cpu


@pytest.mark.parametrize(
    ("fields", "environment", "expected"),
    [
        ({"env": {"LLAMA_ARG_N_CPU_MOE": "8"}}, {}, WORTHLESS),
        ({}, {"LLAMA_ARG_N_GPU_LAYERS": "8"}, WORTHLESS),
        ({"args": {"n-gpu-layers": 99}}, {"LLAMA_ARG_N_GPU_LAYERS": "8"}, RIGHT),
        ({"env": {"LLAMA_ARG_CACHE_TYPE_K": "q8_0"}}, {}, WORTHLESS),
        ({"env": {"LLAMA_ARG_KV_OFFLOAD": "0"}}, {}, WORTHLESS),
        ({"env": {"LLAMA_ARG_KV_OFFLOAD": "1"}}, {}, RIGHT),
        ({"command": ["/bin/llama-server", "--n-cpu-moe", "4"]}, {}, WORTHLESS),
        ({"command": ["/bin/llama-server", "-ot", "exps=CPU"]}, {}, WORTHLESS),
        ({"command": ["/bin/llama-server", "--cache-type-v=q4_0"]}, {}, WORTHLESS),
        ({"command": ["/bin/llama-server", "-ngl", "-1"]}, {}, RIGHT),
        ({"command": ["/bin/llama-server", "--verbose"]}, {}, RIGHT),
    ],
)
def test_variables_mean_the_same_as_flags(
    fields: dict[str, Any], environment: dict[str, str], expected: Estimate
) -> None:
    """They are read as llama.cpp does: a flag overrides its variable."""
    assert worth(spec(**fields), environment) is expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, RIGHT),
        ({"cpu-offload-gb": 20}, WORTHLESS),
        ({"cpu_offload_gb": 0}, RIGHT),
        ({"kv-cache-dtype": "fp8"}, WORTHLESS),
        ({"kv-cache-dtype": "auto"}, RIGHT),
        ({"quantization": "bitsandbytes"}, WORTHLESS),
        ({"n-cpu-moe": 4}, RIGHT),  # no flag of its
    ],
)
def test_vllm_has_flags_of_its_own(args: dict[str, Any], expected: Estimate) -> None:
    """It always loads all of its weights, unless these flags say otherwise."""
    assert worth(spec(EngineKind.VLLM, args=args)) is expected


def test_a_model_with_an_unknown_number_of_layers_may_be_kept_off_by_any_number() -> None:
    """The number may or may not cover all layers."""
    assert estimate_of(spec(args={"ngl": 99}), {}, layers=None, is_on_cpu=False) is WORTHLESS


def test_the_authors_figure_counts(tiny_model: Path) -> None:
    """It overrides files and flags. A measurement raises it, and never lowers it."""
    plain = memory_need(spec().__class__(engine="llama-server", model=str(tiny_model)), {}, is_on_cpu=False)  # type: ignore[arg-type]
    assert plain is not None
    assert plain.taken == plain.least
    for args in ({}, {"n-cpu-moe": 8}):
        told = spec(args=args, memory_mib=5000)
        assert memory_need(told, {}, is_on_cpu=False) == MemoryNeed(least=5000, taken=5000, tokens=told.cache_tokens)
    use = MemoryUse(DeviceHealth(MachineReader(Path("/nowhere"))))
    told = spec(memory_mib=5000, need_mib=5000)
    seen = []
    for most in (3000, 7000):
        use.most_mib["model"] = most
        seen.append(use.need_mib(told))
    assert seen == [5000, 7000]
    filling = memory_need(spec(EngineKind.VLLM, memory_mib=5000), {}, is_on_cpu=False)
    assert filling == MemoryNeed(least=5000, taken=None, tokens=4096)
    with pytest.raises(InvalidSpec, match="memory_mib: 0 is not a number from 1"):
        spec(memory_mib=0)


def large(folder: Path, tiny_model: Path) -> Path:
    """Make a model of 6 GB, whose tensors are never read."""
    file = folder / "large.gguf"
    file.write_bytes(tiny_model.read_bytes())
    with file.open("r+b") as opened:
        opened.truncate(6 * 10**9)
    return file


def configured(folder: Path, model: dict[str, Any]) -> list[WorkerSpec]:
    gpu = {"index": 0, "uuid": "GPU-0", "name": "Tesla T4", "memory_mib": 4000}
    (folder / "gpus.yaml").write_text(yaml.safe_dump({"devices": [gpu]}))
    path = folder / "roundhouse.yaml"
    plain = {"engine": "llama-server", "model": "large.gguf", "command": ["/bin/true"], "placement": "lanes"}
    document = {"gpus": {"inventory": "gpus.yaml"}, "models": {"m": {**plain, **model}}}
    path.write_text(yaml.safe_dump(document))
    return worker_specs(load_config(path), folder, folder)


@pytest.mark.parametrize(
    ("model", "need_mib"),
    [
        ({"args": {"n-cpu-moe": 20}}, None),
        ({"args": {"n-gpu-layers": 0}}, None),
        ({"args": {"cache-type-k": "q4_0"}}, None),
        ({"memory_mib": 3000}, 3000),
        ({"memory_mib": 3000, "args": {"override-tensor": "exps=CPU"}}, 3000),
    ],
)
def test_a_model_that_is_kept_off_its_gpu_is_not_refused(
    tmp_path: Path, tiny_model: Path, model: dict[str, Any], need_mib: int | None
) -> None:
    """It has 6 GB on a GPU of 4 GB; its unknown need counts as a lane's part until it is measured."""
    large(tmp_path, tiny_model)
    assert {each.need_mib for each in configured(tmp_path, model)} == {need_mib}


@pytest.mark.parametrize(
    ("model", "because"),
    [
        ({}, "takes 59.. MiB with .* or memory_mib if it takes less"),
        ({"args": {"mmproj": "p.gguf"}}, "takes 59.. MiB"),
        ({"memory_mib": 5000}, "models.m.memory_mib: 5000 MiB; the largest device has 3800 MiB"),
        ({"memory_mib": 0}, "models.m.memory_mib: must be at least 1"),
        ({"memory_mib": 5, "placement": "fixed"}, "memory_mib: only for a model with placement: lanes"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, tiny_model: Path, model: dict[str, Any], because: str
) -> None:
    """By the size of its files, or by its author's figure."""
    large(tmp_path, tiny_model)
    with pytest.raises(ConfigError, match=because):
        configured(tmp_path, model)


@pytest.mark.parametrize(
    ("name", "beside", "parts"),
    [
        ("big[v2]-00001-of-00002.gguf", ["big[v2]-00002-of-00002.gguf"], 2),
        ("big*-00001-of-00002.gguf", ["big*-00002-of-00002.gguf", "bigger-00001-of-00002.gguf"], 2),
        ("m?-00002-of-00003.gguf", ["m?-00001-of-00003.gguf", "mx-00003-of-00003.gguf"], 2),
        ("m-00001-of-00002.gguf", ["m-00002-of-00002.gguf", "m-00002-of-00003.gguf", "m-v2-00001-of-00002.gguf"], 2),
        ("one[v2].gguf", ["one[v2]-00001-of-00002.gguf"], 1),
        ("a-of-2.gguf", ["a-of-1.gguf"], 1),
        ("-of-00002.gguf", [], 1),
    ],
)
def test_the_parts_of_a_model_are_its_own(tmp_path: Path, name: str, beside: list[str], parts: int) -> None:
    """They are found by their numbers, whatever else the name contains."""
    for each in (name, *beside):
        (tmp_path / each).write_bytes(bytes(2**20))
    known = model_memory(str(tmp_path / name))
    assert known is not None
    assert known.weights_mib == parts

"""How engines of fixed models share a machine: invented inventories, and the cores of the CPU."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.config import machine_plan
from service.config.lane_plan import plan_of
from service.config.load import load_config
from service.config.machine_plan import first_devices
from service.config.workers import worker_specs
from service.errors import ConfigError
from workers.engine.launch import command_for
from workers.engine.launch.flags import named
from workers.fleet import Fleet
from workers.handover import launch_of
from workers.spec import WorkerSpec

VLLM = {"engine": "vllm", "model": "org/name", "command": ["/bin/true"]}
LLAMA = {"engine": "llama-server", "model": "org/name", "command": ["/bin/true"]}
SLICES = [
    {"uuid": "MIG-a", "profile": "3g.40gb", "memory_mib": 40_000},
    {"uuid": "MIG-b", "profile": "3g.40gb", "memory_mib": 40_000},
]


def gpu(index: int, **more: object) -> dict[str, object]:
    return {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100", "memory_mib": 80_000, **more}


def specs_of(folder: Path, models: Mapping[str, object], gpus: list[dict[str, object]]) -> list[WorkerSpec]:
    path = folder / "roundhouse.yaml"
    (folder / "inventory.yaml").write_text(yaml.safe_dump({"devices": gpus}))
    path.write_text(yaml.safe_dump({"gpus": {"inventory": "inventory.yaml"}, "models": models}, sort_keys=False))
    return first_devices(worker_specs(load_config(path), folder, folder))


def devices(specs: list[WorkerSpec]) -> dict[str, list[str]]:
    return {spec.id: [device.uuid for device in spec.devices] for spec in specs}


def shown(spec: WorkerSpec) -> str | None:
    return command_for(spec, {}).env.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("engine", [VLLM, LLAMA])
def test_eight_replicas_stand_on_eight_gpus(tmp_path: Path, engine: dict[str, object]) -> None:
    """Each engine sees only its own GPU, by number; none is idle."""
    specs = specs_of(tmp_path, {"m": {**engine, "replicas": 8, "socket_dir": None}}, [gpu(n) for n in range(8)])
    assert sorted(shown(spec) or "" for spec in specs) == [str(number) for number in range(8)]
    assert all(command_for(spec, {}).env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for spec in specs)
    assert all("--gpu-memory-utilization" not in command_for(spec, {}).argv for spec in specs)


def test_devices_with_the_fewest_engines_come_first(tmp_path: Path) -> None:
    """All models, lanes and slices count; several vLLM engines on one device take parts of its memory."""
    models = {
        "a": {**VLLM, "replicas": 3},
        "b": {**LLAMA, "replicas": 2, "port": 9200},
        "lanes": {**LLAMA, "placement": "lanes"},
    }
    specs = specs_of(tmp_path, models, [gpu(0), gpu(1, mig=SLICES)])
    fixed = [spec for spec in specs if spec.lane is None]
    assert {spec.lane.device.uuid for spec in specs if spec.lane is not None} == {"GPU-0"}
    assert devices(fixed) == {"a-0": ["MIG-a"], "a-1": ["MIG-b"], "a-2": ["MIG-a"], "b-0": ["MIG-b"], "b-1": ["GPU-0"]}
    assert shown(fixed[0]) == "MIG-a"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({**VLLM}, [["GPU-0"]]),
        ({**LLAMA}, [["GPU-0", "GPU-1", "GPU-2", "GPU-3"]]),  # it spreads by itself, and is shown nothing
        ({**LLAMA, "devices": [1, "GPU-3"]}, [["GPU-1", "GPU-3"]]),
        ({**LLAMA, "devices": [3, 1, 0, 2], "replicas": 2}, [["GPU-3", "GPU-1"], ["GPU-0", "GPU-2"]]),
        ({**VLLM, "devices": [2, 3], "replicas": 3}, [["GPU-2"], ["GPU-3"], ["GPU-2"]]),
        ({**VLLM, "args": {"tensor-parallel-size": 2}, "replicas": 2}, [["GPU-0", "GPU-1"], ["GPU-2", "GPU-3"]]),
        ({**VLLM, "env": {"CUDA_VISIBLE_DEVICES": "2,1"}}, [["GPU-1", "GPU-2"]]),
        ({**LLAMA, "args": {"n_gpu_layers": 0}, "replicas": 2}, [[], []]),
        ({**LLAMA, "args": {"main-gpu": 1}, "replicas": 2}, [["GPU-0", "GPU-1", "GPU-2", "GPU-3"]] * 2),
    ],
)
def test_the_author_decides_where(tmp_path: Path, model: dict[str, Any], expected: list[list[str]]) -> None:
    """``devices``, flags and variables decide; engines placed by the author get no variables of ours."""
    specs = specs_of(tmp_path, {"m": model}, [gpu(number) for number in range(4)])
    assert list(devices(specs).values()) == expected
    if "env" in model or model == LLAMA or "main-gpu" in model.get("args", {}):
        assert [shown(spec) for spec in specs] == [model.get("env", {}).get("CUDA_VISIBLE_DEVICES")] * len(specs)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ({**VLLM, "devices": [7]}, "models.m.devices: 7 is no device; those that are there: 0 (GPU-0), MIG-a, MIG-b"),
        ({**VLLM, "devices": ["GPU-1"]}, "GPU-1 is no device"),
        ({**VLLM, "devices": [0], "args": {"tp": 2}}, "an engine needs 2 devices, but 1 are named"),
        ({**VLLM, "devices": [0], "env": {"CUDA_VISIBLE_DEVICES": "0"}}, "devices sets the same"),
        ({**LLAMA, "devices": [0], "placement": "lanes"}, "devices: set by the lane"),
        ({**VLLM, "devices": []}, "devices"),
    ],
)
def test_impossible_devices_are_refused(tmp_path: Path, model: dict[str, Any], fault: str) -> None:
    """The message names the key, the value and the existing devices."""
    with pytest.raises(ConfigError) as refused:
        specs_of(tmp_path, {"m": model}, [gpu(0), gpu(1, mig=SLICES)])
    assert fault in str(refused.value)


def test_engines_on_a_full_device_take_parts_of_its_memory(tmp_path: Path) -> None:
    """Unless the author gives the part. An engine alone on its device gets no such flag."""
    models = {"a": {**VLLM, "replicas": 3}, "b": {**VLLM, "args": {"gpu_memory_utilization": 0.2}}}
    specs = specs_of(tmp_path, models, [gpu(0), gpu(1)])
    assert [named(spec.args)["gpu-memory-utilization"] for spec in specs] == [0.45, 0.45, 0.45, 0.2]
    assert Counter(device for each in devices(specs).values() for device in each) == {"GPU-0": 2, "GPU-1": 2}


@pytest.mark.parametrize(
    ("models", "threads"),
    [
        ({"m": {**LLAMA, "replicas": 2}}, ["4", "4"]),
        ({"m": {**LLAMA}}, [None]),  # it has the machine to itself
        ({"m": {**LLAMA, "args": {"threads": 7}}, "n": {**LLAMA, "port": 9200}}, ["7", "4"]),
        ({"m": {**LLAMA, "replicas": 20}}, ["1"] * 20),
        ({"t": {"engine": "embedded", "model": "roundhouse:tiny"}, "m": {**LLAMA, "port": 9200}}, ["1", "4"]),
        ({"t": {"engine": "embedded"}}, ["1"]),
        ({"l": {**LLAMA, "placement": "lanes"}, "k": {**LLAMA, "placement": "lanes"}}, ["4", "4"] * 2),  # two lanes
    ],
)
def test_engines_on_the_cpu_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Mapping[str, object], threads: list[str | None]
) -> None:
    """By default each would use all of them, and spin."""
    monkeypatch.setattr(machine_plan, "usable_cores", lambda: 8)
    given = []
    for spec in specs_of(tmp_path, models, []):
        argv = list(command_for(spec, {}).argv)
        given.append(argv[argv.index("--threads") + 1] if "--threads" in argv else None)
    assert given == threads


def test_a_new_engine_takes_the_device_with_the_fewest_engines(tmp_path: Path) -> None:
    """Engines that run stay where they are: a change elsewhere in the configuration moves none."""
    gpus = [gpu(number) for number in range(3)]
    before = specs_of(tmp_path, {"a": {**VLLM, "replicas": 2}}, gpus)
    fleet = Fleet([replace(spec, devices=()) for spec in before], {})
    assert devices([worker.spec for worker in fleet]) == {"a-0": ["GPU-0"], "a-1": ["GPU-1"]}
    after = specs_of(tmp_path, {"first": {**VLLM}, "a": {**VLLM, "replicas": 2}}, gpus)
    assert devices(after) == {"first-0": ["GPU-0"], "a-0": ["GPU-1"], "a-1": ["GPU-2"]}
    assert [spec for spec in after if spec.name == "a"] == before, "its workers are what is wanted"
    assert [launch_of(spec, {}) for spec in after if spec.name == "a"] == [launch_of(spec, {}) for spec in before]


def test_the_plan_is_shown(tmp_path: Path) -> None:
    """It says what a start would choose, for lanes too."""
    specs_of(tmp_path, {"m": {**VLLM, "replicas": 2}}, [gpu(0), gpu(1)])
    assert plan_of(tmp_path / "roundhouse.yaml")["engines"] == [
        {"worker": "m-0", "model": "m", "devices": ["GPU-0"], "threads": None},
        {"worker": "m-1", "model": "m", "devices": ["GPU-1"], "threads": None},
    ]

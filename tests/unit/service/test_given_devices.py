"""Devices granted by a scheduler, and drivers that report nothing.

Engines stay within the grant, and the CPU is always available. A stand-in for NVML provides the machine: two T4s, or
five GPUs of several kinds.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.testing import CliRunner

from roundhouse import InferenceEngine
from service.cli.app import app
from service.config.lane_plan import plan_of
from service.config.load import load_config
from service.config.machine_plan import first_devices
from service.config.workers import worker_specs
from service.errors import ConfigError
from tests.harness.agents import engine_for_agents
from tests.harness.nvml_machine import GB10, H100, SLICES, T4, built
from tests.harness.stand_ins import NVML_LIBRARY, take_nvml
from workers.engine.launch import command_for
from workers.engine.launch.devices import placed
from workers.errors import DevicesUnreadable
from workers.spec import WorkerSpec

VLLM: Final = {"engine": "vllm", "model": "org/name", "command": ["/bin/true"]}
LLAMA: Final = {"engine": "llama-server", "model": "org/name", "command": ["/bin/true"]}
ON_CPU: Final = {**LLAMA, "args": {"n-gpu-layers": 0}}
EMBEDDED: Final = {"engine": "embedded"}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def told(driver: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have this process ask the stand-in, and return a function that sets its variables."""
    take_nvml(driver / NVML_LIBRARY, monkeypatch)
    return monkeypatch


@pytest.fixture
def two_t4s(told: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Provide a machine with two T4s, GPU-0 and GPU-1."""
    (tmp_path / "used").touch()
    told.setenv("STAND_IN_USED", str(tmp_path / "used"))
    return told


def configured(folder: Path, models: Mapping[str, object], **gpus: object) -> Path:
    path = folder / "roundhouse.yaml"
    path.write_text(yaml.safe_dump({"gpus": gpus, "models": models}, sort_keys=False))
    return path


def specs_of(folder: Path, model: Mapping[str, object], **gpus: object) -> list[WorkerSpec]:
    path = configured(folder, {"m": model}, **gpus)
    return first_devices(worker_specs(load_config(path), folder, folder))


def shown(specs: list[WorkerSpec], environment: Mapping[str, str]) -> list[str | None]:
    return [command_for(spec, environment).env.get("CUDA_VISIBLE_DEVICES") for spec in specs]


@pytest.mark.parametrize("value", ["1", "GPU-1", "1,-1,0", "1,7"])
@pytest.mark.parametrize(
    ("model", "gpus", "expected"),
    [
        (VLLM, {}, ["1"]),
        ({**VLLM, "replicas": 2}, {}, ["1", "1"]),
        ({**LLAMA, "replicas": 2}, {}, ["1", "1"]),
        ({**VLLM, "devices": [1]}, {}, ["1"]),
        ({**VLLM, "placement": "lanes"}, {"max_agents_per_gpu": 1}, ["1"]),
        ({**LLAMA, "placement": "lanes"}, {}, ["1", "1"]),
        (LLAMA, {}, None),  # it inherits the variable
    ],
)
@pytest.mark.usefixtures("two_t4s")
def test_engines_stay_on_the_gpu_that_was_granted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    model: dict[str, Any],
    gpus: dict[str, object],
    expected: list[str] | None,
) -> None:
    """Numbers and UUIDs, up to the first unknown device.

    This holds for vLLM, replicas, lanes and an inherited variable.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    specs = specs_of(tmp_path, model, **gpus)
    assert shown(specs, {"CUDA_VISIBLE_DEVICES": value}) == (expected or [value])
    assert {device.uuid for spec in specs for device in spec.accelerators} == {"GPU-1"}


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "9", "GPU-9", "0,0"])
@pytest.mark.usefixtures("two_t4s")
def test_without_a_granted_gpu_engines_compute_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Lanes work, and llama.cpp counts as computing on the CPU, so its CPU time may prove that it works."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr("workers.engine.launch.devices.has_gpu", lambda: True)
    for model in (LLAMA, {**LLAMA, "replicas": 2}):
        specs = specs_of(tmp_path, model)
        assert set(shown(specs, {"CUDA_VISIBLE_DEVICES": value})) == {value}
        assert all(placed(spec, {"CUDA_VISIBLE_DEVICES": value}).on_cpu for spec in specs)
    lanes = [spec.lane for spec in specs_of(tmp_path, {**LLAMA, "placement": "lanes"})]
    assert all(lane is not None and lane.device.is_cpu for lane in lanes)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ({**VLLM, "devices": [0]}, "models.m.devices: 0 is hidden from this service by CUDA_VISIBLE_DEVICES=1"),
        ({**LLAMA, "devices": ["GPU-0"]}, "models.m.devices: GPU-0 is hidden from this service by"),
        ({**LLAMA, "devices": [0, 1]}, r"those that may be used: 1 \(GPU-1\)"),
        ({**VLLM, "devices": [5]}, r"5 is no device; those that are there: 1 \(GPU-1\)"),
        ({**VLLM, "env": {"CUDA_VISIBLE_DEVICES": "0"}}, "models.m.env.CUDA_VISIBLE_DEVICES: GPU-0 is hidden"),
        ({**LLAMA, "env": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "models.m.env.CUDA_VISIBLE_DEVICES: GPU-0 is hidden"),
    ],
)
@pytest.mark.usefixtures("two_t4s")
def test_devices_that_were_not_granted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], fault: str
) -> None:
    """They belong to others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match=fault):
        specs_of(tmp_path, model)


@pytest.mark.usefixtures("two_t4s")
def test_an_author_may_take_less_than_was_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two, or none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for value in ("1", "GPU-1", ""):
        specs = specs_of(tmp_path, {**VLLM, "env": {"CUDA_VISIBLE_DEVICES": value}})
        assert shown(specs, {"CUDA_VISIBLE_DEVICES": "0,1"}) == [value]


def test_granted_slices_have_lanes(tmp_path: Path, told: pytest.MonkeyPatch) -> None:
    """Other slices have none."""
    told.setenv("CUDA_VISIBLE_DEVICES", f"{SLICES[1]},2")
    specs = specs_of(tmp_path, {**LLAMA, "placement": "lanes"}, enable_mig=True, max_agents_per_gpu=1)
    assert shown(specs, {}) == [SLICES[1], "2"]


def test_an_inventory_is_bound_by_the_environment_as_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inventory lists the devices, and the environment those that we may use."""
    gpus = [{"index": n, "uuid": f"GPU-{n}", "name": "AMD Instinct MI300X"} for n in range(3)]
    (tmp_path / "gpus.yaml").write_text(yaml.safe_dump({"devices": gpus}))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2")
    (spec,) = specs_of(tmp_path, VLLM, inventory="gpus.yaml")
    assert command_for(spec, {"HIP_VISIBLE_DEVICES": "2"}).env["HIP_VISIBLE_DEVICES"] == "2"


@pytest.mark.usefixtures("two_t4s")
def test_an_inference_engine_stays_within_the_grant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its program's environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert {lane.device.uuid for lane in InferenceEngine().lanes} == {"GPU-1"}


# A driver that fails


@pytest.mark.parametrize("result", ["18", "999", "3"])
@pytest.mark.parametrize("model", [EMBEDDED, ON_CPU, LLAMA, {**LLAMA, "replicas": 2}, {**ON_CPU, "placement": "lanes"}])
def test_a_machine_whose_driver_fails_runs_models_on_the_cpu(
    tmp_path: Path, told: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, result: str, model: dict[str, object]
) -> None:
    """After an update of the driver, for example, until the reboot.

    If an engine could use a GPU, the log says that none is used.
    """
    told.setenv("STAND_IN_INIT", result)
    told.setattr("workers.engine.launch.devices.has_gpu", lambda: True)
    specs = specs_of(tmp_path, model)
    assert all(spec.accelerators == () and placed(spec, {}).on_cpu for spec in specs)
    is_told = any("no GPU is used; reboot" in each for each in caplog.messages)
    assert is_told == (model not in (EMBEDDED, ON_CPU))  # these ask no driver


@pytest.mark.parametrize("model", [VLLM, {**LLAMA, "devices": [0]}, {**LLAMA, "placement": "lanes"}])
def test_a_model_that_needs_a_gpu_is_refused_with_the_drivers_remedy(
    tmp_path: Path, told: pytest.MonkeyPatch, model: dict[str, object]
) -> None:
    """The refusal comes before anything starts. If the environment grants no GPU, none is needed."""
    told.setenv("STAND_IN_INIT", "18")
    with pytest.raises(DevicesUnreadable, match=r"version mismatch; reboot if .*, or list .* gpus\.inv"):
        specs_of(tmp_path, model)
    if "devices" not in model:
        told.setenv("CUDA_VISIBLE_DEVICES", "")
        assert specs_of(tmp_path, model)[0].accelerators == ()


def test_an_inference_engine_on_the_cpu_needs_no_driver(told: pytest.MonkeyPatch) -> None:
    """The wheel's embedded engine computes on the CPU."""
    told.setenv("STAND_IN_INIT", "18")
    assert all(lane.device.is_cpu for lane in engine_for_agents(engine="embedded").lanes)
    with pytest.raises(DevicesUnreadable, match="reboot"):
        InferenceEngine()


@pytest.mark.parametrize(
    ("model", "environment", "left"),
    [
        ({**VLLM, "devices": [0]}, {}, [H100]),
        ({**LLAMA, "devices": [0, 3]}, {}, [H100, GB10]),
        (VLLM, {"CUDA_VISIBLE_DEVICES": "3"}, [GB10]),
        ({**LLAMA, "placement": "lanes"}, {"CUDA_VISIBLE_DEVICES": "0"}, [H100]),
        (ON_CPU, {}, []),
    ],
)
def test_a_lost_gpu_is_left_out_where_others_are_named(
    tmp_path: Path,
    told: pytest.MonkeyPatch,
    model: dict[str, object],
    environment: dict[str, str],
    left: list[str],
) -> None:
    """The model or the environment names them. They are given by UUID, since CUDA does not count a lost one."""
    told.setenv("STAND_IN_LOST", "2")
    for name, value in environment.items():
        told.setenv(name, value)
    spec = specs_of(tmp_path, model)[0]
    assert [device.uuid for device in spec.accelerators] == left
    if left:
        assert shown([spec], environment) == [",".join(left)]


@pytest.mark.parametrize(
    ("model", "environment", "because"),
    [
        (VLLM, {}, "NVML: GPU 2: GPU is lost; reset it or reboot, or exclude it"),
        ({**LLAMA, "placement": "lanes"}, {}, "NVML: GPU 2: GPU is lost"),
        ({**LLAMA, "placement": "lanes"}, {"CUDA_VISIBLE_DEVICES": "3"}, ""),
        ({**VLLM, "devices": [2]}, {}, "models.m.devices: 2 is lost, as the driver says: GPU is lost"),
    ],
)
def test_work_on_a_lost_gpu_does_not_move_elsewhere(
    tmp_path: Path, told: pytest.MonkeyPatch, model: dict[str, object], environment: dict[str, str], because: str
) -> None:
    """The message names the GPU."""
    told.setenv("STAND_IN_LOST", "2")
    for name, value in environment.items():
        told.setenv(name, value)
    if not because:
        assert specs_of(tmp_path, model)
        return
    with pytest.raises((DevicesUnreadable, ConfigError), match=because):
        specs_of(tmp_path, model)


# What the command shows


def gpus_said(*args: str) -> str:
    done = CliRunner().invoke(app, ["gpus", *args], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_what_is_hidden(tmp_path: Path, two_t4s: pytest.MonkeyPatch) -> None:
    """It plans lanes on the remaining devices, and its output can describe a machine."""
    two_t4s.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "GPU 0 (GPU-0, Tesla T4): hidden by CUDA_VISIBLE_DEVICES=1" in gpus_said()
    path = configured(tmp_path, {"m": {**LLAMA, "placement": "lanes"}})
    text = gpus_said("--config", str(path), "--json")
    plan = json.loads(text)
    assert [each["uuid"] for each in plan["devices"]] == ["GPU-1"]
    assert plan["hidden"] == [
        {"index": 0, "uuid": "GPU-0", "name": "Tesla T4", "because": "hidden by CUDA_VISIBLE_DEVICES=1"}
    ]
    assert {each["device"] for each in plan["lanes"]} == {"GPU-1"}
    (tmp_path / "gpus.json").write_text(text)
    path = configured(tmp_path, {"m": {**LLAMA, "placement": "lanes"}}, inventory="gpus.json")
    assert plan_of(path)["lanes"] == plan["lanes"]
    two_t4s.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus_said().startswith("no GPU may be used: lanes are on the CPU")


def test_the_command_shows_lost_gpus_and_hidden_slices(told: pytest.MonkeyPatch) -> None:
    """It ends if the driver fails altogether."""
    told.setenv("STAND_IN_LOST", "2")
    told.setenv("CUDA_VISIBLE_DEVICES", f"0,{SLICES[0]}")
    text = gpus_said()
    assert "GPU 2: lost: GPU is lost" in text
    assert f"GPU 1 ({SLICES[1]}, NVIDIA A100-SXM4-80GB MIG 1g.10gb+me): hidden by CUDA_VISIBLE_DEVICES=0,MIG" in text
    told.setenv("STAND_IN_INIT", "18")
    done = CliRunner().invoke(app, ["gpus"])
    assert isinstance(done.exception, DevicesUnreadable)


@pytest.mark.parametrize(
    "environment", [{"CUDA_VISIBLE_DEVICES": "3"}, {"STAND_IN_TOTAL_0": "2", "CUDA_VISIBLE_DEVICES": "2"}]
)
def test_unreported_memory_is_shown_as_unknown(
    tmp_path: Path, told: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """Models on such a device are not checked against its memory, and vLLM engines take fixed parts of it."""
    for name, value in environment.items():
        told.setenv(name, value)
    path = configured(tmp_path, {"m": {**VLLM, "placement": "lanes"}})
    uuid = {"3": GB10, "2": T4}[environment["CUDA_VISIBLE_DEVICES"]]
    assert f"{uuid}: ? of ? taken" in gpus_said("--config", str(path))
    assert plan_of(path)["lanes"][0]["memory_mib"] is None
    specs = worker_specs(load_config(path), tmp_path, tmp_path)
    assert [spec.args["gpu_memory_utilization"] for spec in specs] == [0.47, 0.47]  # two engines share it all the same

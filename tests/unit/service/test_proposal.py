"""The configuration proposed for a machine and a model, and where a command finds its configuration."""

from pathlib import Path
from typing import cast

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from service.cli.app import app
from service.cli.commands import first_steps
from service.config.load import build_config
from service.config.proposal import (
    LEAST_CONTEXT,
    SMALL_MEMORY,
    Means,
    NamedModel,
    configuration_text,
    job_text,
    propose,
)
from service.errors import ConfigError
from service.run import read_job_file
from workers.devices.device import Gpu
from workers.files.model_memory import ModelMemory

SMALL = NamedModel(reference="roundhouse:small", is_gguf=True, memory=SMALL_MEMORY)
FILE = NamedModel(
    reference="/m/Some 8B_Q4.gguf", is_gguf=True, memory=ModelMemory(weights_mib=5000, token_bytes=131_072)
)
CHECKPOINT = NamedModel(reference="/m/Some-8B", is_gguf=False, memory=ModelMemory(weights_mib=16_000, token_bytes=None))
GPU = Gpu(index=0, uuid="GPU-1", name="NVIDIA H100", memory_mib=81_559)
CARD = Gpu(index=0, uuid="GPU-2", name="NVIDIA RTX 3060", memory_mib=12_288)


def means(*programs: str, gpus: tuple[Gpu, ...] = (), cores: int = 8, memory_mib: int = 32_000) -> Means:
    return Means(gpus=gpus, cores=cores, memory_mib=memory_mib, programs=frozenset(programs))


@pytest.mark.parametrize(
    ("model", "machine", "proposed"),
    [
        (SMALL, means("embedded"), ("embedded", 4, 4096, None)),
        (SMALL, means("embedded", cores=1), ("embedded", 2, 4096, None)),
        (SMALL, means("embedded", "llama-server"), ("embedded", 4, 4096, None)),
        (SMALL, means("llama-server"), ("llama-server", 4, 4096, None)),
        (FILE, means("embedded", "llama-server", gpus=(GPU,)), ("llama-server", 8, 8192, None)),
        (FILE, means("embedded", gpus=(GPU,)), ("embedded", 4, 4096, None)),
        (FILE, means("llama-server", gpus=(CARD, CARD)), ("llama-server", 8, 4096, 2)),
        (FILE, means("embedded", memory_mib=8000), ("embedded", 4, 2048, None)),
        (CHECKPOINT, means("vllm", "embedded", gpus=(GPU, GPU)), ("vllm", 32, None, 2)),
    ],
)
def test_engine_slots_and_context_fit_the_machine(
    model: NamedModel, machine: Means, proposed: tuple[str, int, int | None, int | None]
) -> None:
    """A GPU is used if an engine can use it; the context shrinks until all slots fit in memory."""
    lines = {line.key: line.value for line in propose(model, machine)}
    assert tuple(lines.get(key) for key in ("engine", "slots", "context", "replicas")) == proposed


@pytest.mark.parametrize(
    ("model", "gpu_mib", "proposed"),
    [
        (FILE, 81_559, (8, 32_768)),
        (FILE, 40_960, (4, 32_768)),
        (FILE, 24_576, (2, 32_768)),
        (FILE, 12_288, (1, 32_768)),
        (NamedModel(reference="hf:o/r", is_gguf=True), 24_576, (2, 32_768)),
    ],
)
def test_a_requested_context_takes_slots_first(model: NamedModel, gpu_mib: int, proposed: tuple[int, int]) -> None:
    """An agent that reads much cannot start with less, however many slots there are. Its answers are not shortened."""
    card = Gpu(index=0, uuid="GPU-3", name="card", memory_mib=gpu_mib)
    machine = msgspec.structs.replace(means("llama-server", gpus=(card,)), context=32_768)
    lines = {line.key: line.value for line in propose(model, machine)}
    assert (lines["slots"], lines["context"]) == proposed
    assert "max_tokens" not in cast("dict[str, object]", lines.get("params", {}))


def test_the_small_model_keeps_the_settings_an_agent_needs() -> None:
    """All but the bound of its answers."""
    machine = msgspec.structs.replace(means("embedded"), context=32_768)
    lines = {line.key: line.value for line in propose(SMALL, machine)}
    assert lines["params"] == {"temperature": 0.3, "repeat_penalty": 1.15}


@pytest.mark.parametrize(
    ("model", "machine", "because"),
    [
        (FILE, means(), "no llama-server is on the path"),
        (CHECKPOINT, means("embedded", "llama-server"), "this model needs vllm, which is not on the path"),
        (FILE, means("embedded", memory_mib=4000), f"it needs 5512 MiB with 4 slots of {LEAST_CONTEXT} tokens"),
        (CHECKPOINT, means("vllm", gpus=(CARD,)), "it needs 16000 MiB"),
    ],
)
def test_a_model_that_cannot_be_served_here_is_reported(model: NamedModel, machine: Means, because: str) -> None:
    """Before anything is fetched or started."""
    with pytest.raises(ConfigError, match=because):
        propose(model, machine)


@pytest.mark.parametrize("model", [SMALL, FILE, CHECKPOINT])
def test_the_text_is_a_configuration_with_a_reason_in_each_line(model: NamedModel, tmp_path: Path) -> None:
    """It reads as what was proposed, and the job speaks with that model."""
    machine = means("vllm", "llama-server", gpus=(GPU,))
    text = configuration_text(model, machine, tmp_path / "state")
    config = build_config(yaml.safe_load(text), {}, "here", {})
    (name,) = config.models
    assert name == model.name
    assert {line.key: line.value for line in propose(model, machine)}.items() <= config.models[
        name
    ].model_dump().items()
    assert config.server.state_dir == tmp_path / "state"
    assert all("  # " in line for line in text.splitlines()[2:] if line != "server:")
    file = read_job_file("job.yaml", job_text(model), config)
    assert file.job.models == (name,)


def test_a_model_gets_a_name_that_a_job_can_write() -> None:
    """Lower case, without the file's extension; a name without letters becomes "model"."""
    names = [
        NamedModel(reference=each, is_gguf=True).name for each in ("/m/Some 8B_Q4.gguf", "roundhouse:tiny", "/m/ß.gguf")
    ]
    assert names == ["some-8b-q4", "tiny", "model"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "users"))
    monkeypatch.delenv("ROUNDHOUSE_CONFIG", raising=False)
    return tmp_path


def test_init_writes_two_files_once(here: Path) -> None:
    """They work unchanged, and an existing file is left alone."""
    done = CliRunner().invoke(app, ["init", "--dir", "new"])
    assert done.exit_code == 0, done.output
    assert sorted(each.name for each in (here / "new").iterdir()) == ["job.yaml", "roundhouse.yaml"]
    assert "next: cd new && roundhouse run job.yaml" in done.output
    checked = CliRunner().invoke(app, ["check", "--config", "new/roundhouse.yaml"])
    assert (checked.exit_code, yaml.safe_load(checked.stdout)["models"]["small"]["slots"] >= 2) == (0, True)
    (here / "new" / "roundhouse.yaml").unlink()
    (here / "new" / "job.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        first_steps.write_files("roundhouse:small", here / "new")
    assert [(each.name, each.read_text()) for each in (here / "new").iterdir()] == [("job.yaml", "mine")]


def test_a_command_takes_the_configuration_of_this_folder_or_makes_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which. A new one lies below the user's folders, and so does its state."""
    with pytest.raises(ConfigError, match="write one with roundhouse init"):
        first_steps.config_path(None, None)
    (here / "roundhouse.yaml").write_text("models: {}\n")
    assert first_steps.config_path(None, None) == Path("roundhouse.yaml")
    assert capsys.readouterr().err == "configuration: roundhouse.yaml\n"
    assert first_steps.config_path(Path("other.yaml"), None) == Path("other.yaml")
    made = first_steps.config_path(None, "roundhouse:tiny")
    assert made == here / "users" / "roundhouse" / "tiny" / "roundhouse.yaml"
    shown = CliRunner().invoke(app, ["check", "--model", "roundhouse:tiny"])
    assert yaml.safe_load(shown.stdout)["server"]["state_dir"] == str(made.parent / "state")
    with pytest.raises(ConfigError, match="give one of them"):
        first_steps.config_path(Path("other.yaml"), "roundhouse:tiny")
    with pytest.raises(ConfigError, match="no such model; give roundhouse:small, roundhouse:tiny, a GGUF file"):
        first_steps.config_path(None, "nothing.gguf")


def test_with_a_model_option_all_agents_of_a_job_use_it() -> None:
    """A job file from elsewhere names models that are not here."""
    config = build_config(yaml.safe_load(configuration_text(SMALL, means("embedded"))), {}, "here", {})
    text = job_text(NamedModel(reference="/m/other.gguf", is_gguf=True))
    with pytest.raises(ConfigError, match="other"):
        read_job_file("job.yaml", text, config)
    assert read_job_file("job.yaml", text, config, "small").job.models == ("small",)

"""What documents promise is what the code does: every list in them is checked against its source."""

import re
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

import workers
from service.cli.app import app as command_line
from service.config.load import load_config
from service.config.schema import Config, ModelConfig
from service.config.workers import worker_specs
from service.conversations.limits import Limits
from service.errors import ServiceError
from service.formats.documents import parse_document
from service.run import read_job_file
from service.scheduling.core.policies import POLICIES
from transport import errors as transport_errors
from transport.errors import EngineError
from workers.outcome import FailureReason

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def leaves(base: type[Exception]) -> list[type[Exception]]:
    return [base] if not base.__subclasses__() else [leaf for each in base.__subclasses__() for leaf in leaves(each)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_every_error_of_the_service_has_a_status_a_code_and_a_place_in_the_readme() -> None:
    """The producer carries the whole answer; callers find every code documented."""
    codes = [leaf.code for leaf in leaves(ServiceError) if issubclass(leaf, ServiceError)]
    assert len(codes) == len(set(codes))
    for leaf in leaves(ServiceError):
        assert issubclass(leaf, ServiceError)
        assert 400 <= leaf.status < 600
        assert leaf.title != ServiceError.title
        assert f"`{leaf.code}`" in README


def test_the_tree_of_engine_errors_is_drawn_whole() -> None:
    """A tree that is drawn must be the tree that is there."""
    for leaf in leaves(EngineError):
        assert leaf.__name__ in (transport_errors.__doc__ or "")


def test_every_reason_of_failure_is_in_the_readme() -> None:
    """One word each, the same everywhere."""
    for reason in FailureReason:
        assert f"`{reason}`" in README


def test_every_command_is_in_the_readme() -> None:
    """The table of commands is the command line."""
    table = README.split("## Commands")[1].split("##")[0]
    for command in typer.main.get_command(command_line).commands:  # type: ignore[attr-defined]
        assert re.search(rf"`{command}\b", table), command


def test_the_example_configuration_is_every_default() -> None:
    """deploy/roundhouse.yaml shows every key, and its value is the one that the code has."""
    shown, _ = parse_document((ROOT / "deploy" / "roundhouse.yaml").read_text(), "example")
    effective = load_config(ROOT / "deploy" / "roundhouse.yaml")
    least = Config.model_validate({"models": {"tiny": {"engine": "embedded"}}})
    assert effective == least
    assert isinstance(shown, dict)

    def check(model: BaseModel, written: object, path: str) -> None:
        assert isinstance(written, dict)
        for name in type(model).model_fields:
            assert name in written, f"{path}.{name} is not shown"
            value = getattr(model, name)
            if isinstance(value, BaseModel):
                check(value, written[name], f"{path}.{name}")

    check(effective, shown, "")
    check(effective.models["tiny"], shown["models"]["tiny"], "models.tiny")
    assert isinstance(effective.models["tiny"], ModelConfig)
    for policy in POLICIES:
        assert policy in (ROOT / "deploy" / "roundhouse.yaml").read_text()
        assert f"`{policy}`" in README
    assert all(field.description for field in Limits.model_fields.values())


def test_the_readmes_examples_are_valid(tmp_path: Path) -> None:
    """A user who copies them gets what they say."""
    config, job, tools = blocks("yaml")
    (tmp_path / "roundhouse.yaml").write_text(config)
    loaded = load_config(tmp_path / "roundhouse.yaml")
    file = read_job_file("job.yaml", job, loaded)
    assert (file.job.name, file.job.total_turns) == ("debate", 18)
    (tmp_path / "my_tools.py").write_text("def now(zone: str) -> object: return zone\n")
    (tmp_path / "tools.yaml").write_text(tools)
    spec = worker_specs(load_config(tmp_path / "tools.yaml"), tmp_path, tmp_path)[0]
    assert spec.tool_runner is not None
    assert spec.tool_runner.knows("now")
    for code in blocks("python"):
        assert set(re.findall(r"\b[A-Z]\w+\b", code.split("\n")[1])) <= set(workers.__all__)


@pytest.mark.parametrize("name", ["compose.yaml", "compose.nodes.yaml", "roundhouse.yaml"])
def test_deployment_files_are_yaml(name: str) -> None:
    """What cannot be run here can at least be read."""
    assert yaml.safe_load((ROOT / "deploy" / name).read_text())


def test_the_nodes_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """What compose.nodes.yaml gives each node is a configuration of a shared store."""
    monkeypatch.setenv("POSTGRES_PASSWORD", "word")
    loaded = load_config(ROOT / "deploy" / "roundhouse.nodes.yaml")
    assert loaded.store.url == "postgresql://roundhouse:word@postgres/roundhouse"
    nodes = yaml.safe_load((ROOT / "deploy" / "compose.nodes.yaml").read_text())["services"]
    assert sorted(nodes) == ["node-1", "node-2", "node-3", "postgres"]


def test_files_that_are_named_are_there() -> None:
    """No link leads nowhere."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target

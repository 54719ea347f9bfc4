"""Pages are correct: promises name existing tests, README and how-to pages have valid examples."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

import workers
from service.cli.commands.first_steps import write_passing
from service.config.load import load_config
from service.config.model import ModelConfig
from service.config.schema import Config
from service.config.workers import SMALL, worker_specs
from service.conversations.document.limits import Limits
from service.formats.documents import parse_document
from service.run import read_job_file
from service.scheduling.core.policies import POLICIES
from tests.documents.pages import ROOT, names, section
from transport import errors as transport_errors
from transport.errors import EngineError

README = ROOT / "README.md"
PROMISES = ROOT / "docs" / "promises.md"
MOST_LINES = 150


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    machines = {name for each in tree.body if isinstance(each, ast.Assign) for name in map(ast.unparse, each.targets)}
    return functions | machines


def test_every_promise_names_existing_tests() -> None:
    """A promise without a test is a hope."""
    promised = re.findall(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`", PROMISES.read_text(encoding="utf-8"))
    assert len(promised) > 60
    assert [f"{file}::{name}" for file, name in promised if name not in functions_of(file)] == []


def test_the_readme_is_short() -> None:
    """It says what this is and where to read on; all else has a page of its own."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_every_command_is_in_the_readme() -> None:
    """The table of commands is the command line."""
    listed = {each.split()[0] for each in names(section(README, "Commands"))}
    page = ROOT / "docs" / "reference" / "commands.md"
    headings = re.findall(r"^## `roundhouse ([\w-]+)`$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == set(headings)


def test_the_readmes_examples_are_valid(tmp_path: Path) -> None:
    """A user who copies them gets what they promise; tests/system runs them as they are."""
    (job,) = blocks(README, "yaml")
    loaded = load_config(write_passing(SMALL, tmp_path))
    file = read_job_file("debate.yaml", job, loaded)
    assert (file.job.name, file.job.total_turns) == ("debate", 18)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_every_block_can_be_read(page: Path) -> None:
    """YAML and Python blocks of every page parse, and names imported from us exist."""
    for text in blocks(page, "yaml"):
        parse_document(text, page.name)
    for text in blocks(page, "python"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "workers":
                assert {each.name for each in node.names} <= set(workers.__all__)


def test_the_tools_of_the_how_to_page_are_found(tmp_path: Path) -> None:
    """Python callables are looked up beside the configuration."""
    (tmp_path / "my_tools.py").write_text("def now(zone: str) -> object: return zone\n")
    tools = {"models": {"tiny": {"engine": "embedded", "tools": {"python": {"now": "my_tools:now"}}}}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump(tools))
    spec = worker_specs(load_config(tmp_path / "tools.yaml"), tmp_path, tmp_path)[0]
    assert spec.tool_runner is not None
    assert spec.tool_runner.knows("now")


def test_the_tree_of_engine_errors_is_drawn_whole() -> None:
    """The drawing must match the classes."""

    def leaves(base: type[Exception]) -> list[type[Exception]]:
        below = base.__subclasses__()
        return [leaf for each in below for leaf in leaves(each)] if below else [base]

    for leaf in leaves(EngineError):
        assert leaf.__name__ in (transport_errors.__doc__ or "")


def test_the_example_configuration_has_every_default() -> None:
    """deploy/roundhouse.yaml shows every key with the value that the code has."""
    example = ROOT / "deploy" / "roundhouse.yaml"
    shown, _ = parse_document(example.read_text(), "example")
    effective = load_config(example)
    assert effective == Config.model_validate({"models": {"tiny": {"engine": "embedded"}}})
    told = effective.model_dump(mode="json", exclude={"models"})

    def check(value: object, written: object, path: str) -> None:
        if isinstance(value, dict) and value:
            assert isinstance(written, dict)
            assert value.keys() == written.keys(), path
            for name, inner in value.items():
                check(inner, written[name], f"{path}.{name}")

    assert isinstance(shown, dict)
    check(told, {name: shown[name] for name in told}, "")
    tiny = effective.models["tiny"]
    assert isinstance(tiny, ModelConfig)
    check(tiny.model_dump(mode="json"), shown["models"]["tiny"], "models.tiny")
    for policy in POLICIES:
        assert policy in example.read_text()
    assert all(field.description for field in Limits.model_fields.values())


@pytest.mark.parametrize("name", ["compose.yaml", "compose.nodes.yaml", "roundhouse.yaml"])
def test_deployment_files_are_yaml(name: str) -> None:
    """Files that cannot be run here can at least be parsed."""
    assert yaml.safe_load((ROOT / "deploy" / name).read_text())


def test_the_nodes_configuration_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """compose.nodes.yaml gives each node a configuration with a shared store."""
    monkeypatch.setenv("POSTGRES_PASSWORD", "word")
    loaded = load_config(ROOT / "deploy" / "roundhouse.nodes.yaml")
    assert loaded.store.url == "postgresql://roundhouse:word@postgres/roundhouse"
    nodes = yaml.safe_load((ROOT / "deploy" / "compose.nodes.yaml").read_text())["services"]
    assert sorted(nodes) == ["node-1", "node-2", "node-3", "postgres"]

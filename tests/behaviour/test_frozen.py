"""The surface stays as it is: HTTP, metrics and commands, each beside a frozen file.

A frozen file changes only in a commit of its own, which names the sentence of the specification that it corrects:
``RENEW_FROZEN=1 pytest tests/behaviour/test_frozen.py`` writes the files.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from service.cli.app import app as command_line
from tests.harness.frozen import frozen_text
from tests.harness.service import Service, scripted_model, serving

WORDS = {"description", "summary", "version"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("frozen")
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        yield running


def without_words(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a schema without the texts for people; a property may have the name of such a text."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in WORDS or not isinstance(each, str)}
        return {key: without_words(each) for key, each in kept.items()}
    return [without_words(each) for each in value] if isinstance(value, list) else value


def test_the_description_of_http_is_frozen(service: Service) -> None:
    """Paths, parameters, bodies and answers; descriptions may be improved."""
    described = without_words(service.get("/openapi.json"))
    told = {"paths": described["paths"], **described["components"]}
    lines = (
        f"{part} {name} {json.dumps(each, sort_keys=True)}\n" for part, of in told.items() for name, each in of.items()
    )
    now = "".join(sorted(lines))
    assert now == frozen_text("openapi.txt", now)


def test_names_and_labels_of_metrics_are_frozen(service: Service) -> None:
    """Boards and alerts of users name them."""
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    lines = [
        f"{family.name} {family.type} {sorted({label for each in family.samples for label in each.labels} - {'le'})}"
        for family in families
    ]
    now = "\n".join(sorted(lines)) + "\n"
    assert now == frozen_text("metrics.txt", now)


def test_the_help_of_commands_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of users have these options."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 120)  # read at its import, perhaps by an earlier test
    monkeypatch.setenv("NO_COLOR", "1")
    group = typer.main.get_command(command_line)
    context = typer.Context(group, **group.context_settings)
    assert isinstance(group, typer.core.TyperGroup)
    texts = []
    for name in ["", *group.list_commands(context)]:
        ran = CliRunner().invoke(command_line, [*name.split(), "--help"])
        assert ran.exit_code == 0
        texts.append(f"roundhouse {name}\n{ran.output}")
    now = "\n".join(line.rstrip() for line in "\n".join(texts).splitlines()) + "\n"
    assert now == frozen_text("help.txt", now)

"""What a person is told before anything runs: of a fetch, and of how the command is typed."""

import sys

import pytest

from service.cli.commands.engine_commands import _own_command
from service.cli.displays.fetch_display import FetchBars


def test_a_fetch_is_told_once_where_no_bar_can_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe is not silent for the ten seconds that a model takes."""
    with FetchBars() as bars:
        for there in (0, 50_000_000, 93_000_000):
            bars.in_any_case()("small.gguf", there, 93_000_000)
        bars.in_any_case()("[other]", 0, None)
    assert capsys.readouterr().err == "fetching small.gguf, 93 MB\nfetching [other]\n"


def test_the_command_is_told_as_it_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What uvx runs is on no path when it has ended."""
    monkeypatch.setattr(sys, "prefix", "/opt/venv")
    assert _own_command() == "roundhouse"
    monkeypatch.setattr(sys, "prefix", "/u/.cache/uv/archive-v0/Wv0SPvZV")
    assert _own_command() == "uvx --from roundhouse-llm roundhouse"

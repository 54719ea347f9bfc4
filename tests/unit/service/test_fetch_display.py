"""Messages before anything runs: about a fetch, and about how to type the command."""

import sys

import pytest

from service.cli.commands.engine_commands import _own_command
from service.cli.displays.fetch_display import FetchBars


def test_a_fetch_is_announced_once_where_no_bar_can_be_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """Output to a pipe is not silent for the ten seconds of a download."""
    with FetchBars() as bars:
        for there in (0, 50_000_000, 93_000_000):
            bars.in_any_case()("small.gguf", there, 93_000_000)
        bars.in_any_case()("[other]", 0, None)
    assert capsys.readouterr().err == "fetching small.gguf, 93 MB\nfetching [other]\n"


def test_the_command_is_shown_as_it_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program run by uvx is not on the search path afterwards."""
    monkeypatch.setattr(sys, "prefix", "/opt/venv")
    assert _own_command() == "roundhouse"
    monkeypatch.setattr(sys, "prefix", "/u/.cache/uv/archive-v0/Wv0SPvZV")
    assert _own_command() == "uvx --from roundhouse-llm roundhouse"

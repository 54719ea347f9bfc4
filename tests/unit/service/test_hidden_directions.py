"""Characters that change a line's direction: a terminal shows a model's words in their true order."""

import io
import logging

import pytest
from rich.console import Console

from service.cli.displays.console import plain, print_transcript
from service.telemetry.logs import PeopleFormatter

TURNING = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]


@pytest.mark.parametrize("code", TURNING, ids=hex)
def test_no_character_that_turns_a_line_reaches_a_terminal(code: int) -> None:
    """A file's name, or a command to be repeated, would be read as another one."""
    assert plain(f"a{chr(code)}b") == "a\N{REPLACEMENT CHARACTER}b"
    shown = io.StringIO()
    turn = {"round": 0, "agent": f"a{chr(code)}", "state": "failed", "text": chr(code), "detail": chr(code)}
    document = {"id": f"c{chr(code)}", "state": "failed", "reason": chr(code), "turns": [turn]}
    print_transcript(Console(file=shown, emoji=False), f"job{chr(code)}", document)
    assert chr(code) not in shown.getvalue()


@pytest.mark.parametrize("code", TURNING, ids=hex)
def test_no_character_that_turns_a_line_is_in_the_log_for_people(code: int) -> None:
    """An engine's refusal may repeat what a client has sent."""
    record = logging.LogRecord("a", logging.INFO, "", 0, "engine says a%sb", (chr(code),), None)
    assert chr(code) not in PeopleFormatter().format(record)


@pytest.mark.parametrize("text", ["שלום", "مرحبا", "a\tb\nc", "é", "a\u200db", "\N{RIGHT-TO-LEFT MARK}"])
def test_writing_in_any_direction_stays_as_it_is(text: str) -> None:
    """Letters have their own direction; marks and joiners affect only their own text."""
    assert plain(text) == text

"""MCP servers over an exec: the same process, the same session, and no request number twice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.programs import PROGRAMS
from tests.harness.waiting import is_alive

COUNTER = [sys.executable, "-I", "-S", str(PROGRAMS / "mcp_counter.py")]
OF_SDK = [sys.executable, str(PROGRAMS / "mcp_server.py"), "stdio"]
ROOT = Path(__file__).parents[2]


class Lives:
    """What the two programs saw of one server."""

    def __init__(self, scenario: str, folder: Path, command: list[str]) -> None:
        program = [sys.executable, "-m", "tests.harness.programs.mcp_upgrade", scenario, str(folder), *command]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        self.log = done.stderr
        self.first, self.second = map(json.loads, done.stdout.splitlines())
        record = folder / "record"
        self.record: list[dict[str, Any]] = (
            [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        )

    @property
    def methods(self) -> list[str]:
        return [each["method"] for each in self.record]

    def check_numbers(self) -> None:
        """Every request has its own number, each higher than the last."""
        numbers = [each["id"] for each in self.record if "id" in each]
        assert numbers == sorted(set(numbers))


@pytest.mark.system
def test_the_session_goes_on_in_the_next_program(tmp_path: Path) -> None:
    """One process and one count; the next program knows the tools, and negotiates nothing."""
    lives = Lives("counts", tmp_path, [*COUNTER, str(tmp_path)])
    seen = lives.first["seen"] + lives.second["seen"]
    assert [each["count"] for each in seen] == [1, 2, 3, 4]
    assert len({each["pid"] for each in seen}) == 1
    assert (lives.first["tools"], lives.second["tools"], lives.second["trouble"]) == (3, 3, None)
    assert lives.methods.count("initialize") == lives.methods.count("notifications/initialized") == 1
    assert lives.methods.count("server/discover") == 1
    assert lives.methods.count("tools/list") == 2  # the second program's own
    lives.check_numbers()
    assert not is_alive(seen[0]["pid"])


@pytest.mark.system
def test_a_late_answer_to_the_earlier_program_answers_no_call_of_the_next(tmp_path: Path) -> None:
    """The call is cut off, and answered when calls of the next program wait: each of them gets its own answer."""
    lives = Lives("late", tmp_path, [*COUNTER, str(tmp_path)])
    assert lives.second["seen"] == [{"n": number} for number in range(8)]
    lives.check_numbers()
    late = [each for each in lives.record if each.get("params", {}).get("name") == "late"]
    cut_off = [each["id"] for each in late if each["params"]["arguments"]["n"] < 0]
    cancelled = [each["params"]["requestId"] for each in lives.record if each["method"] == "notifications/cancelled"]
    assert len(cut_off) == 2
    assert cancelled == cut_off  # by each program its own, as the server knows them
    assert "an answer came too late" in lives.log


@pytest.mark.system
def test_a_line_that_was_read_or_written_in_part_is_completed(tmp_path: Path) -> None:
    """On both outputs, and to a server that does not read for a while: neither side takes a line for noise."""
    lives = Lives("halves", tmp_path, [*COUNTER, str(tmp_path)])
    assert [each["count"] for each in lives.second["seen"]] == [5, 6]
    assert "kept says: a word in two halves" in lives.log
    assert "this is not a message" not in lives.log


@pytest.mark.system
def test_an_unreadable_session_is_started_again(tmp_path: Path) -> None:
    """The server is ended as usual, and the log gives the reason."""
    lives = Lives("broken", tmp_path, [*COUNTER, str(tmp_path)])
    assert [each["count"] for each in lives.second["seen"]] == [1, 2]
    before, after = lives.first["seen"][0]["pid"], lives.second["seen"][0]["pid"]
    assert before != after
    assert not is_alive(before)
    assert lives.methods.count("initialize") == 2
    assert "MCP server kept: it is ended and started again: " in lives.log


@pytest.mark.system
def test_a_session_of_the_newest_revision_goes_on(tmp_path: Path) -> None:
    """It is negotiated by discovery; the server is one of the SDK's, and is asked for its new tools."""
    lives = Lives("pids", tmp_path, OF_SDK)
    assert lives.first["seen"] == lives.second["seen"]
    assert (lives.first["tools"], lives.second["tools"]) == (7, 8)
    assert not is_alive(lives.first["seen"]["result"])

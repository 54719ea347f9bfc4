"""The text of a chat on a terminal, and the cases without a question."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.service import ROUNDHOUSE, Document, Service, recorded, run_command, scripted_model, serving
from tests.harness.terminal import END, Terminal


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("chat")
    flags: Document = {"record": str(folder / "record.jsonl"), "tokens": 40}
    with serving(folder, free_ports(1), {"m": scripted_model(free_ports(1), **flags)}) as running:
        yield running


@pytest.fixture
def terminal(service: Service, tmp_path: Path) -> Iterator[Terminal]:
    """A terminal of 30 columns, like a narrow window."""
    command = ["sh", "-c", f"stty cols 30; exec {ROUNDHOUSE} chat --url {service.url}"]
    with Terminal(command, tmp_path, XDG_STATE_HOME=str(tmp_path), COLUMNS="30") as seen:
        seen.wait_for("/help")
        yield seen


def test_words_are_not_split_at_the_edge(terminal: Terminal) -> None:
    """A terminal would break a line inside a word; a chat breaks it before the word."""
    terminal.type("Hello\n")
    terminal.wait_for("word39")
    shown = terminal.text[terminal.text.index("word0") :].replace("\r", "")
    answer = shown[: shown.index("word39") + len("word39")]
    lines = answer.split("\n")
    assert all(len(line) <= 30 for line in lines), lines
    assert [word for line in lines for word in line.split()] == [f"word{number}" for number in range(40)]


def test_retry_is_another_name_of_again(service: Service, terminal: Terminal) -> None:
    """Other chat programs use that name."""
    terminal.type("Hello\n")
    terminal.wait_for("word39")
    terminal.wait_for("m-0")
    asked = len(recorded(service.folder / "record.jsonl"))
    terminal.type("/retry\n")
    terminal.wait_for("word39")
    terminal.wait_for("m-0")
    last, before = (recorded(service.folder / "record.jsonl")[-number] for number in (1, 2))
    assert (len(recorded(service.folder / "record.jsonl")), last["messages"]) == (asked + 1, before["messages"])
    terminal.type("/help\n")
    terminal.wait_for("/retry")
    terminal.type(END)


@pytest.mark.parametrize("stdin", ["", "\n", " \n\t\n"])
def test_an_empty_pipe_asks_nothing(service: Service, stdin: str) -> None:
    """``chat < /dev/null``: an answer to nothing costs tokens, and a script that lost its text would go on with it."""
    record = service.folder / "record.jsonl"
    asked = len(recorded(record))
    done = run_command("chat", "--url", service.url, stdin=stdin)
    assert (done.returncode, done.stdout, len(recorded(record))) == (2, "", asked), done
    assert "nothing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.system
def test_an_empty_question_starts_no_service(tmp_path: Path) -> None:
    """The text is read first: otherwise a model would be fetched and loaded for nothing."""
    environment = {"XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = run_command("chat", "roundhouse:tiny", folder=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert not (tmp_path / "roundhouse").exists()

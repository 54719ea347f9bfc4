"""A chat in the terminal: answers in the service's queue, commands, and a service of its own that ends with it."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from service.cli.commands.chat import MOST_INPUT
from tests.harness.service import (
    ROUNDHOUSE,
    Document,
    Service,
    recorded,
    run_command,
    scripted_model,
    serving,
)
from tests.harness.terminal import END, INTERRUPT, Terminal
from tests.harness.waiting import is_alive, wait_for

HOLD = r"HOLD:(\S+) SAY:\w+\"}\]$"  # matches the last message alone
ECHO = r"SAY:(\w+)\"}\]$"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("chat")
    flags: Document = {
        "record": str(folder / "record.jsonl"),
        "echo": ECHO,
        "hold": HOLD,
        "reject": 400,
        "reject_on": "SAY:rejected",
    }
    models = {name: scripted_model(free_ports(1), slots=1, **flags) for name in ("m", "n")}
    with serving(folder, free_ports(1), models, {"heartbeat_s": 0.2}) as running:
        yield running


@pytest.fixture
def terminal(service: Service, tmp_path: Path) -> Iterator[Terminal]:
    command = [ROUNDHOUSE, "chat", "--url", service.url, "--system", "You are MARK-x."]
    with Terminal(command, tmp_path, XDG_STATE_HOME=str(tmp_path / "users")) as seen:
        seen.wait_for("/help shows the commands")
        yield seen


def messages(service: Service) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in recorded(service.folder / "record.jsonl")[-1]["messages"]]


def test_a_chat_goes_on_and_its_answers_show_their_cost(service: Service, terminal: Terminal, tmp_path: Path) -> None:
    """Each question is sent with all earlier ones; commands change the next."""
    terminal.type("SAY:one\n")
    terminal.wait_for("waited 0.0 s · m-0")
    terminal.type("/set temperature 0.25\n")
    terminal.type("two \\\n")
    terminal.type("SAY:lines\n")
    terminal.wait_for("lines")
    terminal.wait_for("m-0")
    assert messages(service) == [
        ("system", "You are MARK-x."),
        ("user", "SAY:one"),
        ("assistant", "one "),
        ("user", "two \nSAY:lines"),
    ]
    assert recorded(service.folder / "record.jsonl")[-1]["temperature"] == 0.25
    for command in ("/model nobody", "/nothing", "/set", "/model"):
        terminal.type(f"{command}\n")
    for told in ("nobody: no such model", "/nothing: no such command", "temperature 0.25", "* m, 4096 tokens"):
        terminal.wait_for(told)
    for command in ("/model n", "/system -", "/set temperature -", "/again"):
        terminal.type(f"{command}\n")
    terminal.wait_for("n-0")
    assert messages(service) == [("user", "SAY:one"), ("assistant", "one "), ("user", "two \nSAY:lines")]
    assert "temperature" not in recorded(service.folder / "record.jsonl")[-1]
    terminal.type("/clear\n/again\n")
    terminal.wait_for("nothing was asked")
    terminal.type(END)
    assert terminal.wait_ended() == 0
    history = tmp_path / "users" / "roundhouse" / "chat_history"
    assert (history.stat().st_mode & 0o777, "SAY:one" in history.read_text()) == (0o600, True)


def test_ctrl_c_ends_an_answer_and_frees_its_slot(service: Service, terminal: Terminal, tmp_path: Path) -> None:
    """The chat goes on, and the slot is free for another request at once."""
    terminal.type(f"HOLD:{tmp_path / 'never'} SAY:never\n")
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 1, "it is answered")
    terminal.type(INTERRUPT)
    wait_for(lambda: service.get("/v1/workers/m-0")["slots"]["in_use"] == 0, "its slot is free")
    terminal.type("SAY:next\n")
    terminal.wait_for("waited")
    assert messages(service)[-3:] == [
        ("user", f"HOLD:{tmp_path / 'never'} SAY:never"),
        ("assistant", ""),
        ("user", "SAY:next"),
    ]
    terminal.type(INTERRUPT)
    terminal.wait_for("Ctrl-D leaves")
    terminal.type("/quit\n")
    assert terminal.wait_ended() == 0


def test_a_refused_answer_leaves_the_chat_as_it_was(service: Service, terminal: Terminal) -> None:
    """The engine's words are shown, and the question can be asked in other words."""
    terminal.type("/set n 0\nSAY:refused\n")
    terminal.wait_for("no answer: ")
    terminal.type("/set n -\nSAY:taken\n")
    terminal.wait_for("waited")
    assert messages(service) == [("system", "You are MARK-x."), ("user", "SAY:taken")]


@pytest.mark.system
def test_piped_text_is_asked_once(service: Service) -> None:
    """For scripts: the cause of the wait is shown even after the headers have gone out."""
    done = run_command("chat", "n", "--url", service.url, stdin="SAY:piped")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "piped ")
    unknown = run_command("chat", "nobody", "--url", service.url, stdin="SAY:piped")
    assert (unknown.returncode, "it has m, n" in unknown.stderr) == (2, True)
    refused = run_command("chat", "m", "--url", service.url, stdin="SAY:rejected")
    assert (refused.returncode, "Traceback" in refused.stderr) == (3, False)
    long = run_command("chat", "--url", service.url, stdin="x" * (MOST_INPUT + 1))
    assert (long.returncode, "the piped text is longer" in long.stderr) == (2, True)
    away = run_command("chat", "--url", "http://127.0.0.1:9", stdin="SAY:piped")
    assert (away.returncode, "no service at http://127.0.0.1:9" in away.stderr) == (3, True)


def test_a_running_service_is_found_by_the_configuration_of_this_folder(service: Service) -> None:
    """Nothing is started then, and the service is still there afterwards."""
    done = run_command("chat", folder=service.folder, stdin="SAY:found")
    assert done.stdout.splitlines()[0] == "found "
    assert service.get("/healthz") == {"status": "ok"}


@pytest.mark.system
def test_a_service_of_its_own_ends_with_the_chat(tmp_path: Path) -> None:
    """The real engine answers; however the chat ends, no process of it is left."""
    environment = {"XDG_STATE_HOME": str(tmp_path / "users"), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    done = run_command("chat", "roundhouse:tiny", folder=tmp_path, stdin="Hello", **environment)
    assert done.returncode == 0, done.stderr
    assert "tokens in" in done.stdout
    assert "tiny-0" in done.stdout
    assert not list(tmp_path.glob("roundhouse-*"))
    with Terminal([ROUNDHOUSE, "chat", "roundhouse:tiny"], tmp_path, **environment) as terminal:
        terminal.wait_for("which ends with this chat", 60)
        (command,) = psutil.Process(terminal.process.pid).children()
        processes = command.children(recursive=True)
        assert len(processes) >= 3  # a service, a guardian, an engine
        command.kill()
        wait_for(lambda: not any(is_alive(each.pid) for each in processes), "nothing of it is left")


@pytest.mark.system
def test_a_service_that_cannot_start_says_why(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Its last lines are shown, and its exit status: here another program has its port."""
    port = free_ports(1)
    models = {"m": scripted_model(free_ports(1))}
    server = {"port": port, "state_dir": str(tmp_path / "state")}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": server, "models": models}))
    with socket.create_server(("127.0.0.1", port)) as other:
        other.settimeout(0.1)
        done = run_command("chat", "--config", "roundhouse.yaml", folder=tmp_path, stdin="Hello")
    assert done.returncode == 2, done.stderr
    assert f"{port}" in done.stderr
    (tmp_path / "roundhouse.yaml").write_text(
        yaml.safe_dump({"server": server, "models": {"m": {**models["m"], "args": {"exit_at_once": 3}}}})
    )
    failed = run_command("chat", "--config", "roundhouse.yaml", folder=tmp_path, stdin="Hello")
    assert failed.returncode == 4, failed.stderr
    assert "m-0" in failed.stderr

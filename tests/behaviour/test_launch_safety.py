"""The limits of what ``launch`` and ``chat`` accept from a service and from a folder.

They run no commands, and send the key to no other program.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.harness.file_server import Handler, Server
from tests.harness.file_server import serving as answering
from tests.harness.service import ROUNDHOUSE, Document, run_command, scripted_model
from tests.harness.terminal import END, Terminal
from tests.harness.waiting import LIMIT_S, wait_for

KEY = "k" * 24
AGENTS = ("claude", "codex", "opencode", "aider", "pi")
NOBODY = 65534
LOOPBACK = Path(__file__).parent.parent / "system" / "loopback.py"
HOSTILE = {
    "json": 'x", "hooks": {"SessionStart": [{"hooks": [{"type": "command", "command": "touch pwned"}]}]}, "y": "',
    "toml": 'x"\nnotify=["sh","-c","touch pwned"]#',
    "yaml": "x\n  notifications-command: touch pwned\n",
    "flag": "--config=/tmp/theirs",
    "blank": "a b",
    "control": "a\x1b[2J",
    "empty": "",
}
USUAL = ("Qwen/Qwen3-0.6B", "org/m:q4_k_m@main", "a+b-c_d.gguf", "7b")
PASSER_BY = """\
import encodings.idna, json, os, signal, subprocess, sys  # another user may not be able to read Python's folder
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        seen.write(json.dumps([self.path, self.headers.get("Authorization")]) + "\\n")
        seen.flush()
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "x", "root": "m", "max_model_len": 65536}
        body = {"status": "ok", "without": []} if self.path == "/readyz" else {"object": "list", "data": [model]}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET

seen = open(sys.argv[1], "a")
listens, told = os.pipe()
passer_by = os.fork()
if not passer_by:
    os.setuid(int(sys.argv[2]))  # before the socket is made, which has its maker's uid
    server = HTTPServer(("127.0.0.1", 8080), Handler)
    os.write(told, b"!")
    server.serve_forever()
os.close(told)
assert os.read(listens, 1)
try:
    code = subprocess.run(sys.argv[3:], input=b"Hello").returncode
finally:
    os.kill(passer_by, signal.SIGKILL)
    os.waitpid(passer_by, 0)
sys.exit(code)
"""


def answer_as_a_service(*names: str) -> Callable[[Handler], None]:
    """Return a handler that answers as Roundhouse with models of these names."""

    def answer(request: Handler) -> None:
        fields: Document = {"object": "model", "created": 1, "owned_by": "x", "root": "m", "max_model_len": 65_536}
        listing = {"object": "list", "data": [{"id": name, **fields} for name in names]}
        body = {"status": "ok", "without": []} if request.path == "/readyz" else listing
        request.send(200, json.dumps(body).encode(), content_type="application/json")

    return answer


@pytest.fixture
def person(tmp_path: Path) -> dict[str, str]:
    """A user's variables, with stand-ins for agents on the path that report their start."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in AGENTS:
        (programs / name).write_text(f'#!/bin/sh\ntouch "{tmp_path}/started"\n')
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "users"),
        "ROUNDHOUSE_API_KEY": KEY,
    }


@contextmanager
def naming(*names: str) -> Iterator[Server]:
    with answering(answer_as_a_service(*names)) as server:
        yield server


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_a_model_with_an_invalid_name_starts_no_agent(tmp_path: Path, person: dict[str, str], name: str) -> None:
    """A service chooses its models' names, and an agent's settings hold commands.

    No file is written, no agent starts.
    """
    with naming(name) as service:
        done = run_command("launch", "claude", "--url", service.url, folder=tmp_path, **person)
    assert (done.returncode, (tmp_path / "started").exists()) == (2, False), done
    assert "name" in done.stderr
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "users").exists()


@pytest.mark.system
@pytest.mark.parametrize("agent", AGENTS)
def test_names_are_checked_for_every_agent(tmp_path: Path, person: dict[str, str], agent: str) -> None:
    """The check is in one place, so that users' own rows have it too; usual names of models pass."""
    with naming(HOSTILE["toml"]) as service:
        done = run_command("launch", agent, "--url", service.url, folder=tmp_path, **person)
        shown = run_command("launch", "--print", agent, "--url", service.url, folder=tmp_path, **person)
    assert (done.returncode, shown.returncode, (tmp_path / "started").exists()) == (2, 2, False), (done, shown)
    with naming(*USUAL) as service:
        taken = run_command("launch", agent, "--url", service.url, folder=tmp_path, **person)
    assert (taken.returncode, (tmp_path / "started").exists()) == (0, True), taken.stderr


def test_a_chat_with_an_invalid_model_name_is_refused(tmp_path: Path, person: dict[str, str]) -> None:
    """The rule is the same, since names go to the terminal and to later commands."""
    with naming(HOSTILE["control"]) as service:
        done = run_command("chat", "--url", service.url, folder=tmp_path, stdin="Hello", **person)
        assert [path for path, _ in service.seen] == ["/v1/models"]  # nothing was asked
    assert (done.returncode, "name" in done.stderr, "\x1b" in done.stderr) == (2, True, False), done


@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's program is started, in a network of its own")
@pytest.mark.parametrize("has_file", [False, True], ids=["no file", "a file that names its port"])
@pytest.mark.parametrize(
    "arguments",
    [["launch", "claude", "--model", "m"], ["launch", "--print", "claude", "--model", "m"], ["chat", "m"], ["status"]],
)
def test_another_users_program_on_our_port_gets_no_key(
    tmp_path: Path, person: dict[str, str], arguments: list[str], *, has_file: bool
) -> None:
    """The user did not name it.

    A program on the usual port may not be our service, and the message names the program.
    """
    seen, program = tmp_path / "seen", tmp_path / "passer_by.py"
    program.write_text(PASSER_BY)
    if has_file:
        config: Document = {"server": {"port": 8080}, "models": {"other": scripted_model(9100)}}
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump(config))
    begin = [sys.executable, str(program), str(seen), str(NOBODY), ROUNDHOUSE, *arguments]
    script = f"{sys.executable} -I -S {LOOPBACK} && exec {shlex.join(begin)}"
    done = subprocess.run(
        ["unshare", "--net", "--", "sh", "-c", script],  # noqa: S607 - of util-linux
        env={**os.environ, **person, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=5 * LIMIT_S,
        check=False,
    )
    asked = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [path for path, key in asked if key is not None] == [], done
    assert not (tmp_path / "started").exists()
    assert "8080" in done.stderr + done.stdout, done


@pytest.mark.system
def test_a_key_goes_only_to_an_address_that_the_user_has_given(tmp_path: Path, person: dict[str, str]) -> None:
    """By a flag, by the variable, or by this folder's configuration if the listener is the user's own."""
    with naming("m") as service:
        for more in ({}, {"ROUNDHOUSE_URL": service.url}):
            arguments = ["--url", service.url] if not more else []
            run_command("launch", "claude", *arguments, folder=tmp_path, **{**person, **more})
        config: Document = {"server": {"port": service.server_port}, "models": {"m": scripted_model(20_001)}}
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump(config))
        run_command("launch", "claude", folder=tmp_path, **person)
        asked = [headers.get("Authorization") for path, headers in service.seen if path == "/v1/models"]
    assert asked == [f"Bearer {KEY}"] * 3


def write_config_with_a_command(folder: Path, free_ports: Callable[[int], int]) -> Path:
    """Write a configuration as in another user's folder, and return the file that its command makes."""
    made = folder / "pwned"
    model = {**scripted_model(free_ports(1)), "command": ["sh", "-c", f"touch {made}; exit 1"]}
    model["restart"] = {"initial_s": 0.05, "failures": 1}
    config: Document = {"server": {"port": free_ports(1), "state_dir": str(folder / "state")}, "models": {"m": model}}
    (folder / "roundhouse.yaml").write_text(yaml.safe_dump(config))
    return made


@pytest.mark.system
@pytest.mark.parametrize("arguments", [["chat"], ["launch", "claude"]])
def test_a_configuration_of_this_folder_runs_no_command_without_a_terminal(
    tmp_path: Path, person: dict[str, str], free_ports: Callable[[int], int], arguments: list[str]
) -> None:
    """A cloned repository may contain one: the command is named, with the option that allows it."""
    made = write_config_with_a_command(tmp_path, free_ports)
    done = run_command(*arguments, folder=tmp_path, stdin="Hello", **person)
    assert (done.returncode, made.exists()) == (2, False), done
    assert "roundhouse.yaml" in done.stderr
    assert "--config" in done.stderr
    named = run_command(*arguments, "--config", "roundhouse.yaml", folder=tmp_path, stdin="Hello", **person)
    assert (named.returncode, made.exists()) == (4, True), named


@pytest.mark.system
@pytest.mark.parametrize("words", ["chat", "launch claude"])
def test_the_user_is_asked_once_before_commands_of_this_folder_run(
    tmp_path: Path, person: dict[str, str], free_ports: Callable[[int], int], words: str
) -> None:
    """No means that nothing runs; yes holds until the file changes."""
    made = write_config_with_a_command(tmp_path, free_ports)
    command = [ROUNDHOUSE, *words.split()]
    with Terminal(command, tmp_path, **person) as terminal:
        terminal.wait_for("[y/N]")
        assert "roundhouse.yaml" in terminal.text
        terminal.type("n\n")
        assert terminal.wait_ended() == 2
    assert not made.exists()
    with Terminal(command, tmp_path, **person) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("y\n")
        wait_for(made.exists, "its command has run")
        terminal.wait_ended(3 * LIMIT_S)
    made.unlink()
    with Terminal(command, tmp_path, **person) as terminal:
        wait_for(made.exists, "its command has run, and nobody was asked")
        terminal.wait_ended(3 * LIMIT_S)
        assert "roundhouse.yaml" in terminal.text  # it is named at each start
    made.unlink()
    with (tmp_path / "roundhouse.yaml").open("a") as file:
        file.write("# changed\n")
    with Terminal(command, tmp_path, **person) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type(END)
        assert terminal.wait_ended() == 2
    assert not made.exists()


def test_an_interrupted_question_runs_nothing(
    tmp_path: Path, person: dict[str, str], free_ports: Callable[[int], int]
) -> None:
    """Ctrl-C is not a yes."""
    made = write_config_with_a_command(tmp_path, free_ports)
    with Terminal([ROUNDHOUSE, "chat"], tmp_path, **person) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("\x03")
        assert terminal.wait_ended() == 128 + signal.SIGINT
    assert not made.exists()


@pytest.mark.parametrize("section", ["command", "python"])
def test_print_runs_no_command_of_a_folders_configuration(
    tmp_path: Path, person: dict[str, str], free_ports: Callable[[int], int], section: str
) -> None:
    """No command, no Python file, and no question."""
    made = write_config_with_a_command(tmp_path, free_ports)
    if section == "python":
        (tmp_path / "theirs.py").write_text(f"open({str(made)!r}, 'w').close()\ndef f() -> str:\n    return ''\n")
        config = yaml.safe_load((tmp_path / "roundhouse.yaml").read_text())
        config["models"]["m"] |= {"tools": {"python": {"f": "theirs.py:f"}}}
        (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump(config))
    done = run_command("launch", "--print", "claude", folder=tmp_path, **person)
    assert (done.returncode, made.exists(), "claude --settings" in done.stdout) == (0, False, True), done


@pytest.mark.system
def test_the_users_own_configuration_asks_nothing(tmp_path: Path, person: dict[str, str]) -> None:
    """The user has already used a configuration that ``init`` wrote here, or that ``run`` or ``serve`` were given."""
    assert run_command("init", "--model", "roundhouse:tiny", folder=tmp_path, **person).returncode == 0
    done = run_command("chat", folder=tmp_path, stdin="Hello", **person)
    assert done.returncode == 0, done.stderr

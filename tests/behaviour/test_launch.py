"""``launch`` starts an agent's command line on the service: its environment, its end, and what stays behind."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from tests.harness.service import ROUNDHOUSE, Service, recorded, run_command, scripted_model, serving
from tests.harness.terminal import INTERRUPT, Terminal
from tests.harness.waiting import wait_for

KEY = "k" * 24
AGENT = """\
import json, os, signal, sys
import httpx
headers = {"Authorization": "Bearer " + os.environ["KEY"], "X-Session-Id": os.environ["SESSION"]}
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "SAY:agent"}]}
answer = httpx.post(os.environ["URL"] + "/v1/chat/completions", json=body, headers=headers)  # by its environment
print(json.dumps({"answer": answer.json(), "environment": dict(os.environ), "arguments": sys.argv[1:]}), flush=True)
if "wait" in sys.argv:
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("the agent ends", flush=True)
        sys.exit(7)
sys.exit(5)
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("launch")
    model = scripted_model(free_ports(1), record=str(folder / "record.jsonl"), echo="SAY:(.*)")
    with serving(folder, free_ports(1), {"m": model}, {"api_keys": [KEY]}) as running:
        yield running


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment, with a row of the user's own and a provider's key."""
    (tmp_path / "agent.py").write_text(AGENT)
    row = {
        "program": sys.executable,
        "arguments": [str(tmp_path / "agent.py"), "$model"],
        "reads": 100_000,
        "environment": {"URL": "$url", "KEY": "$key", "MODEL": "$model", "SESSION": "$session"},
        "files": {"settings.json": '{"model": "$model"}'},
        "once": {"trust.json": "{}"},
    }
    table = tmp_path / "config" / "roundhouse" / "agents.yaml"
    table.parent.mkdir(parents=True)
    table.write_text(
        yaml.safe_dump({"agents": {"mine": row, "absent": {"program": "no-such-agent", "install": "get it"}}})
    )
    return {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "users"),
        "OPENAI_API_KEY": "paid",
        "HTTP_PROXY": "http://127.0.0.1:9",  # an address without a listener
        "http_proxy": "http://127.0.0.1:9",
        "NO_PROXY": "corp.example",
        "ROUNDHOUSE_API_KEY": KEY,
    }


def test_an_agent_talks_to_the_service_and_the_command_exits_with_its_status(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    """It gets the row's environment without a provider's key, and files that only its owner reads."""
    trust = tmp_path / "users" / "roundhouse" / "agents" / "mine" / "trust.json"
    trust.parent.mkdir(parents=True)
    trust.write_text('{"of": "a person"}')
    done = run_command("launch", "mine", "--url", service.url, "--", "-x", "y", folder=tmp_path, **environment)
    assert done.returncode == 5, done.stderr
    told = json.loads(done.stdout)
    assert told["answer"]["choices"][0]["message"]["content"].startswith("agent")
    assert told["arguments"] == ["m", "-x", "y"]
    assert "OPENAI_API_KEY" not in told["environment"]
    assert told["environment"]["SESSION"].startswith("mine-")
    assert "m has a context of 4096 tokens" in done.stderr
    settings = trust.with_name("settings.json")
    assert (settings.stat().st_mode & 0o777, json.loads(settings.read_text())) == (0o600, {"model": "m"})
    assert json.loads(trust.read_text()) == {"of": "a person"}
    assert len(recorded(service.folder / "record.jsonl")) == 1


@pytest.mark.parametrize(("asks", "is_missing"), [("/v1/messages", True), ("/v1/chat/completions", False)])
def test_an_engine_without_the_agents_path_is_reported_before_the_start(
    service: Service, environment: dict[str, str], tmp_path: Path, asks: str, *, is_missing: bool
) -> None:
    """Otherwise the agent would report an unknown model."""
    table = tmp_path / "config" / "roundhouse" / "agents.yaml"
    rows = yaml.safe_load(table.read_text())
    rows["agents"]["mine"]["asks"] = asks
    table.write_text(yaml.safe_dump(rows))
    done = run_command("launch", "mine", "--url", service.url, folder=tmp_path, **environment)
    assert done.returncode == 5, done.stderr
    assert (f"will not work: the engine of m has no {asks}" in done.stderr) == is_missing, done.stderr


def test_print_shows_the_whole_start_and_starts_nothing(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    """Keys are masked; no file is written."""
    done = run_command("launch", "--print", "mine", "--url", service.url, folder=tmp_path, **environment)
    assert (done.returncode, KEY in done.stdout, "KEY=***" in done.stdout) == (0, False, True)
    assert f"URL={service.url}" in done.stdout
    assert "unset OPENAI_API_KEY" in done.stdout
    alone = run_command("launch", "--print", "claude", folder=tmp_path, **environment)
    assert (alone.returncode, KEY in alone.stdout, "claude --settings" in alone.stdout) == (0, False, True)
    assert not (tmp_path / "users").exists()


def test_ctrl_c_goes_to_the_agent(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """The agent decides as it would without us; then the command ends with its status."""
    command = [ROUNDHOUSE, "launch", "mine", "--url", service.url, "--", "wait"]
    with Terminal(command, tmp_path, **environment) as terminal:
        terminal.wait_for('"wait"]')
        terminal.type(INTERRUPT)
        terminal.wait_for("the agent ends")
        assert terminal.wait_ended() == 7


def test_a_signal_to_the_command_ends_the_agent(service: Service, environment: dict[str, str], tmp_path: Path) -> None:
    """SIGTERM leaves no agent behind."""
    command = [ROUNDHOUSE, "launch", "mine", "--url", service.url, "--", "wait"]
    with Terminal(command, tmp_path, **environment) as terminal:
        terminal.wait_for('"wait"]')
        (launched,) = psutil.Process(terminal.process.pid).children()
        (agent,) = launched.children()
        os.kill(launched.pid, signal.SIGTERM)
        terminal.wait_ended()
        wait_for(lambda: not agent.is_running(), "the agent has ended")


@pytest.mark.system
def test_a_program_that_cannot_be_started_is_reported(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    """The message says how to get it, or which row to change."""
    absent = run_command("launch", "absent", "--url", service.url, folder=tmp_path, **environment)
    assert (absent.returncode, "no-such-agent is not on the path: get it" in absent.stderr) == (2, True)
    nobody = run_command("launch", "nobody", "--url", service.url, folder=tmp_path, **environment)
    assert (nobody.returncode, "; add your own to " in nobody.stderr) == (2, True)
    listed = run_command("launch", folder=tmp_path, **environment).stdout
    assert all(name in listed for name in ("claude", "codex", "opencode", "aider", "pi", "mine", "absent"))

"""Messages to users about errors and ends have the place, the cause and the fix."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from service.cli.app import run_app
from service.cli.conventions import Exit
from tests.harness.ports import find_ports
from tests.harness.service import Document, run_command, scripted_model, serving

TALKS = "conversations: [{prompt: x}]\n"
AGENT = TALKS + "agents: [{id: a, model: m, "
CONFIG, JOB = "roundhouse.yaml", "job.yaml"
HUB = "models:\n  m: {engine: embedded, model: a/b}"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (JOB, "agents:\n\t- {id: a}\n", "job.yaml:2: not YAML: a tab begins a line; indent with spaces"),
        (JOB, "agents: [{id: a, system: You: be}]", "put a text that holds ': ' in quotes"),
        (JOB, "models: {m: {}}", "this looks like a configuration; a job has agents and conversations"),
        (JOB, AGENT + "validation: {choices: [1]}}]", "choices[0]: must be text; put it in quotes"),
        (
            JOB,
            AGENT + "validation: {json_schema: {items: {type: x}}}}]",
            "items.type: 'x' is no type; there are",
        ),
        (JOB, "conversations: [hello]\nagents: []", "conversations[0]: must be a mapping; write {prompt: ...}"),
        (JOB, TALKS + "agents: [{id: a b, model: m}]", "agents[0].id: letters, digits and . _ : - alone, no spaces"),
        (CONFIG, TALKS, "this looks like a job; a configuration has the key 'models'"),
        (CONFIG, "models:\n  m: {engine: embeded}", "roundhouse.yaml:2: models.m.engine: must be"),
        (CONFIG, "models:\n  m: {engine: embeded}", "did you mean 'embedded'?"),
        (CONFIG, HUB, "roundhouse.yaml:2: models.m.model: there is no file"),
        (CONFIG, HUB, "for a model of the hub write hf:"),
    ],
)
def test_errors_come_with_their_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, text: str, told: str
) -> None:
    """They name the file and the line."""
    (tmp_path / CONFIG).write_text("models: {m: {engine: embedded}}")
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    command = ["run", JOB, "--config", CONFIG] if name == JOB else ["check", "-c", name]
    monkeypatch.setattr(sys, "argv", ["roundhouse", *command])
    with pytest.raises(SystemExit) as ended:
        run_app()
    assert ended.value.code == Exit.USAGE
    assert told in capsys.readouterr().err


@pytest.mark.system
def test_a_missing_key_and_a_wrong_key_get_different_errors(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The first says how a key is given, the second that the key is unknown."""
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}, {"api_keys": ["right"]}) as service:
        none = run_command("status", "--url", service.url)
        assert (none.returncode, "needs a key; give --api-key, or set" in none.stderr) == (Exit.SERVICE, True)
        wrong = run_command("status", "--url", service.url, "--api-key", "wrong")
        assert (wrong.returncode, "this key is not known here" in wrong.stderr) == (Exit.SERVICE, True)


@pytest.mark.system
def test_run_on_an_ended_job_reports_its_failure(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The second run does so at once, without an engine, and writes a missing transcript again."""

    def run(model: Document) -> tuple[int, str, str]:
        (tmp_path / CONFIG).write_text(json.dumps({"models": {"m": model}}))
        done = run_command("run", "job.json", "-c", CONFIG, folder=tmp_path)
        return done.returncode, done.stdout, done.stderr

    talks = [{"id": "good", "prompt": "Go."}, {"id": "bad", "prompt": "NEVER"}]
    (tmp_path / "job.json").write_text(json.dumps({"agents": [{"id": "a", "model": "m"}], "conversations": talks}))
    works = scripted_model(free_ports(1), reject=400, reject_on="NEVER")
    code, _, told = run(works)
    assert (code, "bad: engine_rejected: " in told) == (Exit.FAILED, True), told
    code, shown, again = run({**works, "command": ["/bin/false"]})
    assert (code, again.splitlines()) == (Exit.FAILED, told.splitlines()[-1:])
    assert "job: completed_with_failures already; transcripts in" in shown
    transcript = tmp_path / "output" / "job" / "transcripts" / "good.json"
    transcript.unlink()
    code, shown, _ = run(works)
    assert (code, "already" in shown, transcript.is_file()) == (Exit.FAILED, False, True)


@pytest.mark.parametrize("command", ["run", "submit"])
def test_faults_of_a_job_in_json_are_reported_with_their_lines(tmp_path: Path, command: str) -> None:
    """As those of YAML are, and with the service's own text."""
    (tmp_path / CONFIG).write_text("models: {m: {engine: embedded, model: 'roundhouse:tiny'}}")
    job = {"agents": [{"id": "a", "model": "m", "sistem": "x"}], "conversations": [{"prompt": "Hello"}]}
    (tmp_path / "job.json").write_text(json.dumps(job, indent=1))
    nowhere = f"http://127.0.0.1:{find_ports(1)}"
    done = run_command(command, "job.json", folder=tmp_path, ROUNDHOUSE_URL=nowhere)
    assert (done.returncode, "job.json:6: agents[0].sistem: unknown key" in done.stderr) == (2, True), done.stderr

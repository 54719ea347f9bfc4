"""Callers' turns on the command line (specification, "Turns of callers")."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from roundhouse_client import Client, NothingAwaited
from tests.harness.service import ROUNDHOUSE, Document, Service, run_command, scripted_model, serving
from tests.harness.waiting import LIMIT_S, wait_for

AGENTS: list[Document] = [
    {"id": "guest", "by": "caller"},
    {"id": "ann", "model": "m", "system": "SAY-ann", "speak_after_within_round": ["guest"]},
]
JOB: Document = {"name": "talk", "agents": AGENTS, "rounds": 2, "conversations": [{"id": "c", "prompt": "Of cars."}]}


def run(tmp_path: Path, port: int, words: str, **job: object) -> subprocess.CompletedProcess[str]:
    """Run a job with this text on the standard input."""
    models = {"m": scripted_model(port, echo=r"SAY-\w+")}
    server = {"state_dir": str(tmp_path / "state")}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump({"server": server, "models": models}))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, **job}))
    return subprocess.run(
        [ROUNDHOUSE, "run", "job.yaml", "--output", "out"],
        cwd=tmp_path, input=words, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=os.environ,
    )  # fmt: skip


def said(tmp_path: Path) -> list[str]:
    transcript = json.loads((tmp_path / "out/talk/transcripts/c.json").read_text())
    return [turn["text"] for turn in transcript["turns"] if turn["by"] == "caller"]


@pytest.mark.system
def test_run_reads_a_line_for_each_turn(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The command shows what the caller's agent may hear, and reads little more input than it uses."""
    done = run(tmp_path, free_ports(1), "SAY-one\nSAY-two\n" + "more\n" * 1000)
    assert done.returncode == 0, done.stderr
    assert said(tmp_path) == ["SAY-one", "SAY-two"]
    shown = [line for line in done.stdout.splitlines() if line.startswith(("[c]", "ann:", "guest, in c:"))]
    assert (shown[0], shown.count("ann: SAY-ann SAY-one ")) == ("[c] Of cars.", 1)


@pytest.mark.system
def test_run_ends_at_a_waiting_turn_without_input_and_goes_on_later(
    tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    """Words that were taken are kept; invalid words are reported, and the turn is asked for again."""
    port = free_ports(1)
    agents = [{**AGENTS[0], "validation": {"pattern": "^SAY"}}, AGENTS[1]]
    done = run(tmp_path, port, "nothing\nSAY-one\n", agents=agents)
    assert (done.returncode, "guest has a turn in c, but standard input has ended" in done.stderr) == (2, True)
    assert "does not match the pattern" in done.stdout
    again = run(tmp_path, port, "SAY-two", agents=agents)
    assert again.returncode == 0, again.stderr
    assert said(tmp_path) == ["SAY-one", "SAY-two"]


@pytest.fixture
def service(tmp_path: Path, free_ports: Callable[[int], int]) -> Iterator[Service]:
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1))}) as running:
        yield running


@pytest.mark.system
def test_say_speaks_the_one_awaited_turn(service: Service) -> None:
    """With an option it speaks the named one; a refusal takes one line."""
    agents = [{"id": name, "by": "caller"} for name in ("guest", "other")] + AGENTS[1:]
    conversations = [{"id": "c", "prompt": "p"}]
    job_id = service.post_job({"agents": agents, "rounds": 1, "conversations": conversations})

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_command(*arguments, ROUNDHOUSE_URL=service.url)

    with Client(service.url) as client:
        wait_for(lambda: len(client.awaited(job_id).awaited) == 2, "both are awaited")
        with pytest.raises(NothingAwaited, match="guest in round 0, other in round 0"):
            client.say(job_id, "c", "Hi.")
        several = ask("say", job_id, "c", "Hi.")
        assert (several.returncode, "not exactly one turn is meant; c of" in several.stderr) == (2, True)
        listed = ask("awaited", job_id).stdout
        assert ("guest" in listed, "for ever" in listed) == (True, True)
        named = ask("say", job_id, "c", "Hi.", "--agent", "other")
        assert (named.returncode, named.stdout) == (0, "other has spoken in round 0\n")
        turn = client.say(job_id, "c", "Hello.")
        assert (turn.agent, turn.by, turn.text) == ("guest", "caller", "Hello.")
        assert client.say(job_id, "c", "Hello.", agent="guest", round_number=0) == turn
        assert client.wait_job(job_id).state == "completed"
    late = ask("say", job_id, "c", "Other words.", "--agent", "guest", "--round", "0")
    assert (late.returncode, "other words" in late.stderr) == (3, True)

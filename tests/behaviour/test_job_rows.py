"""Jobs whose conversations are rows of a file, on the command line (docs/reference/jobs.md)."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from roundhouse_client import Client, load_job
from tests.harness.service import Document, recorded, run_command, scripted_model, serving


def job(**conversations: object) -> str:
    agents = [{"id": "a", "model": "m", "system": "You are $name."}]
    rows: Document = {"file": "rows.jsonl", "id": "$id", "prompt": "$question", "variables": ["name"], **conversations}
    return yaml.safe_dump({"name": "rows", "agents": agents, "conversations": rows})


def write(folder: Path, text: str, *rows: Document) -> Path:
    (folder / "job.yaml").write_text(text)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "job.yaml"


def row(name: str, question: str = "Who are you?", number: object = None) -> Document:
    return {"id": number or name.lower(), "name": name, "question": question}


@pytest.mark.system
def test_rows_are_run_submitted_and_posted(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """From another folder as well: the rows' file is beside the job. Contents of a row are not parsed again."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    path = write(folder, job(), row("Ann", "For $5, $name?"), row("Bob"))
    record = tmp_path / "record"
    with serving(tmp_path, free_ports(1), {"m": scripted_model(free_ports(1), record=str(record))}) as service:
        done = run_command("submit", str(path), "--wait", "--url", service.url, folder=tmp_path)
        assert (done.returncode, "2 conversations of" in done.stderr) == (0, True), done.stderr
        asked = sorted(json.dumps(each["messages"]) for each in recorded(record))
        assert "For $5, $name?" in asked[0]
        assert ("You are Ann." in asked[0], "You are Bob." in asked[1]) == (True, True)
        with Client(service.url) as client:
            assert client.wait_job(client.post_job(load_job(path)).id).progress.conversations.completed == 2
        as_yaml = {"Content-Type": "application/yaml"}
        over_http = service.http.post("/v1/jobs", content=path.read_bytes(), headers=as_yaml)
        assert (over_http.status_code, "roundhouse_client.load_job" in over_http.json()["detail"]) == (422, True)
        write(folder, job(), row("Ann"), row("Bob", number="no id"), row("Cid"))
        refused = run_command("submit", str(path), "--url", service.url)
        assert (refused.returncode, f"{folder}/rows.jsonl:2: conversations[1].id" in refused.stderr) == (2, True)


@pytest.mark.system
def test_a_fault_of_a_row_is_reported_with_its_line(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The reader reports faults of the file, and the job's rules faults of meaning."""
    config = {"server": {"state_dir": "state"}, "models": {"m": scripted_model(free_ports(1))}}
    (tmp_path / "roundhouse.yaml").write_text(yaml.safe_dump(config))
    write(tmp_path, job(), row("Ann"), {"id": "b"}, row("Ann"))
    done = run_command("run", "job.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("rows.jsonl:2: ") == 2
    write(tmp_path, job(), row("Ann"), row("Bob"), row("Ann"))
    done = run_command("run", "job.yaml", folder=tmp_path)
    assert (done.returncode, "rows.jsonl:3: conversations[2].id: 'ann' is the id of" in done.stderr) == (2, True)


@pytest.mark.system
def test_submit_reports_the_lines_that_run_reports(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """This includes faults that only the service can find."""
    talks = "conversations:\n- {prompt: Go}\n- prompt: Go\n  bogus: 1\n"
    text = f"agents:\n- {{id: a, model: m}}\n{talks}until:\n- {{agent: b, says: [x]}}\n"
    (tmp_path / "job.yaml").write_text(text)
    with serving(tmp_path / "service", free_ports(1), {"m": scripted_model(free_ports(1))}) as service:
        refused = run_command("submit", str(tmp_path / "job.yaml"), "--url", service.url)
        assert (refused.returncode, f"{tmp_path}/job.yaml:6: conversations[1].bogus: " in refused.stderr) == (2, True)
        (tmp_path / "job.yaml").write_text(text.replace("  bogus: 1\n", ""))
        refused = run_command("submit", str(tmp_path / "job.yaml"), "--url", service.url)
        assert (refused.returncode, f"{tmp_path}/job.yaml:7: until[0].agent: " in refused.stderr) == (2, True)

"""The gallery, used as by a user: each job is written by the command, and run on the real small model."""

from pathlib import Path

import pytest

from roundhouse_client.job_files import with_rows
from service.export import folder_for
from service.formats.documents import parse_document
from tests.harness.service import run_command
from workers.models.small_model import ensure_small_model

GALLERY = Path(__file__).parents[2] / "examples"
TOOLS = "    tools: {arguments: tell, mcp: {towns: {command: [python3, town_server.py]}}}"


@pytest.fixture(scope="module", autouse=True)
def _small_model() -> None:
    ensure_small_model()


@pytest.mark.parametrize("file", sorted(GALLERY.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_runs_as_it_is_written(file: Path, tmp_path: Path) -> None:
    """With init's configuration; it is short, and its head says what to look at."""
    lines = file.read_text().splitlines()
    assert len(lines) < 40
    assert sum(line.count(". ") + line.endswith(".") for line in lines if line.startswith("# ")) >= 2
    assert run_command("init", folder=tmp_path).returncode == 0
    written = run_command("examples", file.stem, folder=tmp_path)
    assert written.returncode == 0, written.stderr
    assert f"next: roundhouse run {file.name}" in written.stdout
    config = tmp_path / "roundhouse.yaml"
    if TOOLS.strip() in written.stdout:
        config.write_text(config.read_text().replace("server:\n", f"{TOOLS}\nserver:\n"))
    done = run_command("run", file.name, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    job, _ = parse_document(file.read_text(), file.name)
    assert isinstance(job, dict)
    transcripts = folder_for(tmp_path / "output", job["name"]) / "transcripts"
    talks = with_rows(job, GALLERY, file.name).document["conversations"]
    assert {path.stem for path in transcripts.iterdir()} == {talk["id"] for talk in talks}
    again = run_command("examples", file.stem, folder=tmp_path)
    assert (again.returncode, "already exists" in again.stderr) == (2, True)


def test_the_gallery_is_listed(tmp_path: Path) -> None:
    """By name, each with a description; an unknown name is answered with the list."""
    listed = run_command("examples", folder=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines()] == sorted(each.stem for each in GALLERY.glob("*.yaml"))
    unknown = run_command("examples", "nothing", folder=tmp_path)
    assert (unknown.returncode, "there are committee, debate" in unknown.stderr) == (2, True)

"""Transcripts on disk: complete, and consistent with each other after a kill at any moment."""

import fcntl
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from service import export
from service.errors import StoreError
from service.export import Export
from tests.harness.processes import running_program

ROOT = Path(__file__).parents[3]
WRITER = """
import itertools, sys
from pathlib import Path
from service.export import Export
made = Export(Path(sys.argv[1]))
for number in itertools.count():
    transcript = {"id": f"c{number}", "state": "completed", "reason": None, "turns": []}
    made.write({"id": "j", "state": f"s{number}"}, [transcript])
    if number == 2:
        print("ready", flush=True)
"""


def read(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    manifest = json.loads((folder / "manifest.json").read_text())
    index = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    return manifest, index


def test_a_kill_at_any_moment_leaves_lists_that_agree(tmp_path: Path) -> None:
    """Specification, "Exported files": manifest and index are always consistent, and list only files that exist."""
    chance = random.Random(5)  # noqa: S311
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        command = [sys.executable, "-c", WRITER, str(folder)]
        with running_program(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(chance.uniform(0.001, 0.05))
            writer.send_signal(signal.SIGKILL)
        manifest, index = read(folder)
        conversations = manifest["conversations"]
        assert isinstance(conversations, dict)
        assert list(conversations) == [entry["id"] for entry in index]
        assert manifest["state"] == f"s{len(index) - 1}"
        for entry in index:
            assert json.loads((folder / str(entry["file"])).read_text())["id"] == entry["id"]
        again = Export(folder)
        again.write({"id": "j", "state": "done"}, [])
        assert len(list((folder / ".lists").glob("v*"))) == 1


def test_the_owner_of_a_folder_of_transcripts_is_known(tmp_path: Path) -> None:
    """No other job's transcripts are overwritten: a folder of unknown files has no owner."""
    assert Export(tmp_path).owner is None
    Export(tmp_path).write({"id": "old", "state": "s"}, [])
    assert Export(tmp_path).owner == "old"
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text("{}")
    assert Export(tmp_path).owner is None


def test_writers_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes exclude each other by flock, and the wait for it is bounded."""
    monkeypatch.setattr(export, "LOCK_LIMIT_S", 0.05)
    made = Export(tmp_path)
    made.write({"id": "j", "state": "s"}, [])
    with (tmp_path / ".lists" / "lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process has been writing"):
            made.write({"id": "j", "state": "t"}, [])
    made.write({"id": "j", "state": "t"}, [])
    assert read(tmp_path)[0]["state"] == "t"

"""How ``run`` reports the end of a job."""

from pathlib import Path

import pytest

from service.cli.commands.engine_commands import _tell_end
from service.export import Export, folder_for


def test_a_condition_that_was_given_up_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job completes by its rounds: without a message the condition would seem never to have been fulfilled."""
    since = {"conversation": "c0", "agent": "ann", "round": 4}
    given_up = [{"path": "until[0].matches", "pattern": "(a+)+$", "since": since}]
    manifest = {"id": "job-1", "name": "talk", "state": "completed", "given_up": given_up}
    Export(folder_for(tmp_path, "talk")).write(manifest, [])
    _tell_end("talk", "completed", tmp_path)
    told = capsys.readouterr()
    assert told.err == ("until[0].matches: ran out of time too often; not tried from ann in round 4 of c0 on\n")
    assert told.out.startswith("talk: completed")

"""``Worker`` as its page describes it: its state, and a missing program."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import SpecFactory
from tests.harness.working import QUICK, working
from workers import Worker
from workers.errors import StartFailed
from workers.states import WorkerState

ROOT = Path(__file__).parents[2]


async def test_a_worker_reports_its_state(scripted_spec: SpecFactory) -> None:
    """A full worker differs from one without an engine."""
    seen = [Worker(scripted_spec()).state]
    async with working(scripted_spec()) as worker:
        seen.append(worker.state)
    seen.append(worker.state)
    assert seen == [WorkerState.STOPPED, WorkerState.READY, WorkerState.STOPPED]


async def test_a_missing_program_is_named(scripted_spec: SpecFactory) -> None:
    """The words "no such file" could mean the model, or any other file."""
    spec = replace(scripted_spec(), command=("no-such-server", "--flag"), restart=QUICK)
    worker = Worker(spec)
    try:
        with pytest.raises(StartFailed, match=r"'?no-such-server'?") as told:
            await worker.start()
        assert "no-such-server" in told.value.because
    finally:
        await worker.stop()


@pytest.mark.system
def test_the_first_line_of_the_page_passes_strict_type_checks(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """The page promises types, so mypy must accept its first example."""
    page = (ROOT / "docs/reference/python-classes.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert "WorkerSpec(" in code
    file = tmp_path / "example.py"
    file.write_text(code.replace("9100", str(free_ports(1))))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

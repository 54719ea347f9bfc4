"""A service that starts on a full disk reports it as a running one does."""

import os
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.harness.service import ROUNDHOUSE, scripted_model
from tests.harness.waiting import LIMIT_S


def start(config: Path, most_bytes: int) -> subprocess.CompletedProcess[str]:
    """Start a service where no file may grow beyond this many bytes, as on a full disk."""
    return subprocess.run(
        [ROUNDHOUSE, "serve", "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=3 * LIMIT_S,
        env=dict(os.environ),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        check=False,
    )


@pytest.mark.parametrize("most_bytes", [100, 20_000], ids=["nothing fits", "a database is begun"])
def test_a_start_on_a_full_disk_is_reported(tmp_path: Path, free_ports: Callable[[int], int], most_bytes: int) -> None:
    """A reader of "disk I/O error" would look for a broken disk."""
    config = tmp_path / "roundhouse.yaml"
    settings = {"port": free_ports(1), "state_dir": str(tmp_path / "state")}
    config.write_text(yaml.safe_dump({"server": settings, "models": {"m": scripted_model(free_ports(1))}}))
    ended = start(config, most_bytes)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert re.search(rf"{re.escape(str(tmp_path))}/state: the disk (is full|has an error)", ended.stderr), ended.stderr

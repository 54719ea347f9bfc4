"""A program that hangs after the exec of an upgrade: it can still be stopped, and takes its engines with it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.service import Service, debate, scripted_model
from tests.harness.waiting import LIMIT_S, is_alive, wait_for

HANGS = """
import os, sys, time
if os.path.exists({marker!r}) and "serve" in sys.orig_argv and "--upgrade-check" not in sys.orig_argv:
    open({hung!r}, "w").close()
    while True:
        time.sleep(1)
"""


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_hangs_after_the_exec_can_be_stopped(
    tmp_path: Path, free_ports: Callable[[int], int], number: signal.Signals
) -> None:
    """Without it an operator has to wait for a service manager's SIGKILL, and a terminal has none."""
    port = free_ports(2)
    service = Service(tmp_path / "a", port, {"m": scripted_model(port + 1, tokens=100_000, interval=0.05)})
    marker, hung, beside = tmp_path / "marker", tmp_path / "hung", tmp_path / "beside"
    beside.mkdir()
    (beside / "sitecustomize.py").write_text(HANGS.format(marker=str(marker), hung=str(hung)))
    service.environment["PYTHONPATH"] = os.pathsep.join([str(beside), os.environ.get("PYTHONPATH", "")])
    try:
        service.start()
        assert service.process is not None
        tree = service.tree()
        service.post_job(debate())
        marker.touch()
        assert service.http.post("/v1/upgrade", timeout=60).status_code == 202
        wait_for(hung.exists, "the next program hangs", 2 * LIMIT_S)
        service.process.send_signal(number)
        wait_for(lambda: service.process is None or service.process.poll() is not None, f"it ends by {number.name}", 5)
        wait_for(lambda: not any(map(is_alive, tree)), "no engine of it is left")
    finally:
        service.http.close()
        if service.process is not None and service.process.poll() is None:
            service.kill()

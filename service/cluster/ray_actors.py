"""The actor that keeps a program of the cluster running on a machine of Ray.

Ray carries this file to its machines by value, so it needs only the standard library and Ray itself.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

FIRST_PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 60.0
STEADY_S: Final = 60.0  # a program that ran for so long is started again at once
HURRY_S: Final = 20.0
TAIL_BYTES: Final = 2000


class ProgramActor:
    """Runs a program until ``stop``, again and again. It dies with the actor, and Ray restarts both."""

    def __init__(self, command: Sequence[str], log: str, *, has_address: bool) -> None:
        import ray  # noqa: PLC0415 - only within Ray

        self._address = str(ray.util.get_node_ip_address())
        own = ["--address", self._address] if has_address else []
        # The kernel kills the program when the thread that started it ends, so that thread lasts as long as the actor.
        self._command = ["setpriv", "--pdeathsig", "KILL", *command, *own]
        self._log = Path(log.replace("{host}", os.uname().nodename))
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._fault = ""
        threading.Thread(target=self._keep, daemon=True).start()

    def __repr__(self) -> str:
        return f"<ProgramActor of {self._command}>"

    def status(self) -> dict[str, Any]:
        """Return the machine's address, the program's process id or None, and why the last one ended."""
        process = self._process
        runs = process is not None and process.poll() is None
        return {"address": self._address, "pid": process.pid if process and runs else None, "fault": self._fault}

    def stop(self, limit_s: float) -> str:
        """Have the program end within ``limit_s``, or make it; return how it ended."""
        self._stopping.set()
        process = self._process
        if process is None or process.poll() is not None:
            return "was not running"
        for number, how in (
            (signal.SIGTERM, "drained"),
            (signal.SIGTERM, "stopped at once"),
            (signal.SIGKILL, "killed"),
        ):
            process.send_signal(number)
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                limit_s = HURRY_S
            else:
                return how
        return "runs on"

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            # In a session of its own: Ray ends an actor's process group, and would end guardians before their engines.
            handle = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            with os.fdopen(handle, "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            status = self._process.wait()
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > STEADY_S else min(2 * pause_s, MOST_PAUSE_S)
            self._fault = f"ended with status {status}: {self._last_line()}"
            self._stopping.wait(pause_s)

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return lines[-1] if lines else ""

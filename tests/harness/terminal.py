"""A program on a terminal of its own, as a user has it: its input, its output, and Ctrl-C."""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.harness.waiting import LIMIT_S, wait_for

SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
INTERRUPT = "\x03"
END = "\x04"


class Terminal:
    """Runs a command for a block; no process of it is left."""

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self._seen = bytearray()
        self._at = 0  # output up to here was waited for
        self.process = subprocess.Popen(
            [sys.executable, "-c", SPAWN, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "150", **environment},
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def text(self) -> str:
        """All output so far."""
        assert self.process.stdout is not None
        try:
            while piece := os.read(self.process.stdout.fileno(), 1 << 20):
                self._seen += piece
        except BlockingIOError:
            pass
        return self._seen.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        """Type; a line's end is up to the caller."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a text appears after those that were waited for before."""
        wait_for(lambda: text in self.text[self._at :], f"{text!r} is seen; {self.text[self._at :]!r}", limit_s)
        self._at = self.text.index(text, self._at) + len(text)

    def wait_ended(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit status."""
        wait_for(lambda: self.process.poll() is not None, "it has ended", limit_s)
        return int(self.process.returncode)

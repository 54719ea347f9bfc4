"""Programs that run for a block of a test."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def running_program(command: Sequence[object], **options: Any) -> Iterator[subprocess.Popen[Any]]:  # noqa: ANN401 - as Popen
    """Run a program for a block and kill it at the block's end.

    ``Popen`` as a context manager waits without a limit for a program that a failed block has left running.
    """
    with subprocess.Popen([str(each) for each in command], **options) as process:
        try:
            yield process
        finally:
            process.kill()

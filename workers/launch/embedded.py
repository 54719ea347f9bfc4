"""The embedded engine: llama.cpp's server from the xllamacpp wheel, in a program of ours that takes its flags. Pure."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.launch.llama_server import server_flags
from workers.process import Command
from workers.spec import WorkerSpec

# -P: the program's own folder must not come before the standard library in its module path.
PROGRAM: Final = (sys.executable, "-P", str(Path(__file__).parent.parent / "embedded" / "server.py"))


def embedded_command(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of an embedded llama.cpp server.

    Raises:
        InvalidSpec: ``args`` repeats what a key of its own decides.
    """
    return Command(argv=(*(spec.command or PROGRAM), *server_flags(spec)), env={**environment, **spec.env})

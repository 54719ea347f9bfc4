"""llama-server: argv and environment from a specification. Pure.

Source: llama.cpp, ``tools/server/README.md``. What its defaults leave to chance is always given: the port, the slots,
the context, and that each slot has its own part of the context (with a unified cache one long slot can make the engine
fail all the others).
"""

from collections.abc import Mapping
from typing import Final

from workers.launch.flags import refuse_owned, render_flags
from workers.process import Command
from workers.spec import Flag, WorkerSpec

PROGRAM: Final = ("llama-server",)
OWNED: Final = {
    "m": "model",
    "model": "model",
    "hf-repo": "model",
    "host": "host",
    "port": "port",
    "np": "slots",
    "parallel": "slots",
    "c": "context",
    "ctx-size": "context",
}


def llama_server_command(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of a llama-server.

    Raises:
        InvalidSpec: ``args`` repeats what a key of its own decides.
    """
    return Command(argv=(*(spec.command or PROGRAM), *server_flags(spec)), env={**environment, **spec.env})


def server_flags(spec: WorkerSpec) -> tuple[str, ...]:
    """Return the flags that llama-server and the programs that take its flags are given."""
    refuse_owned(spec.args, OWNED)
    file = spec.model_file
    flags: dict[str, Flag] = {
        "model": file if file is not None and file.startswith("/") else None,
        "hf-repo": file if file is not None and not file.startswith("/") else None,
        "alias": spec.model,
        "host": spec.host,
        "port": spec.port,
        "parallel": spec.slots,
        "ctx-size": spec.slots * spec.context,
        "metrics": True,
        "slots": True,
    }
    if not {"kv-unified", "no-kv-unified", "kvu", "no-kvu"} & {
        name.lstrip("-").replace("_", "-") for name in spec.args
    }:
        flags["no-kv-unified"] = True
    return tuple(render_flags(flags) + render_flags(spec.args))

"""From a worker's specification to what is executed: one pure function for each engine."""

from collections.abc import Callable, Mapping
from typing import Final

from workers.launch.llama_server import llama_server_command
from workers.process import Command
from workers.spec import EngineKind, WorkerSpec

LAUNCHERS: Final[Mapping[EngineKind, Callable[[WorkerSpec, Mapping[str, str]], Command]]] = {
    EngineKind.LLAMA_SERVER: llama_server_command,
    EngineKind.EMBEDDED: llama_server_command,
}


def command_for(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of ``spec``'s engine, its environment laid over ``environment``.

    Raises:
        InvalidSpec: the specification contradicts itself.
    """
    return LAUNCHERS[spec.engine](spec, environment)

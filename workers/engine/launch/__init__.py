"""From a worker's specification to its engine's command and dialect."""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from transport.dialects.dialect import PLAIN, Dialect
from transport.dialects.llama_server import LLAMA_SERVER
from transport.dialects.vllm import VLLM
from workers.engine.launch.llama_server import adapter_params, llama_server_command
from workers.engine.launch.vllm import devices_of, reads_tool_calls, vllm_command
from workers.errors import AdapterUnknown
from workers.process.child import Command
from workers.spec import EngineKind, WorkerSpec

LAUNCHERS: Final[Mapping[EngineKind, Callable[[WorkerSpec, Mapping[str, str]], Command]]] = {
    EngineKind.LLAMA_SERVER: llama_server_command,
    EngineKind.EMBEDDED: llama_server_command,
    EngineKind.VLLM: vllm_command,
}
DIALECTS: Final[Mapping[EngineKind, Dialect]] = {
    EngineKind.LLAMA_SERVER: LLAMA_SERVER,
    EngineKind.EMBEDDED: LLAMA_SERVER,
    EngineKind.VLLM: VLLM,
    EngineKind.ATTACHED: PLAIN,
}


def command_for(spec: WorkerSpec, environment: Mapping[str, str]) -> Command:
    """Return the command of ``spec``'s engine, which must not be attached, with ``environment`` below its own.

    Raises:
        InvalidSpec: the specification contradicts itself.
    """
    return LAUNCHERS[spec.engine](spec, environment)


def adapted(spec: WorkerSpec, loaded: Collection[str], adapter: str | None) -> tuple[str, Mapping[str, object]]:
    """Return the model name and the further parameters of a request, for an answer with an adapter or without.

    ``loaded`` are the engine's adapters, in its order.

    Raises:
        AdapterUnknown: ``adapter`` is unknown; llama-server would answer without it.
    """
    if adapter is not None and adapter not in loaded:
        raise AdapterUnknown(f"the engine has no adapter {adapter}")
    if spec.engine is EngineKind.VLLM:
        return adapter or spec.served_name, {}
    return spec.served_name, adapter_params(loaded, adapter)


def takes_tools(spec: WorkerSpec) -> bool:
    """Whether the engine accepts definitions of tools with a request."""
    return spec.engine is not EngineKind.VLLM or reads_tool_calls(spec)


def starting_devices(spec: WorkerSpec, environment: Mapping[str, str]) -> frozenset[str]:
    """Return the devices on which no other engine may start while this one does."""
    return devices_of(spec, environment) if spec.engine is EngineKind.VLLM else frozenset()

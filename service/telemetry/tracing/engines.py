"""Where requests go, as spans tell it."""

from collections.abc import Callable, Mapping

from service.telemetry.tracing import names
from workers.fleet import Fleet
from workers.spec import EngineKind

PROVIDERS: Mapping[EngineKind, str] = {
    EngineKind.LLAMA_SERVER: "llama.cpp",
    EngineKind.EMBEDDED: "llama.cpp",
    EngineKind.VLLM: "vllm",
    EngineKind.ATTACHED: "openai",  # by the form in which it is asked
}
Attributes = Mapping[str, str | int]


def attributes_by_worker(fleet: Fleet) -> Callable[[str], Attributes]:
    """Return what tells, by its id, of the engine of a worker."""

    def attributes(worker_id: str) -> Attributes:
        worker = fleet.get(worker_id)
        if worker is None:
            return {}
        endpoint = worker.endpoint
        return {
            names.PROVIDER: PROVIDERS[worker.spec.engine],
            names.SERVER_ADDRESS: endpoint.host,
            names.SERVER_PORT: endpoint.port,
        }

    return attributes

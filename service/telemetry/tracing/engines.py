"""Where requests go, as spans tell it."""

import os
from collections.abc import Callable, Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from service.telemetry.tracing import names
from workers.fleet import Fleet
from workers.spec import EngineKind


def exporting_provider(instance: str) -> TracerProvider:
    """Return a provider that sends spans from a thread of its own; ``instance`` tells nodes apart.

    Where to, how often and how many: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_BSP_*``, ``OTEL_TRACES_SAMPLER`` and their
    kin.
    """
    about = {names.SERVICE_VERSION: version("roundhouse"), names.SERVICE_INSTANCE: instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        about[names.SERVICE_NAME] = "roundhouse"
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


PROVIDERS: Mapping[EngineKind, str] = {
    EngineKind.LLAMA_SERVER: "llama.cpp",
    EngineKind.EMBEDDED: "llama.cpp",
    EngineKind.VLLM: "vllm",
    EngineKind.ATTACHED: "openai",  # by the form in which it is asked
}
Attributes = Mapping[str, str | int]


def attributes_by_worker(fleet: Fleet) -> Callable[[str], Attributes]:
    """Return a function from a worker's id to the attributes of its engine."""

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

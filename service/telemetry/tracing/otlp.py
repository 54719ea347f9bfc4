"""Where spans go: over OTLP/HTTP, as the standard OTEL_* variables say."""

import os
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from service.telemetry.tracing import names


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

"""Traces by OpenTelemetry; nothing of it is imported unless they are switched on (``roundhouse[otel]``)."""

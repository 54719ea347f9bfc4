"""A node: its status, its lanes, its health and its metrics."""

from dataclasses import replace

from roundhouse_client.request import Call, as_text, get, into
from roundhouse_client.values.node import Health, Lanes, Readiness, Status


def get_status() -> Call[Status]:
    """Return what runs, what waits, and for what."""
    return get("/v1/status", into(Status))


def list_lanes() -> Call[Lanes]:
    """Return all lanes, and what stands on each."""
    return get("/v1/lanes", into(Lanes))


def get_health() -> Call[Health]:
    """Return when the process serves; it needs no key."""
    return get("/healthz", into(Health))


def get_readiness() -> Call[Readiness]:
    """Return at once whether models and store are ready.

    Raises:
        NotNow: they are not; the text says which.
    """
    return replace(get("/readyz", into(Readiness)), is_repeatable=False)  # a 503 is an answer here


def get_metrics() -> Call[str]:
    """Return all metrics in Prometheus' text format."""
    return get("/metrics", as_text)

"""Calls for a node: status, lanes, usage, configuration, upgrade, health and metrics."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from typing import Final

from roundhouse_client.request import Call, Nodes, as_text, get, into, on_nodes, post
from roundhouse_client.values.node import (
    AgreedUpgrade,
    ClusterNodes,
    EngineSpans,
    Health,
    Lanes,
    Readiness,
    Reload,
    ServiceProgram,
    Speaking,
    Status,
    UsageReport,
)

CHECK_LIMIT_S: Final = 90.0  # time for the new code to say whether it can take over


def get_status() -> Call[Status]:
    """Return the node's status: running work, waiting work, and its reasons."""
    return get("/v1/status", into(Status))


def get_speaking(*, limit: int = 20, chars: int = 200) -> Call[Speaking]:
    """Return the last words of turns in flight: at most 100 turns and 1,000 characters of each."""
    return get("/v1/speaking", into(Speaking), limit=limit, chars=chars)


def list_lanes() -> Call[Lanes]:
    """Return all lanes with their models."""
    return get("/v1/lanes", into(Lanes))


def get_usage(
    *,
    by: Sequence[str] = ("key", "model", "day"),
    since: date | None = None,
    until: date | None = None,
    limit: int = 1000,
) -> Call[UsageReport]:
    """Return the usage from day ``since`` to day ``until`` (UTC), by any of key, job, agent, model and day.

    At most ``limit`` lines, up to 10,000. A key without the scope admin sees its own.
    """
    first, last = (None if day is None else day.isoformat() for day in (since, until))
    return get("/v1/usage", into(UsageReport), by=",".join(by), since=first, until=last, limit=limit)


def list_nodes() -> Call[ClusterNodes]:
    """Return the nodes that share the store."""
    return get("/v1/nodes", into(ClusterNodes))


def list_spans() -> Call[EngineSpans]:
    """Return the engines that span several nodes, each with its newest generation."""
    return get("/v1/spans", into(EngineSpans))


def get_upgrade() -> Call[ServiceProgram]:
    """Return the serving program, and the result of the last upgrade in place."""
    return get("/v1/upgrade", into(ServiceProgram))


def upgrade() -> Call[AgreedUpgrade]:
    """Replace the service's program by the one that is installed now; engines stay.

    Returns when the new code has agreed; ``get_upgrade`` shows when it serves.

    Raises:
        StateConflict: it has not agreed; the service goes on unchanged.
    """
    return post("/v1/upgrade", into(AgreedUpgrade), limit_s=CHECK_LIMIT_S)


def reload_configuration(*, nodes: Nodes | None = None) -> Call[Reload]:
    """Reload the service's configuration, or that of ``all`` nodes; return the changes of the node that answers.

    Raises:
        InvalidRequest: the configuration is not usable; nothing has changed.
        StateConflict: a changed setting needs a restart; nothing has changed.
    """
    return on_nodes(post("/v1/config/reload", into(Reload)), nodes)


def get_health() -> Call[Health]:
    """Return the health of the process; it needs no key."""
    return get("/healthz", into(Health))


def get_readiness() -> Call[Readiness]:
    """Return at once whether models and store are ready.

    Raises:
        NotNow: they are not; the text says what is missing.
    """
    return replace(get("/readyz", into(Readiness)), is_repeatable=False)  # a 503 is an answer here


def get_metrics() -> Call[str]:
    """Return all metrics in Prometheus' text format."""
    return get("/metrics", as_text)

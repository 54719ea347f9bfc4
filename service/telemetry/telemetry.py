"""Takes a node's facts into metrics, and into traces where they are switched on."""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from service.config.schema import TelemetryConfig
from service.conversations.job.job import JobId
from service.conversations.record.measures import RequestMeasures
from service.errors import ConfigError
from service.scheduling.scheduler import Scheduler
from service.store.records import Record
from service.store.store import Store
from service.telemetry.fleet_metrics import FleetCollector, McpCollector, PoolCollector, Sampler
from service.telemetry.metrics import Metrics
from workers.fleet import Fleet
from workers.tools.mcp import McpState

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from service.telemetry.span_maker import Spans

LAST_SPANS_S: Final = 5.0  # time to send the last spans when the service stops
logger = logging.getLogger(__name__)
trace_parent: ContextVar[str | None] = ContextVar("trace_parent", default=None)
"""The header ``traceparent`` of the request that is being answered."""


class Telemetry:
    """Takes facts from the scheduler and its requests; a failure here is logged, and costs no turn."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._spans: Spans | None = None

    def __repr__(self) -> str:
        return f"<Telemetry traces={self._spans}>"

    def trace(self, spans: "Spans") -> None:
        """Make spans from now on."""
        self._spans = spans

    def record_facts(self, facts: Sequence[Record]) -> None:
        """Record facts of jobs."""
        try:
            self._metrics.turns.count_facts(facts)
            if self._spans is not None:
                self._spans.record_facts(facts)
        except Exception:
            logger.exception("telemetry: a defect of Roundhouse; facts are not recorded")

    def take_request(self, request: RequestMeasures) -> None:
        """Record a client's ended request."""
        try:
            self._metrics.turns.take_request(request)
            if self._spans is not None:
                self._spans.take_request(request)
        except Exception:
            logger.exception("telemetry: a defect of Roundhouse; a request is not recorded")

    def note_job(self, job_id: JobId) -> None:
        """Record the trace of the request that posted a job."""
        posted_by = trace_parent.get()
        if self._spans is not None and posted_by is not None:
            self._spans.note_job(job_id, posted_by)


def watch(
    metrics: Metrics,
    fleet: Fleet,
    scheduler: Scheduler,
    store: Store,
    mcp_states: Callable[[], Sequence[tuple[str, McpState]]],
) -> Sampler:
    """Add the parts of a node to its metrics; return the sampler, which must be run."""
    sampler = Sampler(fleet, store)
    metrics.watch_starts(fleet)
    metrics.add(FleetCollector(fleet, lambda: scheduler.view, lambda: sampler.views))
    metrics.add(PoolCollector(scheduler, store, fleet.models, metrics.model_name))
    metrics.add(McpCollector(mcp_states))
    metrics.add(sampler)
    return sampler


@asynccontextmanager
async def tracing(
    config: TelemetryConfig, telemetry: Telemetry, fleet: Fleet, scheduler: Scheduler, instance: str
) -> AsyncIterator[None]:
    """Make spans for a block, if the configuration says so; the last ones are sent at its end.

    Raises:
        ConfigError: the packages that tracing needs are not installed.
    """
    if not config.traces:
        yield
        return
    try:
        from service.telemetry.span_maker import exporting_provider  # noqa: PLC0415 - only tracing needs it
    except ImportError as error:
        raise ConfigError(f"telemetry.traces: pip install 'roundhouse-llm[otel]' ({error})") from error
    provider = await anyio.to_thread.run_sync(exporting_provider, instance)
    spans = spans_of(provider, fleet, scheduler)
    telemetry.trace(spans)
    try:
        yield
    finally:
        spans.close()
        with anyio.move_on_after(LAST_SPANS_S, shield=True):
            await anyio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)


def spans_of(provider: "TracerProvider", fleet: Fleet, scheduler: Scheduler) -> "Spans":
    """Return the span maker of a node."""
    from service.telemetry import span_names as names  # noqa: PLC0415 - as above
    from service.telemetry.span_maker import Spans, attributes_by_worker  # noqa: PLC0415 - as above

    tracer = provider.get_tracer(names.SCOPE, schema_url=names.SCHEMA_URL)
    return Spans(tracer, attributes_by_worker(fleet), scheduler.works.job_name)

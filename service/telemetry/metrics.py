"""The metrics for Prometheus: counted where they happen, or read from their owner at each scrape.

No caller can invent label values: models, tools, routes and reasons are bounded in number (``CappedNames``).
"""

import time
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from service.store.news import FactsLost, JobsCommitted, LeaseRenewed, StoreEvent
from service.telemetry.turn_metrics import MOST_TOOLS, WAIT_BUCKETS, TurnMetrics
from workers.distribution import own_version
from workers.fleet import Fleet
from workers.policy.weights import UpdatePhase
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

OTHER: Final = "other"
MOST_CHARS: Final = 64
PHASE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
WRITE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MOST_MODELS: Final = 100  # models beside the configuration's: a shared store brings turns of other nodes' models
ASKED: Final = "asked"  # reason for replacing an engine that was not broken


class CappedNames:
    """Bounds the number of values of a label; ``known`` names have reserved places, others share the rest."""

    def __init__(self, most: int, known: Iterable[str] = ()) -> None:
        self._most = most
        self._shown = {name: _shown(name) for name in known}

    def __repr__(self) -> str:
        return f"<CappedNames {len(self._shown)} of {self._most}>"

    def __call__(self, name: str) -> str:
        """Return the label value for a name; ``other`` if all places are taken."""
        shown = self._shown.get(name)
        if shown is not None:
            return shown
        if len(self._shown) >= self._most:
            return OTHER
        shown = self._shown[name] = _shown(name)
        return shown


def _shown(name: str) -> str:
    return name[:MOST_CHARS].encode("utf-8", "replace").decode()


class Metrics:
    """The metrics of one Roundhouse with ``models``, in a registry of its own."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self._registry = CollectorRegistry()
        self.model_name = CappedNames(len(models) + MOST_MODELS, models)
        self.turns = TurnMetrics(self._registry, self.model_name, CappedNames(MOST_TOOLS))
        ProcessCollector(registry=self._registry)
        build = Gauge("roundhouse_build_info", "The running version.", ("version",), registry=self._registry)
        build.labels(own_version()).set(1)
        self._phases = self._seconds(
            "weight_update_phase",
            "Duration of a phase of a weight update, over all workers of a model.",
            ("model", "phase", "outcome"),
            PHASE_BUCKETS,
        )
        self._starts = self._seconds("worker_start", "How long engines took to be ready.", ("model",), PHASE_BUCKETS)
        self._restarts = self._counter(
            "worker_restarts", "Engines started in place of another.", ("model", "worker", "reason")
        )
        self._writes = self._seconds("store_write", "Time from submitting facts to durability.", (), WRITE_BUCKETS)
        self._lease = Gauge(
            "roundhouse_lease_renewed_timestamp_seconds", "When the lease was last renewed.", registry=self._registry
        )
        self._lost = self._counter("store_facts_lost", "Facts and accounts that cannot be stored, and are lost.", ())
        self._deliveries = self._counter("webhook_deliveries", "Attempts to deliver a webhook.", ("outcome",))
        requests = self._counter("http_requests", "Answered HTTP requests.", ("route", "method", "code"))
        times = self._seconds(
            "http_request", "Time from a request to the beginning of its answer.", ("route", "method"), WAIT_BUCKETS
        )
        self._requests, self._request_times = cache(requests.labels), cache(times.labels)
        self._starting: dict[tuple[str, str], tuple[int, float | None]] = {}

    def __repr__(self) -> str:
        return "<Metrics>"

    def _counter(self, name: str, text: str, labels: Sequence[str]) -> Counter:
        return Counter(f"roundhouse_{name}", text, labels, registry=self._registry)

    def _seconds(self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
        return Histogram(f"roundhouse_{name}_seconds", text, labels, buckets=buckets, registry=self._registry)

    def add(self, collector: Collector) -> None:
        """Include a collector's metrics."""
        self._registry.register(collector)

    def watch_starts(self, fleet: Fleet) -> None:
        """Count a fleet's starts and restarts too."""
        fleet.subscribe(self._note_worker)

    def observe_phase(self, model: str, phase: UpdatePhase, seconds: float, outcome: str) -> None:
        """Record a finished phase of a weight update."""
        self._phases.labels(model, phase.value, outcome).observe(seconds)

    def observe_request(self, route: str, method: str, code: int, seconds: float) -> None:
        """Record the answer to an HTTP request, by its route's template."""
        self._requests(route, method, str(code)).inc()
        self._request_times(route, method).observe(seconds)

    def count_delivery(self, outcome: str) -> None:
        """Count a try to deliver a webhook, by its outcome."""
        self._deliveries.labels(outcome).inc()

    def take_news(self, event: StoreEvent) -> None:
        """Record an event of the store."""
        match event:
            case JobsCommitted():
                self._writes.observe(event.seconds)
            case LeaseRenewed():
                self._lease.set(time.time())
            case FactsLost():
                self._lost.inc(event.count)
            case _:
                pass

    def _note_worker(self, worker: SupervisedWorker) -> None:
        """Record a change of a worker's state; changes may arrive out of order."""
        place = (worker.spec.name, worker.spec.id)
        known, began_s = self._starting.get(place, (0, None))
        if worker.now.incarnation > known:
            reason = worker.recorder.reason_of(worker.now.incarnation - 1)
            # The first engine of a model on a lane follows another model's, and is no restart.
            if known or reason is not None:
                self._restarts.labels(*place, reason or ASKED).inc()
            began_s = time.monotonic()
        is_spare = worker.now.state is WorkerState.DRAINING and Hold.SPARE in worker.now.holds
        if (worker.now.state is WorkerState.READY or is_spare) and began_s is not None:
            self._starts.labels(worker.spec.name).observe(time.monotonic() - began_s)
            began_s = None
        self._starting[place] = (worker.now.incarnation, began_s)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

"""The metrics for Prometheus: counted where they happen, or read from their owner at each scrape."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.scheduling.core.ahead.yields import ReadFor
from workers.fleet import Fleet
from workers.policy.weights import UpdatePhase

PHASE_BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """The metrics of one Roundhouse, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._phases = Histogram(
            "roundhouse_weight_update_phase_seconds",
            "How long a phase of an update of weights took, over all workers of a model.",
            ("model", "phase", "outcome"),
            buckets=PHASE_BUCKETS,
            registry=self._registry,
        )

    def __repr__(self) -> str:
        return "<Metrics>"

    def watch(self, fleet: Fleet) -> None:
        """Tell of a fleet's workers too."""
        self._registry.register(_FleetCollector(fleet))

    def watch_read_ahead(self, read_ahead: Callable[[], Mapping[tuple[str, ReadFor], int]]) -> None:
        """Tell of tokens that were read beforehand too, by model and what became of them."""
        self._registry.register(_ReadAheadCollector(read_ahead))

    def observe_phase(self, model: str, phase: UpdatePhase, seconds: float, outcome: str) -> None:
        """Take the end of one phase of an update of weights."""
        self._phases.labels(model, phase.value, outcome).observe(seconds)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)


class _ReadAheadCollector(Collector):
    """Reads what the scheduler has counted."""

    def __init__(self, read_ahead: Callable[[], Mapping[tuple[str, ReadFor], int]]) -> None:
        self._read_ahead = read_ahead

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        tokens = CounterMetricFamily(
            "roundhouse_prewarm_tokens", "Tokens of prompts that were read beforehand.", labels=("model", "result")
        )
        for place, count in self._read_ahead().items():
            tokens.add_metric(place, count)
        return (tokens,)


class _FleetCollector(Collector):
    """Reads the workers when it is asked: there is one truth about them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        names = ("model", "worker")
        ready = GaugeMetricFamily("roundhouse_worker_ready", "Whether a worker takes requests.", labels=names)
        slots = GaugeMetricFamily("roundhouse_worker_slots", "How many requests a worker may have.", labels=names)
        in_use = GaugeMetricFamily("roundhouse_worker_slots_in_use", "How many requests it has.", labels=names)
        starts = CounterMetricFamily("roundhouse_worker_starts", "How many engines it has started.", labels=names)
        version = GaugeMetricFamily("roundhouse_worker_weight_version", "Which weights it has.", labels=names)
        prefill = GaugeMetricFamily(
            "roundhouse_worker_prefill_token_seconds", "What a token of a prompt takes its engine.", labels=names
        )
        decode = GaugeMetricFamily(
            "roundhouse_worker_decode_token_seconds", "What a token of an answer takes its engine.", labels=names
        )
        error = GaugeMetricFamily(
            "roundhouse_worker_latency_error_ratio",
            "By what part of what they took predictions of its answers were off, in the middle.",
            labels=names,
        )
        budget = GaugeMetricFamily(
            "roundhouse_worker_kv_budget_tokens", "How much of its KV cache a worker lends to turns.", labels=names
        )
        used = GaugeMetricFamily(
            "roundhouse_worker_kv_used_tokens", "How much of its KV cache an engine uses.", labels=names
        )
        for worker in self._fleet:
            place = (worker.spec.name, worker.spec.id)
            measured = (
                (prefill, worker.latency.pace.prefill_s),
                (decode, worker.latency.pace.step_s),
                (error, worker.latency.error),
                (budget, worker.kv.budget),
                (used, worker.kv.cache.used if worker.kv.cache and worker.kv.budget else None),
            )
            for gauge, value in measured:
                if value is not None:
                    gauge.add_metric(place, value)
            ready.add_metric(place, float(worker.is_available))
            slots.add_metric(place, worker.slots)
            in_use.add_metric(place, worker.slots_in_use)
            starts.add_metric(place, worker.incarnation)
            if worker.weights is not None:
                version.add_metric(place, worker.weights.version)
        swaps = CounterMetricFamily(
            "roundhouse_lane_swaps", "How many models were loaded on a lane.", labels=("lane", "device")
        )
        resident = GaugeMetricFamily(
            "roundhouse_lane_resident", "Whether a model's engine stands on a lane.", labels=("lane", "model")
        )
        load = GaugeMetricFamily(
            "roundhouse_lane_load_seconds", "How long the last load of a model took.", labels=("lane", "model")
        )
        for lane in self._fleet.lanes.lanes:
            swaps.add_metric((lane.lane.id, lane.lane.device.uuid), lane.swaps)
            for model in lane.workers:
                resident.add_metric((lane.lane.id, model), float(lane.resident == model))
            for model, seconds in lane.loads_s.items():
                load.add_metric((lane.lane.id, model), seconds)
        updates = CounterMetricFamily(
            "roundhouse_weight_updates", "How many updates of weights have ended, and how.", labels=("model", "state")
        )
        current = GaugeMetricFamily("roundhouse_model_weight_version", "Which weights a model has.", labels=("model",))
        for name, weights in self._fleet.weights.items():
            current.add_metric((name,), weights.current.version)
            for state, count in weights.ended.items():
                updates.add_metric((name, state.value), count)
        return (
            ready,
            slots,
            in_use,
            starts,
            version,
            prefill,
            decode,
            error,
            budget,
            used,
            swaps,
            resident,
            load,
            updates,
            current,
        )

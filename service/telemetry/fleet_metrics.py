"""The workers and their engines, read from the fleet at each scrape: there is one truth about them."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.scheduling.core.view import PoolsView
from workers.fleet import Fleet
from workers.health.probes import KernelView
from workers.states import WorkerState


class FleetCollector(Collector):
    """Reads the workers when it is asked.

    ``view`` gives the scheduler's pools, ``views`` what the kernel knew of each
    worker's engine at the last look.
    """

    def __init__(
        self, fleet: Fleet, view: Callable[[], PoolsView], views: Callable[[], Mapping[str, KernelView]]
    ) -> None:
        self._fleet = fleet
        self._view = view
        self._views = views

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        return (*self._workers(), *self._engines(), *self._lanes(), *self._weights())

    def _workers(self) -> Iterable[Metric]:
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
        reserved = GaugeMetricFamily(
            "roundhouse_worker_kv_reserved_tokens", "How much of its KV cache turns have reserved.", labels=names
        )
        preemptions = CounterMetricFamily(
            "roundhouse_worker_kv_preemptions", "How often requests gave way to others in the engine.", labels=names
        )
        state = GaugeMetricFamily("roundhouse_worker_state", "Which state a worker is in.", labels=(*names, "state"))
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
            for each in WorkerState:
                state.add_metric((*place, each.value), float(worker.state is each))
            if worker.kv.budget is not None:
                reserved.add_metric(place, self._view().reserved(worker.spec.id))
            if worker.kv.cache is not None:
                preemptions.add_metric(place, worker.kv.cache.preemptions)
            if worker.weights is not None:
                version.add_metric(place, worker.weights.version)
        return ready, slots, in_use, starts, version, prefill, decode, error, budget, used, reserved, preemptions, state

    def _engines(self) -> Iterable[Metric]:
        names = ("model", "worker")
        memory = GaugeMetricFamily(
            "roundhouse_engine_memory_bytes", "Resident memory of an engine's processes.", labels=names
        )
        cpu = CounterMetricFamily("roundhouse_engine_cpu_seconds", "CPU time of an engine's processes.", labels=names)
        incidents = CounterMetricFamily("roundhouse_incidents", "Incidents of engines.", labels=(*names, "reason"))
        views = self._views()
        for worker in self._fleet:
            place = (worker.spec.name, worker.spec.id)
            view = views.get(worker.spec.id)
            if view is not None and view.processes:
                memory.add_metric(place, sum(process.rss_bytes for process in view.processes))
                cpu.add_metric(place, view.cpu_s)
            for reason, count in worker.recorder.counts.items():
                incidents.add_metric((*place, reason), count)
        return memory, cpu, incidents

    def _lanes(self) -> Iterable[Metric]:
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
        return swaps, resident, load

    def _weights(self) -> Iterable[Metric]:
        updates = CounterMetricFamily(
            "roundhouse_weight_updates", "How many updates of weights have ended, and how.", labels=("model", "state")
        )
        current = GaugeMetricFamily("roundhouse_model_weight_version", "Which weights a model has.", labels=("model",))
        for name, weights in self._fleet.weights.items():
            current.add_metric((name,), weights.current.version)
            for state, count in weights.ended.items():
                updates.add_metric((name, state.value), count)
        return updates, current

"""The workers and their engines, read from the fleet at each scrape: there is one truth about them."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.to_thread
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.conversations.states import TurnState
from service.errors import StoreUnavailable
from service.scheduling.core.view import PoolsView
from service.scheduling.scheduler import Scheduler
from service.store import queries
from service.store.store import Store
from workers.fleet import Fleet
from workers.health.probes import KernelView, look_at_tree
from workers.notifier import Notifier
from workers.states import WorkerState
from workers.tools.mcp import McpState

PAUSE_S: Final = 10.0  # at least, between two looks
SHARE: Final = 300  # a look that takes long comes so much rarer: it costs at most 0.3 % of a core


class Sampler(Collector):
    """Its newest look is what a scrape shows; ``run`` must be running, and each scrape asks for another look."""

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self._fleet = fleet
        self._store = store
        self._asked = Notifier()
        self._views: Mapping[str, KernelView] = {}
        self._jobs: Mapping[str, int] = {}
        self._conversations: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<Sampler jobs={self._jobs}>"

    @property
    def views(self) -> Mapping[str, KernelView]:
        """The kernel's view of each worker's engine."""
        return self._views

    async def run(self) -> None:
        """Look whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            began_at = time.monotonic()
            roots = {str(worker.spec.id): worker.supervisor.root_pid for worker in self._fleet}
            self._views = await anyio.to_thread.run_sync(_look, roots)
            with suppress(StoreUnavailable):  # what was so before stays: ``roundhouse_store_up`` tells of it
                self._jobs, self._conversations = await self._store.read(queries.count_states)
            await anyio.sleep(max(PAUSE_S, SHARE * (time.monotonic() - began_at)))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last sample, and ask for another."""
        self._asked.notify()
        jobs = GaugeMetricFamily("roundhouse_jobs", "Jobs in the store.", labels=("state",))
        conversations = GaugeMetricFamily(
            "roundhouse_stored_conversations", "Conversations in the store.", labels=("state",)
        )
        for family, counts in ((jobs, self._jobs), (conversations, self._conversations)):
            for state, count in counts.items():
                family.add_metric((state,), count)
        return jobs, conversations


def _look(roots: Mapping[str, int | None]) -> Mapping[str, KernelView]:
    return {worker: look_at_tree(root) for worker, root in roots.items() if root is not None}


class PoolCollector(Collector):
    """Reads the scheduler of a node, and whether its store is well."""

    def __init__(
        self, scheduler: Scheduler, store: Store, models: Callable[[], Sequence[str]], name: Callable[[str], str]
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._models = models
        self._name = name

    def collect(self) -> Iterable[Metric]:
        """Return the present metrics of turns, the store and prefixes."""
        turns = GaugeMetricFamily("roundhouse_turns", "Turns that have not ended.", labels=("model", "pool"))
        wanted = GaugeMetricFamily("roundhouse_slots_wanted", "Slots that could be used at once.", labels=("model",))
        by_model = self._scheduler.view.by_model()
        for model in dict.fromkeys((*self._models(), *by_model)):
            counts = by_model.get(model, {})
            for pool in (TurnState.PENDING, TurnState.READY, TurnState.IN_FLIGHT):
                turns.add_metric((self._name(model), pool.value), counts.get(pool, 0))
            wanted.add_metric((self._name(model),), counts.get(TurnState.READY, 0) + counts.get(TurnState.IN_FLIGHT, 0))
        oldest = GaugeMetricFamily(
            "roundhouse_oldest_ready_turn_seconds", "How long the turn waits that has waited longest."
        )
        oldest.add_metric((), self._oldest_s())
        up = GaugeMetricFamily("roundhouse_store_up", "Whether the store takes writes.")
        up.add_metric((), float(self._store.trouble is None))
        counters = self._scheduler.counters
        prefix = CounterMetricFamily(
            "roundhouse_prefix_tokens", "Tokens of prompts that engines could reuse, and did.", labels=("result",)
        )
        prefix.add_metric(("reusable",), counters.reusable_tokens)
        prefix.add_metric(("reused",), counters.reused_tokens)
        integrity = CounterMetricFamily(
            "roundhouse_integrity_faults", "Faults in the scheduler's tables that its check at idle has found."
        )
        integrity.add_metric((), counters.integrity_faults)
        return turns, wanted, oldest, up, prefix, integrity

    def _oldest_s(self) -> float:
        known = (self._scheduler.turns.oldest_ready_at, self._scheduler.requests.oldest_ready_at)
        since = min((at for at in known if at is not None), default=None)
        return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())


class McpCollector(Collector):
    """Reads how the MCP servers of each model stand."""

    def __init__(self, states: Callable[[], Sequence[tuple[str, McpState]]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Return the present metrics of MCP servers."""
        up = GaugeMetricFamily(
            "roundhouse_mcp_server_up", "Whether an MCP server is connected.", labels=("model", "server")
        )
        for model, state in self._states():
            up.add_metric((model, state.name), float(state.trouble is None))
        return (up,)


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
        """Return the present metrics of workers, engines, lanes and weights."""
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
                (prefill, worker.requests.latency.pace.prefill_s),
                (decode, worker.requests.latency.pace.step_s),
                (error, worker.requests.latency.error),
                (budget, worker.kv.budget),
                (used, worker.kv.cache.used if worker.kv.cache and worker.kv.budget else None),
            )
            for gauge, value in measured:
                if value is not None:
                    gauge.add_metric(place, value)
            ready.add_metric(place, float(worker.now.is_available))
            slots.add_metric(place, worker.slots.total)
            in_use.add_metric(place, worker.slots.in_use)
            starts.add_metric(place, worker.now.incarnation)
            for each in WorkerState:
                state.add_metric((*place, each.value), float(worker.now.state is each))
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

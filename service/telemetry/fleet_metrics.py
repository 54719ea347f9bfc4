"""Metrics of workers and their engines, read from the fleet, their one source, at each scrape."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import anyio
import anyio.to_thread
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.conversations.job.states import TurnState
from service.errors import StoreUnavailable
from service.scheduling.core.view import PoolsView
from service.scheduling.scheduler import Scheduler
from service.store import job_rows
from service.store.store import Store
from workers.fleet import Fleet
from workers.health.probes import KernelView, look_at_tree
from workers.notifier import Notifier
from workers.states import Hold, WorkerState
from workers.tools.mcp import McpState

PAUSE_S: Final = 10.0  # least pause between two samples
SHARE: Final = 300  # least pause in times of a sample's cost, so that it takes at most 0.3 % of a core


class Sampler(Collector):
    """Gives each scrape the newest sample, and takes another one after it; ``run`` must be running."""

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
        """Sample whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            began_at = time.monotonic()
            roots = {str(worker.spec.id): worker.supervisor.root_pid for worker in self._fleet}
            self._views = await anyio.to_thread.run_sync(_look, roots)
            with suppress(StoreUnavailable):  # old counts stay; ``roundhouse_store_up`` reports the trouble
                self._jobs, self._conversations = await self._store.read(job_rows.count_states)
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
    """Reads the scheduler of a node, and the state of its store."""

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
        oldest = GaugeMetricFamily("roundhouse_oldest_ready_turn_seconds", "Longest time that a ready turn has waited.")
        oldest.add_metric((), self._oldest_s())
        up = GaugeMetricFamily("roundhouse_store_up", "Whether the store takes writes.")
        up.add_metric((), float(self._store.trouble is None))
        counters = self._scheduler.counters
        prefix = CounterMetricFamily(
            "roundhouse_prefix_tokens", "Prompt tokens that engines could reuse, and did reuse.", labels=("result",)
        )
        prefix.add_metric(("reusable",), counters.reusable_tokens)
        prefix.add_metric(("reused",), counters.reused_tokens)
        integrity = CounterMetricFamily(
            "roundhouse_integrity_faults", "Faults in the scheduler's tables that its check at idle has found."
        )
        integrity.add_metric((), counters.integrity_faults)
        return turns, wanted, oldest, up, prefix, integrity, *self._recorded()

    def _recorded(self) -> tuple[Metric, Metric]:
        tokens = self._scheduler.tokens
        recorded = CounterMetricFamily(
            "roundhouse_recorded_turns", "Turns whose tokens were recorded, by what is not whole.", labels=("record",)
        )
        counts = {"whole": tokens.turns - tokens.partial, "partial": tokens.partial, "dropped": tokens.dropped}
        for name, count in counts.items():
            recorded.add_metric((name,), count)
        rows = CounterMetricFamily("roundhouse_rollout_rows", "Rows of rollouts for readers.", labels=("outcome",))
        for name in ("delivered", "partial", "stale"):
            rows.add_metric((name,), tokens.rows[name])
        return recorded, rows

    def _oldest_s(self) -> float:
        known = (self._scheduler.turns.oldest_ready_at, self._scheduler.requests.queue.oldest_ready_at)
        since = min((at for at in known if at is not None), default=None)
        return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())


class McpCollector(Collector):
    """Reads the state of each model's MCP servers."""

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
    """Reads the workers at each scrape.

    ``view`` gives the scheduler's pools, ``views`` the kernel's view of each worker's engine in the last sample.
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
        ready = GaugeMetricFamily("roundhouse_worker_ready", "Whether the worker takes requests.", labels=names)
        slots = GaugeMetricFamily("roundhouse_worker_slots", "Turns that may be in flight on the worker.", labels=names)
        in_use = GaugeMetricFamily("roundhouse_worker_slots_in_use", "Turns in flight on the worker.", labels=names)
        starts = CounterMetricFamily("roundhouse_worker_starts", "Engines that the worker has started.", labels=names)
        lost = CounterMetricFamily(
            "roundhouse_worker_continuations_refused", "Half answers that did not go on.", labels=names
        )
        version = GaugeMetricFamily("roundhouse_worker_weight_version", "Version of its weights.", labels=names)
        prefill = GaugeMetricFamily(
            "roundhouse_worker_prefill_token_seconds", "Measured time per prompt token.", labels=names
        )
        decode = GaugeMetricFamily(
            "roundhouse_worker_decode_token_seconds", "Measured time per answer token.", labels=names
        )
        error = GaugeMetricFamily(
            "roundhouse_worker_latency_error_ratio",
            "Median relative error of predicted answer times.",
            labels=names,
        )
        budget = GaugeMetricFamily(
            "roundhouse_worker_kv_budget_tokens", "Part of its KV cache that the worker gives to turns.", labels=names
        )
        used = GaugeMetricFamily(
            "roundhouse_worker_kv_used_tokens", "Part of its KV cache that the engine uses.", labels=names
        )
        reserved = GaugeMetricFamily(
            "roundhouse_worker_kv_reserved_tokens", "Part of the KV budget that turns have reserved.", labels=names
        )
        preemptions = CounterMetricFamily(
            "roundhouse_worker_kv_preemptions", "Requests that the engine preempted for others.", labels=names
        )
        state = GaugeMetricFamily("roundhouse_worker_state", "1 for the current state.", labels=(*names, "state"))
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
            slots.add_metric(place, 0 if Hold.SPARE in worker.now.holds else worker.slots.total)
            in_use.add_metric(place, worker.slots.in_use)
            starts.add_metric(place, worker.now.incarnation)
            lost.add_metric(place, worker.requests.begins.refusals)
            for each in WorkerState:
                state.add_metric((*place, each.value), float(worker.now.state is each))
            if worker.kv.budget is not None:
                reserved.add_metric(place, self._view().reserved(worker.spec.id))
            if worker.kv.cache is not None:
                preemptions.add_metric(place, worker.kv.cache.preemptions)
            if worker.weights is not None:
                version.add_metric(place, worker.weights.version)
        of_cache = (budget, used, reserved, preemptions)
        return ready, slots, in_use, starts, lost, version, prefill, decode, error, *of_cache, state

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
        swaps = CounterMetricFamily("roundhouse_lane_swaps", "Models loaded on the lane.", labels=("lane", "device"))
        resident = GaugeMetricFamily(
            "roundhouse_lane_resident", "Whether the model's engine is on the lane.", labels=("lane", "model")
        )
        load = GaugeMetricFamily(
            "roundhouse_lane_load_seconds", "Duration of the model's last load.", labels=("lane", "model")
        )
        for lane in self._fleet.lanes:
            swaps.add_metric((lane.lane.id, lane.lane.device.uuid), lane.swaps)
            for model in lane.workers:
                resident.add_metric((lane.lane.id, model), float(lane.resident == model))
            for model, seconds in lane.loads_s.items():
                load.add_metric((lane.lane.id, model), seconds)
        return swaps, resident, load

    def _weights(self) -> Iterable[Metric]:
        updates = CounterMetricFamily(
            "roundhouse_weight_updates", "Weight updates that have ended.", labels=("model", "state")
        )
        current = GaugeMetricFamily("roundhouse_model_weight_version", "Version of its weights.", labels=("model",))
        for name, weights in self._fleet.weights.items():
            current.add_metric((name,), weights.current.version)
            for state, count in weights.ended.items():
                updates.add_metric((name, state.value), count)
        return updates, current

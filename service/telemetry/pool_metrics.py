"""What waits and what runs, read from its owners at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.conversations.states import TurnState
from service.scheduling.scheduler import Scheduler
from service.store.store import Store
from workers.tools.mcp import McpState


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
        """Return what is so now."""
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
        return turns, wanted, oldest, up, prefix

    def _oldest_s(self) -> float:
        known = (self._scheduler.oldest_ready_at, self._scheduler.requests.oldest_ready_at)
        since = min((at for at in known if at is not None), default=None)
        return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())


class McpCollector(Collector):
    """Reads how the MCP servers of each model stand."""

    def __init__(self, states: Callable[[], Sequence[tuple[str, McpState]]]) -> None:
        self._states = states

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        up = GaugeMetricFamily(
            "roundhouse_mcp_server_up", "Whether an MCP server is connected.", labels=("model", "server")
        )
        for model, state in self._states():
            up.add_metric((model, state.name), float(state.trouble is None))
        return (up,)

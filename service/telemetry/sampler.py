"""What is too slow to be read at a scrape: looked at beside it, and only while somebody scrapes."""

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

import anyio
import anyio.to_thread
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import StoreUnavailable
from service.store import queries
from service.store.store import Store
from workers.fleet import Fleet
from workers.health.probes import KernelView, look_at_tree
from workers.notifier import Notifier

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
        """What the kernel knew of each worker's engine."""
        return self._views

    async def run(self) -> None:
        """Look whenever asked, until cancelled."""
        while True:
            await self._asked.wait()
            began_at = time.monotonic()
            roots = {str(worker.spec.id): worker.root_pid for worker in self._fleet}
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

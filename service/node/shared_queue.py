"""What joins a node's scheduler to its store, and to the other nodes on it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from anyio.abc import TaskGroup

from service.config.schema import StoreConfig
from service.conversations.job import JobId, TurnKey
from service.conversations.states import TurnState
from service.errors import StoreUnavailable
from service.node.followers import JobFollowers
from service.node.intake import Intake
from service.scheduling.outlet import Pause
from service.scheduling.scheduler import Scheduler
from service.store import queries
from service.store.neighbours import Alone, Neighbours
from service.store.records import Record, StoredToolCall
from service.store.store import Store, StoreWatchers
from workers.fleet import Fleet


class StoreOutlet:
    """Where a scheduler's facts and its conversations go: a ``service.scheduling.outlet.Outlet``."""

    def __init__(self, store: Store, models: Sequence[str], lease_s: float, watch: JobFollowers) -> None:
        self._store = store
        self._watch = watch
        self._models = models
        self._lease_s = lease_s
        self._missed_at: dict[str, float] = {}  # models that no other node had when it was asked for
        self.neighbours: Neighbours = Alone()

    def __repr__(self) -> str:
        return f"<StoreOutlet to {self._store!r}>"

    def append_nowait(self, records: Sequence[Record], on_durable: Callable[[], None]) -> None:
        """Take facts that belong together, in order, and what to call when they are durable."""
        self._store.append_nowait(records, on_durable)

    async def append(self, records: Sequence[Record]) -> bool:
        """Take facts, and return when they are durable; False if they were refused, as another node's by now."""
        return await self._store.append(records)

    async def calls_of(self, key: TurnKey) -> Sequence[StoredToolCall]:
        """Return the calls of tools that a turn has begun, in whatever attempt."""
        return await self._store.read(queries.tool_calls(key))

    def release_nowait(self, wants: Mapping[tuple[JobId, str], Sequence[str]]) -> None:
        """Leave conversations to other nodes, each with the models that it needs next."""
        self._store.release_nowait(wants)

    def is_followed(self, job_id: JobId) -> bool:
        """Whether anybody looks at a job while it runs."""
        return self._watch.is_followed(job_id)

    def is_elsewhere(self, model: str) -> bool:
        """Whether a model is for other nodes: one has it, or this one never will."""
        if isinstance(self.neighbours, Alone):
            return False
        if model not in self._models:
            return True
        if model in self.neighbours.models():
            self._missed_at.pop(model, None)
            return True
        # One that starts this moment is known a little later; only after a lease is nobody there.
        return time.monotonic() - self._missed_at.setdefault(model, time.monotonic()) < self._lease_s


def watch_store(store: Store, tasks: TaskGroup, scheduler: Scheduler, intake: Intake, watch: JobFollowers) -> None:
    """Have the scheduler follow how the store is: it pauses while that is in trouble, and starts over after a fence."""
    # The store calls from no task, and whatever starts turns has to run in one.
    news: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()

    def committed(jobs: frozenset[JobId]) -> None:
        watch.committed(jobs)
        intake.hint(is_work=False)  # a turn may have ended, and left its slot to another

    async def follow(told: str | None) -> None:
        if told is None:
            scheduler.unpause(Pause.STORE)
            intake.hint(is_work=True)  # what was claimed as the trouble began, and never answered
        else:
            scheduler.pause(Pause.STORE, f"the store, to be well again: {told}")

    async def hear() -> None:
        while True:
            await (await news.get())()

    tasks.start_soon(hear)
    store.subscribe(
        StoreWatchers(
            committed=committed,
            troubled=lambda told: news.put_nowait(partial(follow, told)),
            fenced=lambda: news.put_nowait(intake.start_over),
        )
    )


async def join_cluster(
    config: StoreConfig,
    store: Store,
    tasks: TaskGroup,
    scheduler: Scheduler,
    intake: Intake,
    watch: JobFollowers,
    fleet: Fleet,
) -> Neighbours:
    """Become one of several nodes; the lease is kept as long as ``tasks`` run."""
    from service.store.cluster import Cluster, LeaseEvents, NodeReport  # noqa: PLC0415 - with it comes psycopg

    def report() -> NodeReport:
        view = scheduler.view
        counts = {job_id: view.of_job(job_id) for job_id in view.jobs()}
        return NodeReport(
            node_id=store.node_id,
            models=fleet.served_names(),
            counts={name: (count[TurnState.READY], count[TurnState.IN_FLIGHT]) for name, count in counts.items()},
        )

    def ending() -> None:
        scheduler.pause(Pause.LEASE, "the lease of this node to be renewed: another may take over at any moment")
        scheduler.interrupt_all()

    async def learn() -> None:
        with suppress(StoreUnavailable):  # whoever writes is told
            await store.flush()

    def fenced() -> None:
        tasks.start_soon(learn)

    await store.flush()  # the first write makes this node a member
    cluster = Cluster(config.url, config.lease_s, report)

    def renewed() -> None:
        scheduler.unpause(Pause.LEASE)
        scheduler.look_elsewhere()

    events = LeaseEvents(
        ending=ending,
        renewed=renewed,
        fenced=fenced,
        changed=watch.committed,
        work=lambda: intake.hint(is_work=True),
    )
    await tasks.start(cluster.run, events)
    fleet.subscribe(lambda _worker: intake.hint(is_work=True))  # one that gets ready has slots for what waits
    return cluster

"""One Roundhouse, put together: the only place that knows all its parts."""

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from service.config.schema import Config
from service.conversations.job import JobId
from service.conversations.states import TurnState
from service.intake import Intake
from service.jobs import Jobs
from service.rules import rules_of
from service.scheduling.policies import POLICIES
from service.scheduling.scheduler import Pause, Scheduler
from service.store.alone import Alone, Neighbours
from service.store.opening import is_shared, open_database
from service.store.store import Store, StoreWatchers, open_store
from service.tools import open_tools
from service.watch import JobWatch
from workers.fleet import Fleet
from workers.spec import WorkerSpec

STOPPING: Final = "the service is stopping"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A running Roundhouse."""

    fleet: Fleet
    scheduler: Scheduler
    store: Store
    intake: Intake
    jobs: Jobs

    async def shut_down(self, drain_s: float, hurry: anyio.Event) -> None:
        """Admit nothing new, give turns in flight ``drain_s``, then stop every engine; ``hurry`` cuts it short."""
        self.jobs.close()
        self.scheduler.close_nowait()
        self.intake.hint(is_work=True)  # it ends with the scheduler's closing
        self.fleet.drain_nowait(STOPPING)
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as patience:
                tasks.start_soon(self._hurry, hurry, patience)
                with anyio.move_on_after(drain_s):
                    await self.scheduler.wait_idle()
                await self.fleet.stop(STOPPING)
            await self.fleet.stop(STOPPING, at_once=hurry.is_set())
            tasks.cancel_scope.cancel()
        await self.store.flush()

    async def _hurry(self, hurry: anyio.Event, patience: anyio.CancelScope) -> None:
        await hurry.wait()
        patience.cancel()


@asynccontextmanager
async def open_node(config: Config, specs: Sequence[WorkerSpec], state_dir: Path) -> AsyncIterator[Node]:
    """Run a Roundhouse for a block: its store is open and its workers start; what jobs go on is the caller's to say.

    When the block is left, however it is left, no process of it is left.

    Raises:
        StoreError: the store cannot be opened, or a write failed while the block ran (then in a group).
    """
    watch, models = JobWatch(), tuple(config.models)
    with open_database(config.store, state_dir, models) as database, open_store(database) as store:
        async with open_tools(config, specs) as equipped, anyio.create_task_group() as tasks:
            fleet = Fleet([replace(spec, state_dir=state_dir) for spec in equipped], os.environ, state_dir)
            outlet = _Outlet(store)
            scheduler = Scheduler(POLICIES[config.scheduling.policy], fleet, outlet)
            intake = Intake(store, scheduler, models, is_shared=is_shared(config.store))
            if is_shared(config.store):
                outlet.neighbours = await _join(config, tasks, store, scheduler, intake, watch)
            jobs = Jobs(store, scheduler, intake, watch, lambda: rules_of(config, outlet.neighbours.models()))
            store.subscribe(_store_watchers(tasks, scheduler, intake, watch))
            await tasks.start(scheduler.run)
            tasks.start_soon(store.wait_failed)
            async with fleet.running():
                yield Node(fleet=fleet, scheduler=scheduler, store=store, intake=intake, jobs=jobs)
            tasks.cancel_scope.cancel()


class _Outlet:
    """A ``service.scheduling.scheduler.Outlet``."""

    def __init__(self, store: Store) -> None:
        self.neighbours: Neighbours = Alone()
        self.append_nowait = store.append_nowait
        self.release_nowait = store.release_nowait

    def is_elsewhere(self, model: str) -> bool:
        """Whether another node has workers for a model."""
        return model in self.neighbours.models()


def _store_watchers(tasks: TaskGroup, scheduler: Scheduler, intake: Intake, watch: JobWatch) -> StoreWatchers:
    def committed(jobs: frozenset[JobId]) -> None:
        watch.committed(jobs)
        intake.hint(is_work=False)  # a turn may have ended, and left its slot to another

    def troubled(told: str | None) -> None:
        if told is None:
            scheduler.unpause(Pause.STORE)
            intake.hint(is_work=True)  # what was claimed as the trouble began, and never answered
        else:
            scheduler.pause(Pause.STORE, f"the store, to be well again: {told}")

    def fenced() -> None:
        tasks.start_soon(intake.start_over)

    return StoreWatchers(committed=committed, troubled=troubled, fenced=fenced)


async def _join(
    config: Config, tasks: TaskGroup, store: Store, scheduler: Scheduler, intake: Intake, watch: JobWatch
) -> Neighbours:
    """Become one of several nodes."""
    from service.store.cluster import Cluster, LeaseEvents  # noqa: PLC0415 - with it comes psycopg

    def ending() -> None:
        scheduler.pause(Pause.LEASE, "the lease of this node to be renewed: another may take over at any moment")
        scheduler.interrupt_all()

    def report() -> dict[JobId, tuple[int, int]]:
        view = scheduler.view
        counts = {job_id: view.of_job(job_id) for job_id in view.jobs()}
        return {name: (count[TurnState.READY], count[TurnState.IN_FLIGHT]) for name, count in counts.items()}

    def fenced() -> None:
        tasks.start_soon(store.flush)  # whoever writes learns of it

    await store.flush()  # the first write makes this node a member
    cluster = Cluster(config.store.url, config.store.lease_s, lambda: store.node_id, report)
    events = LeaseEvents(
        ending=ending,
        renewed=lambda: scheduler.unpause(Pause.LEASE),
        fenced=fenced,
        changed=watch.committed,
        work=lambda: intake.hint(is_work=True),
    )
    tasks.start_soon(cluster.run, events)
    return cluster

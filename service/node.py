"""One Roundhouse, put together: the only place that knows all its parts."""

import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from service.config.schema import Config
from service.jobs import Jobs
from service.scheduling.policies import POLICIES
from service.scheduling.scheduler import Scheduler
from service.store.sqlite import SqliteStore, open_store
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
    store: SqliteStore
    jobs: Jobs

    async def shut_down(self, drain_s: float, hurry: anyio.Event) -> None:
        """Admit nothing new, give turns in flight ``drain_s``, then stop every engine; ``hurry`` cuts it short."""
        self.jobs.close()
        self.scheduler.close_nowait()
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
    watch = JobWatch()
    with open_store(state_dir, watch.committed) as store:
        async with open_tools(config, specs) as equipped, anyio.create_task_group() as tasks:
            fleet = Fleet([replace(spec, state_dir=state_dir) for spec in equipped], os.environ, state_dir)
            scheduler = Scheduler(POLICIES[config.scheduling.policy], fleet, store.append_nowait)
            jobs = Jobs(store, scheduler, watch, tuple(config.models), config.limits)
            await tasks.start(scheduler.run)
            tasks.start_soon(store.wait_failed)
            async with fleet.running():
                yield Node(fleet=fleet, scheduler=scheduler, store=store, jobs=jobs)
            tasks.cancel_scope.cancel()

"""The owner of all tasks of an inference engine."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from workers.engine.start_gate import StartGate
from workers.errors import StopTimedOut
from workers.lanes.lane_pool import LanePool
from workers.offload.pool import offloading
from workers.process.orphans import patrol
from workers.process.registry import ProcessRegistry, open_registry
from workers.supervised import SupervisedWorker

CLOSING_S: Final = 30.0
logger = logging.getLogger(__name__)


class Site:
    """The tasks of an engine, owned by one task of its own, so that any task of the caller's may ask for them."""

    def __init__(self, tasks: TaskGroup, registry: ProcessRegistry | None, gate: StartGate, pool: LanePool) -> None:
        self.tasks = tasks
        self.registry = registry
        self.gate = gate
        self._pool = pool
        self._owner: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, pool: LanePool, state_dir: Path | None, on_defect: Callable[[str], None]) -> "Site":
        """Start the tasks; ``on_defect`` gets the reason if they end by themselves."""
        opened: asyncio.Future[Site] = asyncio.get_running_loop().create_future()

        async def own() -> None:
            try:
                async with AsyncExitStack() as stack:
                    await stack.enter_async_context(offloading())
                    registry = await stack.enter_async_context(open_registry(state_dir))
                    tasks = await stack.enter_async_context(anyio.create_task_group())
                    tasks.start_soon(patrol)
                    gate = StartGate()
                    await tasks.start(pool.run, gate)
                    tasks.start_soon(pool.look_after_devices)
                    opened.set_result(cls(tasks, registry, gate, pool))
                    await anyio.sleep_forever()
            except BaseException as error:
                if not opened.done():
                    opened.set_exception(error)
                raise

        owner = asyncio.create_task(own(), name="inference engine")
        site = await opened
        owner.add_done_callback(partial(_tell_defect, on_defect))
        site._owner = owner  # noqa: SLF001 - its own
        return site

    async def end(self) -> None:
        """End every engine and every task."""
        async with anyio.create_task_group() as tasks:
            for lane in self._pool.lanes:
                for worker in lane:
                    tasks.start_soon(_end_engine, worker)
        if self._owner is not None:
            self._owner.cancel()
            await asyncio.wait([self._owner], timeout=CLOSING_S)


def _tell_defect(on_defect: Callable[[str], None], owner: "asyncio.Task[None]") -> None:
    error = None if owner.cancelled() else owner.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None and not isinstance(error, asyncio.CancelledError):
        logger.error("the inference engine has ended by a defect of Roundhouse", exc_info=error)
        on_defect(f"the engine has ended by a defect of Roundhouse: {type(error).__name__}: {error}")


async def _end_engine(worker: SupervisedWorker) -> None:
    try:
        await worker.end_engine("the engine is shut down")
    except StopTimedOut:
        return  # its guardian goes on trying, and the log says so

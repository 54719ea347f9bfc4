"""The adapters of one model, loaded and unloaded one at a time while the service runs.

Invariant: a worker in rotation has every adapter that ``names`` lists. So the scheduler need not ask which worker has
which; an engine that starts without one is held until it has it.
"""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup, TaskStatus

from workers.adapters.adapter_store import Adapter, AdapterStore, StoredAdapters
from workers.adapters.provision import bring, unload
from workers.adapters.validation import check_gguf, check_peft, check_source
from workers.engine.launch.vllm import most_rank
from workers.errors import (
    AdapterRefused,
    AdaptersFull,
    AdapterTaken,
    AdapterUnknown,
    InvalidAdapter,
    InvalidSpec,
    NoEngineReady,
)
from workers.log_context import line_about, of_worker
from workers.notifier import Notifier
from workers.spec import EngineKind
from workers.states import Hold, WorkerState
from workers.supervised import SupervisedWorker

REMEMBERED: Final = 10_000  # unloaded names
logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class ModelAdapters:
    """Written only by its own tasks; nothing happens unless ``run`` is running.

    ``lock`` is held during every change to the model's engines.
    """

    def __init__(self, name: str, workers: Sequence[SupervisedWorker], state_dir: Path, lock: anyio.Lock) -> None:
        self.name = name
        self.workers = list(workers)
        self.spec = workers[0].spec
        self.configured: Mapping[str, str] = self.spec.adapters
        self.changing: str | None = None  # the present change, in words
        self._store = AdapterStore(state_dir, name, is_folder=self.spec.engine is EngineKind.VLLM)
        kept = self._store.read()
        self.past = dict(kept.past)  # unloaded names, and the digests that they stand for
        self._copies: Counter[str] = Counter()  # digests, with their loads in progress
        self.loaded = {each.name: each for each in self._fitting(kept) if each.name not in self.configured}
        self._lock = lock
        self._tasks: TaskGroup | None = None
        self._changed = Notifier()
        self._catching_up: set[str] = set()
        self._want()

    def __repr__(self) -> str:
        return f"<ModelAdapters {self.name} {self.names}>"

    def _fitting(self, kept: StoredAdapters) -> tuple[Adapter, ...]:
        """Return the stored adapters of the configured model; no engine would start with another model's."""
        if kept.adapters and kept.model != self.spec.model:
            names = ", ".join(adapter.name for adapter in kept.adapters)
            logger.warning("model %s: adapters of another model are left out: %s", self.name, names)
            return ()
        return kept.adapters

    @property
    def names(self) -> list[str]:
        """The adapters that requests may ask for."""
        return [*self.configured, *self.loaded]

    def add(self, worker: SupervisedWorker) -> None:
        """Add a worker whose engine has not been started; the caller holds the lock."""
        self.workers.append(worker)
        self._want()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            task_status.started()
            await anyio.sleep_forever()

    # Requests of operators

    async def load(self, name: str, source: Path) -> bool:
        """Load an adapter onto every engine of the model; return whether it is new.

        It gets its name once every worker in rotation can serve it, and survives restarts.

        Raises:
            AdapterError: it cannot be loaded; nothing has changed.
        """
        return await self._owned(self._load, name, source)

    async def unload(self, name: str) -> None:
        """Unload an adapter from every engine of the model; requests for it are refused from here on.

        Raises:
            AdapterError: it cannot be unloaded; nothing has changed.
        """
        await self._owned(self._unload, name)

    async def _load(self, name: str, source: Path) -> bool:
        if name in self.configured:
            raise AdapterTaken(f"{name} is an adapter of the configuration")
        if name not in self.loaded:
            self._check_room()
        # A disk may hang for any time: that must not delay other changes, or a stop.
        adapter = await anyio.to_thread.run_sync(self._copy, name, source, abandon_on_cancel=True)
        self._copies[adapter.digest] += 1
        try:
            await anyio.to_thread.run_sync(self._check, adapter, abandon_on_cancel=True)
            async with self._changing(f"load {name}"):
                is_new = not self._is_there(adapter)
                if is_new:
                    await self._take(adapter)
                return is_new
        finally:
            self._copies[adapter.digest] -= 1
            await self._tidy()

    async def _unload(self, name: str) -> None:
        async with self._changing(f"unload {name}"):
            adapter = self.loaded.get(name)
            if adapter is None:
                whose = "is one of the configuration" if name in self.configured else "was never loaded"
                raise AdapterUnknown(f"model {self.name}: {name} {whose}")
            rest = {other: each for other, each in self.loaded.items() if other != name}
            await self._keep(rest, {**self.past, name: adapter.digest})
            self._copies.setdefault(adapter.digest, 0)  # counted digests that are no longer needed are removed
            self._want()
            for worker in self._serving():
                await unload(worker, name)
        await self._tidy()

    @asynccontextmanager
    async def _changing(self, what: str) -> AsyncIterator[None]:
        async with self._lock:
            self.changing = what
            try:
                yield
            finally:
                self.changing = None

    def _check(self, adapter: Adapter) -> None:
        """Check the copy: the source may have changed by now."""
        try:
            self._look_at(self._store.path(adapter.digest))
        except OSError as error:
            raise AdapterRefused(f"the copy of {adapter.source} cannot be read: {error.strerror or error}") from error

    def _look_at(self, place: Path) -> None:
        if self.spec.engine is EngineKind.VLLM:
            check_peft(place, self.spec.model, most_rank(self.spec))
        else:
            check_gguf(place)

    def _copy(self, name: str, source: Path) -> Adapter:
        check_source(source, is_folder=self.spec.engine is EngineKind.VLLM)
        try:
            self._look_at(source)  # before an unfit copy fills the disk
            self._store.check_space(source)
            copied = self._store.put(source)
        except OSError as error:
            raise InvalidAdapter(f"{source}: cannot be copied: {error.strerror or error}") from error
        at = datetime.now(UTC).isoformat(timespec="seconds")
        return Adapter(name=name, digest=copied.digest, size=copied.size, source=str(source), loaded_at=at)

    def _is_there(self, adapter: Adapter) -> bool:
        """Return whether it is loaded.

        Raises:
            AdapterError: it cannot be.
        """
        known = self.loaded.get(adapter.name)
        before = known.digest if known is not None else self.past.get(adapter.name)
        if before not in (None, adapter.digest):
            raise AdapterTaken(f"{adapter.name} stands for other weights already: give these a name of their own")
        if known is None:
            self._check_room()
        return known is not None

    def _check_room(self) -> None:
        room = self.spec.adapter_room
        if len(self.names) >= room:
            raise AdaptersFull(f"model {self.name} has room for {room} adapters: unload one, or configure max_adapters")

    async def _take(self, adapter: Adapter) -> None:
        """Prove an adapter on the engines, one at a time, and keep it; on failure undo everything."""
        if not self._serving():
            raise NoEngineReady(f"model {self.name}: no engine of it answers")
        try:
            self._want(adapter)
            for worker in self.workers:
                if worker.now.is_starting:  # it starts without the adapter
                    worker.drain_nowait(f"it has no adapter {adapter.name} yet", Hold.ADAPTERS)
            await self._prove(adapter.name)
            await self._keep({**self.loaded, adapter.name: adapter}, self.past)
        except InvalidSpec as error:
            raise AdapterRefused(str(error)) from error
        except Exception:
            self._want()
            for worker in self._serving():
                await unload(worker, adapter.name)
            raise

    async def _prove(self, name: str) -> None:
        """Return when every engine that answers has the wanted adapters.

        If the first engine goes away over it no second one gets it: the adapter may have killed it.
        """
        proofs: list[str] = []
        for worker in self._serving():
            try:
                is_proven = await bring(worker, self._wait_change)
            except AdapterRefused:
                self._want()
                if worker.now.state in {
                    WorkerState.BACKOFF,
                    WorkerState.FAILED,
                }:  # it would wait, as after a failure
                    worker.restart_nowait(f"asked for, without adapter {name}")
                raise
            if is_proven:
                proofs.append(worker.spec.id)
            elif not proofs:
                raise NoEngineReady(f"{worker.spec.id} went away over adapter {name}: {worker.supervisor.because}")

    async def _keep(self, loaded: Mapping[str, Adapter], past: Mapping[str, str]) -> None:
        """Store a list of adapters, then make it the model's."""
        past = dict(list(past.items())[-REMEMBERED:])
        shelved = StoredAdapters(model=self.spec.model, adapters=tuple(loaded.values()), past=past)
        try:
            await anyio.to_thread.run_sync(self._store.write, shelved)
        except OSError as error:
            raise AdapterRefused(f"model {self.name}: it cannot be kept: {error.strerror or error}") from error
        self.loaded, self.past = dict(loaded), past

    async def _tidy(self) -> None:
        """Remove copies that are not needed; a starting engine still needs those that it was given."""
        starting = (worker.adapters.loaded for worker in self.workers if worker.now.is_starting)
        needed = {adapter.digest for adapter in self.loaded.values()} | set(+self._copies)
        needed |= {Path(path).stem for loaded in starting for path in loaded.values()}
        useless = set(self._copies) - needed
        for digest in useless:
            del self._copies[digest]
        await anyio.to_thread.run_sync(self._store.remove, useless)

    def _want(self, *more: Adapter) -> None:
        """Start engines with the loaded adapters and ``more`` from now on.

        Raises:
            InvalidSpec: no engine can be started with them.
        """
        paths = {each.name: str(self._store.path(each.digest)) for each in (*self.loaded.values(), *more)}
        for worker in self.workers:
            worker.want_adapters({**self.configured, **paths})

    # Engines that come up

    def note_change(self, worker: SupervisedWorker) -> None:
        """Handle a worker's change of state, without waiting."""
        self._changed.notify()
        is_late = (
            worker.now.is_serving and Hold.ADAPTERS in worker.now.holds and worker.spec.id not in self._catching_up
        )
        if is_late and self._tasks is not None:
            self._catching_up.add(worker.spec.id)
            self._tasks.start_soon(self._catch_up, worker)

    async def _catch_up(self, worker: SupervisedWorker) -> None:
        """Give an engine that started without some adapters the missing ones, before it takes traffic."""
        try:
            async with self._lock:
                if (
                    worker.now.is_serving
                    and Hold.ADAPTERS in worker.now.holds
                    and await bring(worker, self._wait_change)
                ):
                    worker.resume_nowait("it has every adapter", Hold.ADAPTERS)
        except AdapterRefused:
            line = line_about(of_worker(worker.spec.id, worker.now.incarnation))
            logger.exception("worker %s: another engine has taken it", worker.spec.id, extra=line)
            worker.restart_nowait("asked for, with every adapter")
        finally:
            self._catching_up.discard(worker.spec.id)

    def _serving(self) -> list[SupervisedWorker]:
        return [worker for worker in self.workers if worker.now.is_serving]

    async def _wait_change(self) -> None:
        await self._changed.wait()

    async def _owned(self, what: Callable[[*Args], Awaitable[Result]], *args: *Args) -> Result:
        """Run a coroutine in a task of ours: the caller may go away meanwhile."""
        if self._tasks is None:
            raise NoEngineReady(f"model {self.name} is not running")
        ended = anyio.Event()
        results: list[Result | Exception] = []

        async def run() -> None:
            try:
                results.append(await what(*args))
            except Exception as error:  # noqa: BLE001 - it is raised to the caller
                results.append(error)
            finally:
                ended.set()

        self._tasks.start_soon(run)
        await ended.wait()
        if not results:
            raise NoEngineReady(f"model {self.name}: the service is stopping")
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

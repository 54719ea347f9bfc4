"""Which engines serve the checkpoints of agents: one each, or with layout A one for several adapters of one base.

A server of layout A is a model of the lanes like any other: its base with up to a lane's ``capacity`` of checkpoints,
which come and go with it.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from roundhouse.inference.checkpoint_files import GGUF, base_of, check_adapter, check_spec, fetch_checkpoint
from roundhouse.inference.failures import NoLane
from roundhouse.inference.lane_agents import Served
from workers.adapters.provision import bring
from workers.devices.layout import Lane, Layout
from workers.engine.launch.vllm import socket_of
from workers.errors import AdapterRefused, InvalidSpec
from workers.health.recorder import Diary
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_spec import memory_need, most_room, on_lane
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

_FAILING: Final = frozenset({WorkerState.BACKOFF, WorkerState.FAILED})


class Allocator:
    """Gives each checkpoint the lane that it is loaded on first.

    Devices are distinct until all are used; then the device with the fewest pins is next. When every lane has its
    share, checkpoints share lanes and are swapped.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._pins: dict[str, Lane] = {}

    def __repr__(self) -> str:
        return f"<Allocator {[(model, lane.id) for model, lane in self._pins.items()]}>"

    def pin(
        self, model: str, need_mib: int | None, hint: int | None = None, among: Collection[int] | None = None
    ) -> Lane:
        """Return the lane of a model, the one it has already if it has one; a new one is ``among`` these, or any.

        Raises:
            NoLane: no device has room for it, or the hint is no lane.
        """
        if hint is not None and not 0 <= hint < len(self._lanes):
            raise NoLane(f"lane_hint: {hint} is no lane; there are 0 to {len(self._lanes) - 1}")
        lanes = [lane for lane in self._lanes if among is None or lane.number in among]
        able = [lane for lane in lanes if _fits(lane, need_mib)]
        if not able:
            most = most_room(lanes)
            raise NoLane(f"{model} takes {need_mib} MiB, and the largest device has room for {most} MiB")
        if model not in self._pins:
            self._pins[model] = self._least_pinned([lane for lane in able if lane.number == hint] or able)
        return self._pins[model]

    def _least_pinned(self, lanes: Sequence[Lane]) -> Lane:
        on_lane = Counter(each.id for each in self._pins.values())
        on_device = Counter(each.device.uuid for each in self._pins.values())
        return min(
            lanes, key=lambda lane: (on_lane[lane.id] >= lane.capacity, on_device[lane.device.uuid], on_lane[lane.id])
        )


def _fits(lane: Lane, need_mib: int | None) -> bool:
    room = lane.device.room_mib
    return room is None or need_mib is None or need_mib <= room


class _Server:
    """A model of the lanes: its base, the lane of its pin, and the checkpoints that it serves."""

    def __init__(self, name: str, base: str, lane: Lane, workers: Sequence[SupervisedWorker]) -> None:
        self.name = name
        self.base = base
        self.lane = lane
        self.workers = workers
        self.adapters: dict[str, str] = {}  # names to paths
        self.checkpoints: set[str] = set()

    def __repr__(self) -> str:
        return f"<_Server {self.name} {list(self.adapters)}>"


class Checkpoints:
    """Gives each checkpoint a server; one caller at a time.

    ``start`` runs a worker from now on; there is one once the pool runs.
    """

    start: Callable[[SupervisedWorker], object]

    def __init__(
        self,
        base: WorkerSpec,
        lanes: Sequence[Lane],
        pool: LanePool,
        on_change: Callable[[SupervisedWorker], None],
    ) -> None:
        self._base = base
        self._lanes = lanes
        self._pool = pool
        self._on_change = on_change
        self._diaries = [Diary.of_worker(replace(base, id=WorkerId(each.id))) for each in lanes]
        self._allocator = Allocator(lanes)
        self._served: dict[str, Served] = {}
        self._servers: dict[str, _Server] = {}

    def __repr__(self) -> str:
        return f"<Checkpoints {list(self._servers)}>"

    @property
    def _shares(self) -> bool:
        return self._lanes[0].layout is Layout.A

    async def serve(self, name: str, hint: int | None, memory_mib: int | None = None) -> Served:
        """Return where a checkpoint is served; a new one is pinned, and loaded when a run wants it.

        ``memory_mib`` is the need of a new one, if its files do not show it.

        Raises:
            NoLane: there is no place for it, or the hint is no lane.
            InvalidSpec: no engine can be started with it.
            ModelUnavailable: it cannot be fetched.
        """
        known = self._served.get(name)
        if known is not None:
            self._allocator.pin(known.model, None, hint)
            return known
        checkpoint = await asyncio.to_thread(fetch_checkpoint, name, self._base.engine)
        base = await asyncio.to_thread(base_of, checkpoint)
        is_adapter = base != checkpoint
        server = None
        if self._shares:
            base = self._base_for(checkpoint, base)
            if is_adapter:
                await asyncio.to_thread(check_adapter, replace(self._base, model=base), checkpoint)
            server = self._sharing(base, hint)
        elif is_adapter:
            raise InvalidSpec(f"model_ckpt: {checkpoint} is an adapter of a base, which only layout A serves")
        if server is None:
            server = await self._add(str(base), hint, memory_mib, self._lanes_for(checkpoint, str(base), hint))
        adapter = await self._equip(server, checkpoint) if is_adapter else None
        server.checkpoints.add(checkpoint)
        self._served[name] = Served(model=server.name, lane=server.lane.id, adapter=adapter)
        return self._served[name]

    # Layout A

    def _base_for(self, checkpoint: str, base: str | None) -> str:
        """Return the base of an adapter whose file names none: the only one that there is."""
        if base is not None:
            return base
        bases = {server.base for server in self._servers.values()}
        if len(bases) != 1:
            found = "no base was registered before it" if not bases else f"there are {', '.join(sorted(bases))}"
            raise NoLane(f"{checkpoint} is an adapter that names no base, and {found}")
        return bases.pop()

    def _sharing(self, base: str, hint: int | None) -> _Server | None:
        """Return a server of the base that has room for one more checkpoint, on the hinted lane if there is a hint."""
        able = (
            server
            for server in self._servers.values()
            if server.base == base
            and hint in {None, server.lane.number}
            and len(server.checkpoints) < server.lane.capacity
        )
        return next(able, None)

    def _lanes_for(self, checkpoint: str, base: str, hint: int | None) -> frozenset[int] | None:
        """Return the lanes that a new server may have: those without a server of another base; None is all.

        Raises:
            NoLane: every lane, or the hinted one, has a server of another base.
        """
        if not self._shares:
            return None
        others = {each.lane.number: each.base for each in self._servers.values() if each.base != base}
        wanted = {lane.number for lane in self._lanes} if hint is None else {hint}
        if wanted <= others.keys():
            where = "every lane has" if hint is None else f"lane {hint} has"
            raise NoLane(
                f"{checkpoint} cannot share a server with {', '.join(sorted({others[lane] for lane in wanted}))}: a "
                f"server has one base model, and {where} another; give layout B, or an adapter of that base"
            )
        return frozenset(lane.number for lane in self._lanes) - others.keys()

    async def _equip(self, server: _Server, checkpoint: str) -> str:
        """Load an adapter onto the engines of a server; one that is there already is brought to it.

        Raises:
            InvalidSpec: one of them does not take it; they go on without it.
        """
        name = _unused_name(checkpoint, {*server.adapters, server.name})
        server.adapters[name] = checkpoint
        try:
            await self._bring(server)
        except AdapterRefused as error:
            self._forget(server, name)
            for worker in server.workers:
                if worker.now.state in _FAILING:  # it would wait, as after its own failure
                    worker.restart_nowait(f"asked for, without adapter {name}")
            raise InvalidSpec(f"model_ckpt: {error}") from error
        except BaseException:  # no engine can be started so, or the caller goes away
            self._forget(server, name)
            raise
        return name

    def _forget(self, server: _Server, name: str) -> None:
        del server.adapters[name]
        for worker in server.workers:
            worker.want_adapters(server.adapters)

    async def _bring(self, server: _Server) -> None:
        for worker in server.workers:
            worker.want_adapters(server.adapters)
        for worker in server.workers:
            while worker.now.is_starting:  # with what was wanted before
                await self._pool.wait_change()
            if worker.now.is_serving:
                await bring(worker, self._pool.wait_change)

    # Servers

    async def _add(self, base: str, hint: int | None, memory_mib: int | None, among: frozenset[int] | None) -> _Server:
        name, number = _unused_name(base, self._servers), len(self._servers)
        room = self._lanes[0].capacity if self._shares else None
        spec = replace(self._base, name=name, model=base, max_adapters=room, memory_mib=memory_mib)
        check_spec(spec)
        is_on_cpu = self._lanes[0].device.is_cpu
        need = await asyncio.to_thread(partial(memory_need, spec, os.environ, is_on_cpu=is_on_cpu))
        spec = replace(spec, need_mib=need.taken if need else None)
        pin = self._allocator.pin(name, need.least if need else None, hint, among)
        self._pool.demand.hints[name] = pin.id
        workers = [
            SupervisedWorker(
                on_lane(spec, lane, self._socket(lane, number)),
                os.environ,
                self._on_change,
                diary=diary,
                health=self._pool.lanes.health,
            )
            for lane, diary in zip(self._lanes, self._diaries, strict=True)
        ]
        for worker in workers:
            self.start(worker)
        self._pool.add(workers)
        self._servers[name] = _Server(name, base, pin, workers)
        return self._servers[name]

    def _socket(self, lane: Lane, number: int) -> Path | None:
        if self._base.engine is not EngineKind.VLLM or self._base.state_dir is None:
            return None
        return socket_of(self._base.state_dir.resolve() / "sockets", f"{lane.id}-{number}")


def _unused_name(path: str, taken: Container[str]) -> str:
    """Return the name of a file or folder, with a number if it is taken."""
    stem = Path(path).name.removesuffix(GGUF) or "model"
    return stem if stem not in taken else next(name for n in count(2) if (name := f"{stem}-{n}") not in taken)

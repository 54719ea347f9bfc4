"""Which engines serve the checkpoints of agents: one each, or with layout A one for several adapters of one base.

A server of layout A is a model of the lanes like any other: its base with up to a lane's ``capacity`` of checkpoints,
which come and go with it.
"""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from roundhouse.inference.checkpoint_names import fetch_checkpoint
from roundhouse.inference.failures import NoLane
from roundhouse.inference.site import Site
from service.config.workers import REPOSITORY
from workers.adapters.provision import bring
from workers.adapters.validation import CONFIG, MAX_CONFIG_BYTES, check_gguf, check_peft, is_gguf_adapter
from workers.devices.layout import Lane, Layout
from workers.engine.launch import command_for
from workers.engine.launch.vllm import most_rank, socket_of
from workers.errors import AdapterRefused, InvalidAdapter, InvalidSpec
from workers.files.gguf_header import is_gguf
from workers.health.recorder import Diary
from workers.lanes.lane_pool import LanePool
from workers.lanes.lane_spec import memory_need, most_room, on_lane
from workers.spec import EngineKind, WorkerId, WorkerSpec
from workers.states import WorkerState
from workers.supervised import SupervisedWorker

GGUF: Final = ".gguf"
NAME_CHARS: Final = 200
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
        if model in self._pins:
            return self._pins[model]
        on_lane, on_device = Counter(each.id for each in self._pins.values()), self._on_devices()
        hinted = [lane for lane in able if lane.number == hint]
        chosen = min(
            hinted or able,
            key=lambda lane: (on_lane[lane.id] >= lane.capacity, on_device[lane.device.uuid], on_lane[lane.id]),
        )
        self._pins[model] = chosen
        return chosen

    def lane_of(self, model: str) -> Lane:
        """Return the lane that a model is pinned to."""
        return self._pins[model]

    def _on_devices(self) -> Counter[str]:
        return Counter(lane.device.uuid for lane in self._pins.values())


def _fits(lane: Lane, need_mib: int | None) -> bool:
    room = lane.device.room_mib
    return room is None or need_mib is None or need_mib <= room


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a checkpoint: the model of the lanes, and its adapter there, None for the model itself."""

    model: str
    adapter: str | None = None


class _Server:
    """A model of the lanes: its base, and the checkpoints that it serves."""

    def __init__(self, name: str, base: str, workers: Sequence[SupervisedWorker]) -> None:
        self.name = name
        self.base = base
        self.workers = workers
        self.adapters: dict[str, str] = {}  # names to paths
        self.checkpoints: set[str] = set()

    def __repr__(self) -> str:
        return f"<_Server {self.name} {list(self.adapters)}>"


class Checkpoints:
    """Gives each checkpoint a server; one caller at a time."""

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

    async def serve(self, site: Site, checkpoint: str, hint: int | None, memory_mib: int | None = None) -> Served:
        """Return where a checkpoint is served; a new one is pinned, and loaded when a run wants it.

        ``memory_mib`` is what a new one needs, where its files do not tell that rightly.

        Raises:
            NoLane: there is no place for it, or the hint is no lane.
            InvalidSpec: no engine can be started with it.
            ModelUnavailable: it cannot be fetched.
        """
        known = self._served.get(checkpoint)
        if known is not None:
            self._allocator.pin(known.model, None, hint)
            return known
        return await self._serve_new(site, checkpoint, hint, memory_mib)

    async def _serve_new(self, site: Site, name: str, hint: int | None, memory_mib: int | None) -> Served:
        checkpoint = await asyncio.to_thread(fetch_checkpoint, name, self._base.engine)
        base = await asyncio.to_thread(base_of, checkpoint)
        is_adapter = base != checkpoint
        if self._shares:
            base = self._base_for(checkpoint, base)
            if is_adapter:
                await asyncio.to_thread(check_adapter, replace(self._base, model=base), checkpoint)
            server = self._sharing(base, hint)
            if server is None:
                server = await self._add(site, base, hint, memory_mib, self._lanes_for(checkpoint, base, hint))
        else:
            if is_adapter:
                raise InvalidSpec(f"model_ckpt: {checkpoint} is an adapter of a base, which only layout A serves")
            server = await self._add(site, checkpoint, hint, memory_mib)
        adapter = await self._equip(server, checkpoint) if is_adapter else None
        server.checkpoints.add(checkpoint)
        self._served[name] = Served(model=server.name, adapter=adapter)
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
        for server in self._servers.values():
            lane = self._allocator.lane_of(server.name)
            is_there = hint is None or lane.number == hint
            if server.base == base and is_there and len(server.checkpoints) < lane.capacity:
                return server
        return None

    def _lanes_for(self, checkpoint: str, base: str, hint: int | None) -> frozenset[int]:
        """Return the lanes that a new server may have: those without a server of another base.

        Raises:
            NoLane: every lane, or the hinted one, has a server of another base.
        """
        of_lane = {self._allocator.lane_of(each.name).number: each.base for each in self._servers.values()}
        wanted = [lane.number for lane in self._lanes] if hint is None else [hint]
        others = sorted({of_lane[number] for number in wanted if of_lane.get(number, base) != base})
        if others and all(of_lane.get(number, base) != base for number in wanted):
            where = "every lane has" if hint is None else f"lane {hint} has"
            raise NoLane(
                f"{checkpoint} cannot share a server with {', '.join(others)}: a server has one base model, and {where}"
                " another; give layout B, or an adapter of that base"
            )
        return frozenset(lane.number for lane in self._lanes if of_lane.get(lane.number, base) == base)

    async def _equip(self, server: _Server, checkpoint: str) -> str:
        """Load an adapter onto the engines of a server; one that is there already is brought to it.

        Raises:
            InvalidSpec: one of them does not take it; they go on without it.
        """
        stem = Path(checkpoint).name.removesuffix(GGUF)
        taken = {*server.adapters, server.name}
        name = stem if stem not in taken else next(each for n in count(2) if (each := f"{stem}-{n}") not in taken)
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

    async def _add(
        self, site: Site, base: str, hint: int | None, memory_mib: int | None, among: frozenset[int] | None = None
    ) -> _Server:
        name, lane_number = self._name(base), len(self._servers)
        room = self._lanes[0].capacity if self._shares else None
        spec = replace(self._base, name=name, model=base, max_adapters=room, memory_mib=memory_mib)
        check_spec(spec)
        is_on_cpu = self._lanes[0].device.is_cpu
        need = await asyncio.to_thread(partial(memory_need, spec, os.environ, is_on_cpu=is_on_cpu))
        spec = replace(spec, need_mib=need.taken if need else None)
        self._pool.hints[name] = self._allocator.pin(name, need.least if need else None, hint, among).id
        workers = [
            SupervisedWorker(
                on_lane(spec, lane, self._socket(lane, lane_number)),
                os.environ,
                self._on_change,
                diary=diary,
                health=self._pool.health,
            )
            for lane, diary in zip(self._lanes, self._diaries, strict=True)
        ]
        for worker in workers:
            site.tasks.start_soon(worker.run, site.registry, site.gate)
        self._pool.add(workers)
        self._servers[name] = _Server(name, base, workers)
        return self._servers[name]

    def _name(self, base: str) -> str:
        """Return an unused name for a model: the name of its file or folder, with a number if it is taken."""
        stem = Path(base).name.removesuffix(GGUF) or "model"
        return (
            stem
            if stem not in self._servers
            else next(name for n in count(2) if (name := f"{stem}-{n}") not in self._servers)
        )

    def _socket(self, lane: Lane, number: int) -> Path | None:
        if self._base.engine is not EngineKind.VLLM or self._base.state_dir is None:
            return None
        return socket_of(self._base.state_dir.resolve() / "sockets", f"{lane.id}-{number}")


def base_of(checkpoint: str) -> str | None:
    """Return the base of an adapter, None where it names none; a checkpoint that is no adapter is its own.

    Raises:
        InvalidSpec: the file that says so cannot be read.
    """
    path = Path(checkpoint)
    config = path / CONFIG
    try:
        is_adapter = config.is_file() and not (path / "config.json").is_file()  # else it was merged into its base
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise InvalidSpec(f"model_ckpt: {checkpoint[:NAME_CHARS]} cannot be looked at: {error}") from error
    if is_adapter:
        try:
            with config.open("rb") as opened:
                base = msgspec.json.decode(opened.read(MAX_CONFIG_BYTES), type=dict).get("base_model_name_or_path")
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidSpec(f"model_ckpt: {config} cannot be read: {error}") from error
        if not isinstance(base, str) or not base:
            return None
        try:
            beside = path / base
            return str(beside.resolve()) if not Path(base).is_absolute() and beside.exists() else base
        except (OSError, ValueError) as error:  # a name that is too long, or with a NUL
            raise InvalidSpec(f"model_ckpt: {config} names a base that is no path: {error}") from error
    if path.suffix == GGUF and path.is_file():
        return None if is_gguf_adapter(path) else checkpoint
    return checkpoint


def check_adapter(spec: WorkerSpec, checkpoint: str) -> None:
    """Check that an engine can take an adapter, as far as its files tell: with another it would not start.

    Raises:
        InvalidSpec: it does not.
    """
    try:
        if spec.engine is EngineKind.VLLM:
            check_peft(Path(checkpoint), spec.model, most_rank(spec))
        else:
            check_gguf(Path(checkpoint))
    except (InvalidAdapter, OSError) as error:
        raise InvalidSpec(f"model_ckpt: {checkpoint} is no adapter that {spec.engine} takes: {error}") from error


def check_spec(spec: WorkerSpec) -> None:
    """Check that the program and the file of an engine are there, as far as that can be told.

    Raises:
        InvalidSpec: they are not.
    """
    program = command_for(spec, os.environ).argv[0]
    if shutil.which(program) is None:
        raise InvalidSpec(f"command: no such program: {program!r}")
    checkpoint = Path(str(spec.model))
    # llama-server and vLLM fetch a repository by its id themselves.
    may_be_id = spec.engine is not EngineKind.EMBEDDED and REPOSITORY.match(str(spec.model))
    is_path = checkpoint.is_absolute() or checkpoint.suffix == GGUF or not may_be_id
    if not is_path or spec.command:
        return
    if not spec.model or not checkpoint.exists():
        raise InvalidSpec(f"model_ckpt: there is no {checkpoint if spec.model else 'checkpoint without a name'}")
    if spec.engine is EngineKind.VLLM:
        if not checkpoint.is_dir():
            raise InvalidSpec(f"model_ckpt: {checkpoint} is no folder of a checkpoint, which vllm loads")
    elif not is_gguf(checkpoint):
        raise InvalidSpec(f"model_ckpt: {checkpoint} is no GGUF file that can be read, which {spec.engine} loads")

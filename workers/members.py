"""One worker of a fixed model, and the wanted workers of all of them."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import anyio
from anyio.abc import TaskStatus

from workers.devices.layout import choose_devices
from workers.engine.launch.vllm import socket_of
from workers.engine.start_gate import StartGate
from workers.errors import StopTimedOut
from workers.policy.roll import Address, LeaveReason, ReplicaView, WantedModel
from workers.policy.spares import MOST_AUTO, SpareView
from workers.process.registry import ProcessRegistry
from workers.spec import LLAMA_CPP, MAX_PORT, WorkerId, WorkerSpec
from workers.states import HELD, PASSING, SERVING, Hold, WorkerState
from workers.supervised import SupervisedWorker
from workers.upkeep import ModelUpkeep

STUCK_S: Final = 10.0  # between two tries to end processes that do not die
logger = logging.getLogger(__name__)


class RosterMember:
    """One worker; ``spec`` is the wanted one, before devices were chosen."""

    def __init__(self, worker: SupervisedWorker, spec: WorkerSpec, number: int, upkeep: ModelUpkeep) -> None:
        self.worker = worker
        self.spec = spec
        self.number = number
        self.upkeep = upkeep
        self.leaves: LeaveReason | None = None
        self.is_there = anyio.Event()  # its tasks run
        self.scope: anyio.CancelScope | None = None  # scope of its tasks

    def __repr__(self) -> str:
        return f"<RosterMember {self.worker!r} leaves={self.leaves}>"

    def view(self, wanted: WorkerSpec | None, *, is_left_alone: bool) -> ReplicaView:
        """Return it in the form that decisions use; ``wanted`` are the wanted settings for its number, if any."""
        now = self.worker.now
        is_kept = Hold.OPERATOR in now.holds or (self.is_spare and self.is_there.is_set())
        waits_for_nodes = self.spec.nodes > 1 and now.state is WorkerState.STARTING
        return ReplicaView(
            model=self.worker.spec.name,
            number=self.number,
            is_current=self.spec == wanted,
            is_leaving=self.leaves is not None,
            is_ready=now.is_available or waits_for_nodes or (is_kept and not now.is_coming),
            is_spare=self.is_spare,
            is_left_alone=is_left_alone and self.spec == wanted,
            in_use=self.worker.slots.in_use,
            address=address_of(self.spec),
        )

    @property
    def is_spare(self) -> bool:
        """Whether it takes no turns until another worker of its model is down."""
        return Hold.SPARE in self.worker.now.holds

    @property
    def spare_view(self) -> SpareView:
        """It in the form in which spares are chosen."""
        now, engine = self.worker.now, self.worker.supervisor.running
        is_back = now.is_starting and engine is not None and engine.was_ready and now.holds <= PASSING
        return SpareView(
            number=self.number,
            is_spare=self.is_spare,
            takes_turns=now.is_available or is_back,
            is_usable=now.state in SERVING and now.holds - PASSING == {Hold.SPARE},
            is_wanted=now.is_wanted,
            in_use=self.worker.slots.in_use,
        )

    async def supervise(
        self,
        *,
        registry: ProcessRegistry,
        gate: StartGate,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Own the worker's tasks until cancelled, or until it has left."""
        with anyio.CancelScope() as self.scope:
            await self.worker.run(registry, gate, task_status=task_status)

    async def wait_idle(self) -> None:
        """Return when its last request has ended: each has limits of its own, and some may have lent their slots."""
        await self.worker.slots.wait_empty()
        await self.worker.in_flight.left.wait_until(lambda: not len(self.worker.in_flight))

    async def end_engine(self) -> None:
        """End its engine; nothing is started in its place before the processes have died."""
        while True:
            try:
                await self.worker.end_engine(str(self.leaves))
            except StopTimedOut:
                logger.exception("worker %s could not be stopped, and is tried again", self.worker.spec.id)
                await anyio.sleep(STUCK_S)
            else:
                return


class WantedReplicas:
    """The wanted workers of fixed models, by model, in the configuration's order."""

    def __init__(self, specs: Iterable[WorkerSpec]) -> None:
        self.by_model: dict[str, list[WorkerSpec]] = {}
        for spec in specs:
            if spec.lane is None:
                self.by_model.setdefault(spec.name, []).append(spec)

    def __repr__(self) -> str:
        return f"<WantedReplicas {list(self.by_model)}>"

    def counts(self) -> list[WantedModel]:
        """Return the wanted number of each model's workers, with spares."""
        return [
            WantedModel(model=model, count=len(replicas) + spares, spares=spares, first=address_of(replicas[0]))
            for model, replicas in self.by_model.items()
            for spares in [_most_spares(replicas[0])]
        ]

    def of_model(self, model: str) -> list[WorkerSpec]:
        """Return the wanted settings of a model's workers, those of its spares last."""
        replicas = self.by_model[model]
        numbers = range(len(replicas), len(replicas) + _most_spares(replicas[0]))
        return [*replicas, *(spec for number in numbers if (spec := self.spec(model, number)) is not None)]

    def spec(self, model: str, number: int) -> WorkerSpec | None:
        """Return the wanted settings for a model's worker with a number; None if there are none."""
        first = self.by_model[model][0] if model in self.by_model else None
        if first is None or number == 0:
            return first
        if first.port + number > MAX_PORT:
            return None
        worker_id = WorkerId(f"{model}-{number}")
        socket = socket_of(first.socket.parent, worker_id) if first.socket else None
        return replace(first, id=worker_id, port=first.port + number, socket=socket)


class Family(NamedTuple):
    """The workers of one fixed model; ``spec`` is the wanted one of its first replica."""

    spec: WorkerSpec
    replicas: int
    members: Sequence[RosterMember]

    @property
    def running(self) -> int:
        """The number of spares that have an engine, or are about to."""
        return sum(each.is_spare and each.worker.now.is_wanted for each in self.members)

    @property
    def is_auto(self) -> bool:
        """Whether memory decides about its spare."""
        return self.spec.spares is None and self.spec.engine in LLAMA_CPP


def first_members(
    wanted: WantedReplicas,
    make: Callable[[WorkerSpec], SupervisedWorker],
    look_after: Callable[[Sequence[SupervisedWorker]], ModelUpkeep],
    others_on: Mapping[str, int],
    upkeep: dict[str, ModelUpkeep],
) -> dict[WorkerId, RosterMember]:
    """Make the wanted workers, spares among them, and put what looks after each model into ``upkeep``."""
    members: dict[WorkerId, RosterMember] = {}
    made: list[SupervisedWorker] = []
    for model, replicas in wanted.by_model.items():
        specs = wanted.of_model(model)
        for spec in specs:
            made.append(make(on_devices(spec, made, others_on)))
        workers = made[-len(specs) :]
        upkeep[model] = look_after(workers)
        for number, (spec, worker) in enumerate(zip(specs, workers, strict=True)):
            members[spec.id] = RosterMember(worker, spec, number, upkeep[model])
            if number >= len(replicas):
                worker.drain_nowait(HELD[Hold.SPARE], Hold.SPARE)
    return members


def families(wanted: WantedReplicas, members: Iterable[RosterMember], unloaded: Collection[WorkerId]) -> list[Family]:
    """Return the models that may have spares, with their workers that stay; none of them ``unloaded``."""
    found = []
    for model, replicas in wanted.by_model.items():
        there = [each for each in members if each.worker.spec.name == model and not each.leaves]
        has_any = replicas[0].spares != 0 or any(each.is_spare for each in there)
        if has_any and not any(each.spec.id in unloaded for each in there):
            found.append(Family(replicas[0], len(replicas), there))
    return found


def is_in_excess(member: RosterMember, wanted: WantedReplicas, members: Iterable[RosterMember]) -> bool:
    """Whether other workers of its model are as many as its replicas, so that it is a spare."""
    model = member.worker.spec.name
    others = [each for each in members if each is not member and each.worker.spec.name == model]
    serving = [each for each in others if not each.leaves and not each.is_spare]
    return len(serving) >= len(wanted.by_model.get(model, ()))


def on_devices(spec: WorkerSpec, there: Iterable[SupervisedWorker], others_on: Mapping[str, int]) -> WorkerSpec:
    """Return a specification with the devices for its engine: those with the fewest engines now."""
    if spec.device_choice is None:
        return spec
    engines_on = Counter(others_on)
    engines_on.update(device.uuid for worker in there for device in worker.spec.devices)
    return replace(spec, devices=choose_devices(spec.device_choice, engines_on))


def address_of(spec: WorkerSpec) -> Address | None:
    """Return where a worker's engine listens; None if no other could listen there."""
    return None if spec.socket is not None or not spec.owns_engine else (spec.host, spec.port)


def _most_spares(spec: WorkerSpec) -> int:
    return MOST_AUTO if spec.spares is None else spec.spares

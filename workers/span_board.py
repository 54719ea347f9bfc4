"""Spans between a node's workers and its store: offers and ends go out, generations come in."""

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import anyio
from msgspec import Struct

from workers.errors import InvalidSpec, SpawnFailed
from workers.notifier import Notifier
from workers.process.child import EngineProcess
from workers.process.identity import EngineExit
from workers.spans import MemberFacts, Offer, SpanGeneration, collide, fate, suspect
from workers.spec import WorkerSpec

BEAT_S: Final = 1.0  # between two words to the guardians of members
logger = logging.getLogger(__name__)


class StoredSpan(Struct, frozen=True, kw_only=True):
    """The newest generation of a worker in the store; ``because`` says why it is over, None while it runs."""

    generation: SpanGeneration
    because: str | None


class SpanPart:
    """This node's part of one generation, from its formation to its end."""

    def __init__(self, generation: SpanGeneration, board: "SpanBoard") -> None:
        self.generation = generation
        self.rank = generation.rank_of(board.seat) or 0
        self.scope = anyio.CancelScope()
        self.elsewhere: str | None = None  # why another node has ended the generation
        self._board = board
        self._engine: EngineProcess | None = None

    def __repr__(self) -> str:
        return f"<SpanPart {self.generation.worker} {self.generation.number} rank={self.rank}>"

    @property
    def leads(self) -> bool:
        """Whether this node serves the generation's requests."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.generation.name_of(self.rank)

    @property
    def members(self) -> Mapping[int, MemberFacts]:
        """The newest reports of the other members, by rank; its own if its engine is about to end."""
        return {} if self._engine is None else self._engine.members

    def attach(self, engine: EngineProcess) -> None:
        """Keep the engine that has started."""
        self._engine = engine
        self.renew(has_lease=self._board.has_lease)

    def renew(self, *, has_lease: bool) -> None:
        """Tell the engine's guardian that this service lives."""
        if self._engine is not None:
            self._engine.renew(has_lease=has_lease)

    def end(self, because: str) -> None:
        """End this part, since the generation is over elsewhere."""
        self.elsewhere = self.elsewhere or because
        self.scope.cancel()

    def has_ended_elsewhere(self, ended: EngineExit | None) -> bool:
        """Whether another member ended first."""
        parted = ended.parted if ended is not None else None
        return self.elsewhere is not None or (parted is not None and parted.member != self.rank)

    def is_outside(self, ended: EngineExit | None) -> bool | None:
        """Whether no engine caused the end; None if its own exit decides that."""
        if self.elsewhere is not None:
            return True
        return ended.parted.is_outside if ended is not None and ended.parted is not None else None

    def suspect(self) -> str | None:
        """Name the member that keeps the others waiting."""
        return suspect(self.generation, self.members, time.monotonic())


class SpanBoard:
    """The spans of one node.

    ``seat`` names the node over all programs of its process, ``address`` is where other nodes reach it, ``nodes`` gives
    the size of each worker's span. ``lease_s`` is how long a node keeps its place unseen.
    """

    def __init__(self, seat: str, address: str, lease_s: float) -> None:
        self.seat, self.address, self.lease_s = seat, address, lease_s
        self.offers: dict[str, Offer] = {}
        self.nodes: dict[str, int] = {}
        self.ended: dict[tuple[str, int], str] = {}  # generations whose end the store does not know yet
        self.inherited: set[str] = set()  # workers whose parts an earlier program of this process has left running
        self.changed = Notifier()  # for the store: there is something to write
        self._stored: dict[str, StoredSpan] = {}
        self._running: dict[str, SpanPart] = {}
        self._news = Notifier()
        self._seen_at = float("-inf")  # when the store last took this node's word

    def __repr__(self) -> str:
        return f"<SpanBoard {self.seat} offers={sorted(self.offers)} runs={sorted(self._running)}>"

    @property
    def stored(self) -> Mapping[str, StoredSpan]:
        """The newest generation of each worker, as the store had it a moment ago."""
        return self._stored

    def leads(self, worker: str) -> bool:
        """Whether this node leads the worker's newest generation, or led it."""
        if worker in self._running:
            return self._running[worker].leads
        known = self._stored.get(worker)
        return known is not None and known.generation.members[0].seat == self.seat

    def free_offers(self) -> list[Offer]:
        """Return the offers whose devices no part has that still runs here, whatever the store says of it."""
        taken = [part.generation.members[part.rank].devices for part in self._running.values()]
        return [offer for offer in self.offers.values() if not any(collide(offer.devices, each) for each in taken)]

    def is_running(self, worker: str) -> bool:
        """Whether the worker has a generation that is not over."""
        known = self._stored.get(worker)
        return known is not None and known.because is None

    # For incarnations

    async def wait_generation(self, spec: WorkerSpec, devices: frozenset[str]) -> SpanGeneration:
        """Offer this node's devices, and return the generation that it becomes a member of.

        Raises:
            SpawnFailed: nothing can listen on this node's address.
        """
        last = self._stored[spec.id].generation.number if spec.id in self._stored else 0
        self.nodes[spec.id] = spec.nodes
        kind = ", ".join(device.name for device in spec.accelerators) or ("cpu" if spec.on_cpu else "gpu")
        port, lifeline_port = _free_ports(self.address)
        self.offers[spec.id] = Offer(
            seat=self.seat,
            worker=spec.id,
            kind=kind,
            address=self.address,
            devices=() if spec.on_cpu else tuple(sorted(devices)),
            port=port,
            lifeline_port=lifeline_port,
        )
        self.changed.notify()
        try:
            await self._news.wait_until(lambda: self._next_of(spec.id, last) is not None)
            chosen = self._next_of(spec.id, last)
            assert chosen is not None  # noqa: S101 - it has just been waited for
            return chosen
        finally:
            self.offers.pop(spec.id, None)
            self.changed.notify()

    def _next_of(self, worker: str, last: int) -> SpanGeneration | None:
        known = self._stored.get(worker)
        if known is None or known.because is not None or known.generation.number <= last:
            return None
        return known.generation if known.generation.rank_of(self.seat) is not None else None

    @contextmanager
    def running(self, part: SpanPart) -> Iterator[None]:
        """Register this node's part for a block, whose end is the generation's end."""
        worker, number = part.generation.worker, part.generation.number
        self._running[worker] = part
        self.inherited.discard(worker)
        try:
            yield
        finally:
            del self._running[worker]
            self.ended.setdefault((worker, number), f"{part.name} has ended")
            self.changed.notify()

    def end_generation(self, generation: SpanGeneration, because: str) -> None:
        """Say why a generation is over; the first reason counts."""
        self.ended.setdefault((generation.worker, generation.number), because)

    # For the store

    def update(self, stored: Sequence[StoredSpan], absent: Mapping[str, float]) -> None:
        """Take over what the store knows, and end what is over; ``absent`` as ``spans.fate`` has it."""
        self._seen_at = time.monotonic()
        self._stored = {each.generation.worker: each for each in stored}
        for worker, known in self._stored.items():
            self._follow(worker, known, absent)
        self._news.notify()

    def _follow(self, worker: str, known: StoredSpan, absent: Mapping[str, float]) -> None:
        part, newest = self._running.get(worker), known.generation
        if part is None:
            rank = newest.rank_of(self.seat)
            is_vain = known.because is None and worker not in {*self.offers, *self.inherited}
            if rank is not None and is_vain and (worker, newest.number) not in self.ended:
                self.end_generation(newest, f"{newest.name_of(rank)} no longer runs it")
            return
        ours = part.generation
        over = known.because if newest.number == ours.number else f"generation {newest.number} has taken its place"
        if newest.number >= ours.number and over is not None:
            part.end(over)
            return
        because = fate(ours, part.rank, part.members, absent, time.monotonic())
        if because is not None:
            self.end_generation(ours, because)
            part.end(because)

    @property
    def has_lease(self) -> bool:
        """Whether the store has seen this node within a lease."""
        return time.monotonic() - self._seen_at < self.lease_s

    async def run(self) -> None:
        """Tell the guardians of all members that this service lives, until cancelled."""
        while True:
            for part in self._running.values():
                part.renew(has_lease=self.has_lease)
            await anyio.sleep(BEAT_S)


def check_board(spec: WorkerSpec, board: SpanBoard | None) -> None:
    """Check that an engine over several nodes has a board.

    Raises:
        InvalidSpec: it has none.
    """
    if spec.nodes > 1 and board is None:
        raise InvalidSpec("nodes: only a service with a shared store runs an engine over several nodes")


def with_suspect(because: str, part: SpanPart | None) -> str:
    """Return a reason with the member of a span that keeps the others waiting."""
    blamed = part.suspect() if part is not None else None
    return because if blamed is None else f"{because}; {blamed}"


def members_cpu_s(of: Callable[[], SpanPart | None]) -> list[float]:
    """Return the CPU seconds of the other members of a span, by rank."""
    part = of()
    if part is None:
        return []
    return [facts.cpu_s for rank, facts in sorted(part.members.items()) if rank != part.rank]


def _free_ports(address: str) -> tuple[int, int]:
    """Return two ports on which nothing listens there now.

    Raises:
        SpawnFailed: the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as one, socket.socket(family) as other:
            for each in (one, other):
                each.bind((address, 0))
            return int(one.getsockname()[1]), int(other.getsockname()[1])
    except (OSError, UnicodeError) as error:
        raise SpawnFailed(f"cannot listen on server.address {address}: {error}") from error

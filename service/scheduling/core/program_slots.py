"""The slots held for the next request of a program, and for how long. Pure.

An agent asks, runs its tools, and asks again with everything said so far. On an engine with a cache per slot, a request
of another program in between overwrites that cache, unless the engine saved it elsewhere. Programs that return to such
a slot show whether it did. While other turns wait, a slot is held no longer than reading the lost cache would take, and
no longer than the program's own pauses suggest. At worst that costs twice the best choice (ski rental: Karlin et al.,
"Competitive snoopy caching", 1988).

Source: specification, "Programs of clients".
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from service.conversations.job.job import Job, JobId, TurnKey
from service.scheduling.core.events import HoldSlot, ProgramReturn, TurnCompleted, WorkerReady
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.queue.affinity import PromptReading, SpeedEstimates
from service.scheduling.core.slots import WorkerSlots
from workers.policy.pace import Mean

PATIENCE: Final = 4.0  # multiple of the program's longest pause so far for which a slot is held
REMEMBERED: Final = 4096  # programs remembered after others used their slots
LEAST_S: Final = 1.0  # least seconds for which a slot is held
STAY: Final = 8.0  # multiple of its reading time for which a program may stay before others have a turn


class ProgramStay(msgspec.Struct):
    """The stay of a program on its slot: ``seconds`` without a break, and its longest pause.

    After its last request the slot ``was_held`` for this one, or ``was_let_go`` to others that waited. ``pause_s`` is
    None for a program that has never returned.
    """

    model: str
    owner: str | None
    known_tokens: int = 0
    was_held: bool = False
    was_let_go: bool = False
    seconds: float = 0.0
    pause_s: float | None = None


class ProgramSlots:
    """Follows programs from one request to the next, and holds slots in the in-flight pool."""

    def __init__(self, in_flight: InFlightPool, speeds: SpeedEstimates, waiting: Callable[[str], int]) -> None:
        self._in_flight = in_flight
        self._speeds = speeds
        self._waiting = waiting  # counts the waiting turns of a model
        self._losses: dict[str, Mean] = {}  # by model: the share of known tokens that had to be read again
        self.stays: dict[JobId, ProgramStay] = {}  # by request that has not ended
        self._holds: dict[TurnKey, tuple[ProgramStay, WorkerSlots]] = {}  # by ended request whose slot is held
        self._let_go: OrderedDict[TurnKey, None] = OrderedDict()  # the newest requests whose slots others have used
        self._keeping: set[str] = set()  # models whose engines keep a cache for each slot

    def __repr__(self) -> str:
        return f"<ProgramSlots stays={len(self.stays)} held={len(self._holds)}>"

    def note_worker(self, worker: WorkerReady) -> None:
        """Record whether a model's engines keep a cache for each slot."""
        if worker.has_slot_caches:
            self._keeping.add(worker.model)

    def admit_request(self, job: Job, back: ProgramReturn) -> float | None:
        """Admit a request of a program; return the seconds for which its held slot was idle, None if none was held."""
        stay = ProgramStay(model=job.agents[0].model, owner=job.owner, known_tokens=back.known_tokens)
        self.stays[job.id] = stay
        before = None if back.last is None else self._end(back.last)
        if before is not None:
            stay.was_held, stay.seconds = True, before.seconds + back.pause_s
            stay.pause_s = max(before.pause_s or 0.0, back.pause_s)
            return back.pause_s
        stay.pause_s = back.pause_s if back.known_tokens else None
        stay.was_let_go = back.last in self._let_go
        return None

    def end_request(self, event: TurnCompleted, worker: str) -> HoldSlot | None:
        """End a request; hold its slot if it is a program's and holding pays."""
        stay = self.stays.get(event.key.job_id)
        if stay is None or event.reading is None or stay.model not in self._keeping:
            return None
        if stay.was_let_go:
            self._learn(stay, event.reading)
        stay.seconds += event.seconds or 0.0
        if not self._waiting(stay.model):
            return None
        hold = self._hold(event.key, worker, stay, event.reading.context_tokens)
        if hold is None:
            self._let_others(event.key)
        return hold

    def _hold(self, key: TurnKey, worker: str, stay: ProgramStay, tokens: int) -> HoldSlot | None:
        loss = self._losses.get(stay.model)
        if loss is None or stay.pause_s is None:
            return None
        again_s = loss.value * tokens * (self._speeds.read_s(stay.model) or 0.0)
        pays = stay.pause_s <= again_s and stay.seconds <= STAY * again_s
        holder = self._in_flight.worker(worker)
        if not (pays and holder.hold(key)):
            return None
        self._holds[key] = stay, holder
        return HoldSlot(key=key, seconds=min(again_s, max(LEAST_S, PATIENCE * stay.pause_s)))

    def forget_request(self, job_id: JobId) -> None:
        """Forget a request that has ended."""
        self.stays.pop(job_id, None)

    def expire(self, key: TurnKey) -> ProgramStay | None:
        """Release a slot that was held; return the stay that it was held for until now."""
        stay = self._end(key)
        self._let_others(key)
        return stay

    def _end(self, key: TurnKey) -> ProgramStay | None:
        stay, holder = self._holds.pop(key, (None, None))
        return stay if holder is not None and holder.end_hold(key) else None

    def _let_others(self, key: TurnKey) -> None:
        self._let_go[key] = None
        if len(self._let_go) > REMEMBERED:
            self._let_go.popitem(last=False)

    def _learn(self, stay: ProgramStay, reading: PromptReading) -> None:
        """Learn how much of a program's prompt was still cached on a slot that others have used."""
        found = reading.context_tokens - reading.answer_tokens - reading.fresh_tokens
        lost = max(0, stay.known_tokens - found) / max(1, stay.known_tokens)
        self._losses.setdefault(stay.model, Mean()).add(lost)

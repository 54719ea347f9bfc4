"""Whose slot waits for the next request of its program, and for how long. Pure.

An agent asks, runs its tools, and asks again with all that was said before. On an engine whose slots hold caches of
their own, a request of another program in between costs it that cache, unless the engine has put it elsewhere. Whether
it does is learned from programs that came back to such a slot. What was lost so is read again; for no longer than that
would take, and than the program's own pauses so far suggest, its slot is kept for it while others wait. At worst that
costs twice what the best choice would have (ski rental: Karlin et al., "Competitive snoopy caching", 1988).

Source: specification, "Programs of clients".
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from service.conversations.job import Job, JobId, TurnKey
from service.scheduling.core.events import HoldSlot, ProgramReturn, TurnCompleted, WorkerReady
from service.scheduling.core.in_flight_pool import InFlightPool
from service.scheduling.core.queue.affinity import PromptReading, SpeedEstimates
from workers.policy.pace import Mean

PATIENCE: Final = 4.0  # times its longest pause so far a program is waited for
REMEMBERED: Final = 4096  # programs whose slots others have had
LEAST_S: Final = 1.0  # for which it is waited, whatever its pauses were
STAY: Final = 8.0  # times what reading again costs, a program may go before all others; then they have their turn


class ProgramStay(msgspec.Struct):
    """The stay of a program on its slot: for how many ``seconds`` running, and with which longest pause.

    After its last request the slot ``was_held`` for this one, or it ``was_let_go`` to others that waited. One that has
    never come back has no ``pause_s``; perhaps it never will.
    """

    model: str
    owner: str | None
    known_tokens: int = 0
    was_held: bool = False
    was_let_go: bool = False
    seconds: float = 0.0
    pause_s: float | None = None


class ProgramSlots:
    """Follows programs from one request to the next; it writes what is held of the in-flight pool."""

    def __init__(self, in_flight: InFlightPool, speeds: SpeedEstimates, waiting: Callable[[str], int]) -> None:
        self._in_flight = in_flight
        self._speeds = speeds
        self._waiting = waiting  # turns of a model
        self._losses: dict[str, Mean] = {}  # by model: the share of what was known that had to be read again
        self.stays: dict[JobId, ProgramStay] = {}  # of requests that have not ended
        self._holds: dict[TurnKey, ProgramStay] = {}  # of requests that have; their slots are held, or were just now
        self._let_go: OrderedDict[TurnKey, None] = OrderedDict()  # the newest whose slots others have had
        self._keeping: set[str] = set()  # models whose engines keep a cache for each slot

    def __repr__(self) -> str:
        return f"<ProgramSlots stays={len(self.stays)} held={len(self._holds)}>"

    def note_worker(self, worker: WorkerReady) -> None:
        """Take how a model's engines keep caches."""
        if worker.has_slot_caches:
            self._keeping.add(worker.model)

    def admit_request(self, job: Job, back: ProgramReturn) -> float | None:
        """Take a request of a program; return for how many seconds its slot has stood idle for it, if it has."""
        stay = ProgramStay(model=job.agents[0].model, owner=job.owner, known_tokens=back.known_tokens)
        self.stays[job.id] = stay
        before = self._holds.pop(back.last, None) if back.last is not None and self._holds else None
        if before is not None and back.last is not None and self._in_flight.end_hold(back.last):
            stay.was_held, stay.seconds = True, before.seconds + back.pause_s
            stay.pause_s = max(before.pause_s or 0.0, back.pause_s)
            return back.pause_s
        stay.pause_s = back.pause_s if back.known_tokens else None
        stay.was_let_go = back.last in self._let_go
        return None

    def end_request(self, event: TurnCompleted, worker: str) -> HoldSlot | None:
        """Take the end of a request of ``stays``; hold its slot where that pays."""
        stay = self.stays[event.key.job_id]
        if event.reading is None or stay.model not in self._keeping:
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
        if not (pays and self._in_flight.hold(key, worker)):
            return None
        self._holds[key] = stay
        return HoldSlot(key=key, seconds=min(again_s, max(LEAST_S, PATIENCE * stay.pause_s)))

    def expire(self, key: TurnKey) -> ProgramStay | None:
        """Let others have a slot that was held; return whose stay it was, if it was held still."""
        stay = self._holds.pop(key, None)
        self._let_others(key)
        return stay if self._in_flight.end_hold(key) else None

    def _let_others(self, key: TurnKey) -> None:
        self._let_go[key] = None
        if len(self._let_go) > REMEMBERED:
            self._let_go.popitem(last=False)

    def _learn(self, stay: ProgramStay, reading: PromptReading) -> None:
        """Learn from a program whose slot others have had what it has found again."""
        found = reading.context_tokens - reading.answer_tokens - reading.fresh_tokens
        lost = max(0, stay.known_tokens - found) / max(1, stay.known_tokens)
        self._losses.setdefault(stay.model, Mean()).add(lost)
